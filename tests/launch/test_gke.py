"""The YAML of --cluster gke, against the models that JobSet's and Kubernetes's schemas generate."""

import os
import re
import subprocess

import pytest
import yaml
from conftest import BASE, TINY, complete

from maxramp.config.load import load
from maxramp.launch import gke
from maxramp.launch.__main__ import main
from maxramp.launch.jobs import Run

# Kubeflow Trainer's pydantic models of JobSet v1alpha2 and its objects, from their OpenAPI files.
models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install -e '.[test]'")

HARMLESS = """no $(touch pwned) `touch pwned` 'single' "double" ; touch pwned"""
GPU = [
    *TINY,
    *("num_nodes=4", "devices_per_node=8", "step_batch_size_unit=samples", "steps=90"),
    "step_batch_size_schedule=0:16 800:32 2000:64",
    *("per_device_batch_size=2", "restart_minutes=0", "container_image=example.com/train:1"),
    *("gke_accelerator=nvidia-h200-141gb", "gke_bucket=runs"),
    "base_output_directory=/mnt/shared/runs",
    f"run_name={HARMLESS}",
]
TPU = [
    *("num_nodes=4", "devices_per_node=4", "gke_accelerator=tpu-v5p-slice", "gke_topology=2x2x1"),
    *("gke_bucket=", "gke_volume_claim=lustre", "gke_queue=research"),
    *("gke_service_account=trainer", "run_name=no"),
]


def words_of(*arguments: str) -> list[str]:
    return [BASE, *GPU, *arguments]


def manifests(*arguments: str) -> dict[str, str]:
    line = words_of(*arguments)
    return gke.manifests(gke.fill_slices(Run.from_config(load(line), line)))[1]


def jobsets(files: dict[str, str]) -> list[dict]:
    texts = [text for name, text in files.items() if name != "config.yaml"]
    return [yaml.safe_load(text) for text in texts]


def differences(manifest, kept, path="") -> list[str]:
    """Lists what a model dropped of a manifest; it may add defaults."""
    if isinstance(manifest, dict) and isinstance(kept, dict):
        return [x for k in manifest for x in differences(manifest[k], kept.get(k), f"{path}.{k}")]
    if isinstance(manifest, list) and isinstance(kept, list) and len(manifest) == len(kept):
        pairs = enumerate(zip(manifest, kept, strict=True))
        return [x for i, (m, k) in pairs for x in differences(m, k, f"{path}[{i}]")]
    return [] if manifest == kept else [path]


def dropped(manifest: dict) -> list[str]:
    """Lists the fields of a JobSet that are not in its schema: a model drops what it lacks."""
    kept = models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    return differences(manifest, kept)


def pod_of(jobset: dict) -> dict:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("more", [[], TPU], ids=["gpu", "tpu"])
def test_every_field_is_in_its_schema(more):
    files = manifests(*more)
    for manifest in jobsets(files):
        assert dropped(manifest) == []
    config_map = yaml.safe_load(files["config.yaml"])
    assert set(config_map) == {"apiVersion", "kind", "metadata", "data"}
    assert (config_map["apiVersion"], config_map["kind"]) == ("v1", "ConfigMap")
    metadata = models.IoK8sApimachineryPkgApisMetaV1ObjectMeta.from_dict(config_map["metadata"])
    assert differences(config_map["metadata"], metadata.to_dict()) == []


def test_the_config_in_the_cluster_is_the_one_launched(tmp_path):
    """People can read it, as a block, line by line."""
    text = manifests()["config.yaml"]
    assert "  config.yml: |\n    # model_name: default\n" in text and "\n    steps: 90\n" in text
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_load(text)["data"]["config.yml"])
    config = load([str(path)])
    assert config.run.run_name == HARMLESS and config.checkpoints.stop_at_node_change
    assert config.batch.step_batch_size_schedule == "0:16 800:32 2000:64"
    assert config.batch.num_nodes == 4


def test_every_number_of_nodes_has_a_jobset():
    """16, 32, 64 rows, 2 a device of 8 a node."""
    for nodes, manifest in zip((1, 2, 4), jobsets(manifests()), strict=True):
        job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert job["parallelism"] == job["completions"] == nodes
        container, name = pod_of(manifest)["containers"][0], manifest["metadata"]["name"]
        variables = {e["name"]: e["value"] for e in container["env"]}
        # Pod 0 of job 0 of replicated job "nodes", in the headless service of the JobSet's name.
        assert variables["MAXRAMP_COORDINATOR"].startswith(f"{name}-nodes-0-0.{name}:")
        assert variables["MAXRAMP_NUM_PROCESSES"] == str(nodes)
        assert len(f"{name}-nodes-0-0") < 50  # of the 63 of a pod's name
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_a_run_in_an_object_storage_needs_no_volume(monkeypatch):
    """The pods write there themselves; data may still be on a volume that they mount."""
    memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
    monkeypatch.setattr("maxramp.files.place.storage.store_of", lambda scheme: memory())
    for bucket, names in (("", ["config", "memory"]), ("text", ["config", "shared", "memory"])):
        keys = ["base_output_directory=gs://runs/here", f"gke_bucket={bucket}"]
        files = manifests(*keys, "run_name=far")
        for manifest in jobsets(files):
            assert dropped(manifest) == []
            pod = pod_of(manifest)
            mounts = pod["containers"][0]["volumeMounts"]
            assert [v["name"] for v in pod["volumes"]] == [m["name"] for m in mounts] == names
        config = yaml.safe_load(yaml.safe_load(files["config.yaml"])["data"]["config.yml"])
        assert config["base_output_directory"] == "gs://runs/here"


def test_tpu_jobs_grow_by_slices():
    # 16 rows on 8 chips, 32 on 16, and 64 in two passes
    for slices, m in zip((2, 4), jobsets(manifests(*TPU)), strict=True):
        assert m["spec"]["replicatedJobs"][0]["replicas"] == slices
        pod = pod_of(m)
        assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2x1"
        assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
        assert m["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
        assert m["metadata"]["annotations"]["maxramp/run-name"] == "no"


def test_what_a_supervisor_gives_up_fails_and_a_stopped_pod_is_replaced():
    manifest = jobsets(manifests())[0]
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    rules = [(rule["action"], rule.get("onExitCodes")) for rule in job["podFailurePolicy"]["rules"]]
    assert [action for action, _ in rules] == ["Ignore", "FailJob", "Ignore"]
    codes = [(on["operator"], on["values"]) for _, on in rules if on]
    assert codes == [("NotIn", [76, 137]), ("In", [76])]
    assert job["backoffLimit"] == 0  # every other failure goes to the JobSet, which restarts all
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert manifest["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy asks for it


def test_lines_of_setup_run_before_the_supervisor():
    container = pod_of(jobsets(manifests('setup_lines=["export A=1"]'))[0])["containers"][0]
    words = [*container["command"], "sh", "-c", "echo $A $0", "b c"]
    assert subprocess.check_output(words, text=True) == "1 b c\n"
    program = ["python", "-m", "maxramp.launch.gke_cluster", "1", "/dev/termination-log"]
    assert container["args"] == [*program, "/etc/maxramp/config.yml"]


def names_of(*arguments: str) -> set[str]:
    """Returns the names of all objects of a launch."""
    texts = manifests(*arguments).values()
    return {yaml.safe_load(text)["metadata"]["name"] for text in texts}


LONG = "run_name=llama3-8b-ablation-learning-rate-seed"


@pytest.mark.parametrize(
    "other",
    [
        *(f"{LONG}2", "base_output_directory=/mnt/shared/elsewhere", "gke_bucket=other-runs"),
        *("steps=91", "container_image=example.com/train:2"),
    ],
)
def test_another_launch_has_objects_of_its_own(other):
    """It overwrites no ConfigMap, and takes no completed JobSet for its own."""
    assert names_of(f"{LONG}1") == names_of(f"{LONG}1")
    assert not names_of(f"{LONG}1") & names_of(f"{LONG}1", other)


@pytest.mark.parametrize("key", [f"{LONG}1", f"run_name={HARMLESS}", "run_name=7", "run_name=Ä"])
def test_names_and_labels_are_what_kubernetes_takes(key):
    for name in names_of(key):
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) and len(name) < 40
    for text in manifests(key).values():
        for value in yaml.safe_load(text)["metadata"]["labels"].values():
            assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", value)
            assert len(value) < 64


def test_the_label_joins_the_launches_of_a_run():
    def label(*arguments: str) -> str:
        (name,) = {m["metadata"]["labels"]["maxramp/run"] for m in jobsets(manifests(*arguments))}
        return name

    assert label(f"{LONG}1") == label(f"{LONG}1", "steps=91") != label(f"{LONG}2")


def test_lines_of_setup_stay_private(tmp_path, monkeypatch, capsys):
    """They may hold passwords: not in the configuration, and the files are their owner's."""
    files = manifests('setup_lines=["export KEY=secret"]')
    assert "secret" not in files["config.yaml"]
    assert all("export KEY=secret" in str(jobset) for jobset in jobsets(files))
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text("#!/bin/sh\necho no cluster >&2\nexit 1\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{kubectl.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main([BASE, *GPU, 'setup_lines=["export KEY=secret"]', "--cluster", "gke"]) == 2
    assert capsys.readouterr().err.startswith("error: kubectl get jobset")
    written = list(tmp_path.glob("gke/*/*"))
    assert {path.name for path in written} >= {"config.yaml"}
    assert {path.stat().st_mode & 0o077 for path in written} == {0}


def test_a_dry_run_prints_every_manifest():
    line = [BASE, *GPU, "--cluster", "gke", "--dry-run"]
    done = complete(*line, module="launch")
    for name, text in manifests().items():
        assert f"### {name}\n{text}" in done.stdout
