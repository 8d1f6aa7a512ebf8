"""The YAML of --cluster gke, against the models that JobSet's and Kubernetes's schemas generate."""

import os
import signal
import subprocess
import time

import pytest
import yaml
from conftest import BASE, TINY, run

from maxramp import config as config_lib
from maxramp.launch import gke
from maxramp.launch.jobs import Run

# Kubeflow Trainer's API package: pydantic models of JobSet v1alpha2 and of the Kubernetes objects
# in it, generated from the projects' OpenAPI files.
models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install -e '.[test]'")

HARMLESS = """no $(touch pwned) `touch pwned` 'single' "double" ; touch pwned"""
GPU = [
    *(*TINY, "num_nodes=4", "devices_per_node=8", "step_batch_size_unit=samples", "steps=90"),
    *("step_batch_size_schedule=0:16 800:32 2000:64", "per_device_batch_size=2"),
    "restart_minutes=0",
    *("container_image=example.com/train:1", "gke_accelerator=nvidia-h200-141gb"),
    *("gke_bucket=runs", "base_output_directory=/mnt/shared/runs", f"run_name={HARMLESS}"),
]
TPU = [
    *("num_nodes=4", "devices_per_node=4", "gke_accelerator=tpu-v5p-slice", "gke_topology=2x2x1"),
    *("gke_bucket=", "gke_volume_claim=lustre", "gke_queue=research"),
    *("gke_service_account=trainer", "run_name=no"),
]


def manifests(*arguments: str) -> dict[str, str]:
    merged = dict(argument.split("=", 1) for argument in (*GPU, *arguments))
    line = [BASE, *(f"{name}={value}" for name, value in merged.items())]
    return gke.manifests(Run.of(config_lib.load(line), line))


def jobsets(files: dict[str, str]) -> list[dict]:
    texts = [text for name, text in files.items() if name not in ("config.yaml", "run.sh")]
    return [yaml.safe_load(text) for text in texts]


def dropped(given, kept, where="") -> list[str]:
    """What a model did not take over; it may add defaults."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [x for k in given for x in dropped(given[k], kept.get(k), f"{where}.{k}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [x for i, (g, k) in pairs for x in dropped(g, k, f"{where}[{i}]")]
    return [] if given == kept else [where]


def read_by_schema(manifest: dict) -> dict:
    return models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()


@pytest.mark.parametrize("more", [[], TPU], ids=["gpu", "tpu"])
def test_schemas(more):
    """Every field is one of the schema's, of its type: a model drops what it does not know."""
    found = jobsets(files := manifests(*more))
    for manifest in found:
        assert dropped(manifest, read_by_schema(manifest)) == []
    config_map = yaml.safe_load(files["config.yaml"])
    assert set(config_map) == {"apiVersion", "kind", "metadata", "data"}
    assert (config_map["apiVersion"], config_map["kind"]) == ("v1", "ConfigMap")
    metadata = models.IoK8sApimachineryPkgApisMetaV1ObjectMeta.from_dict(config_map["metadata"])
    assert dropped(config_map["metadata"], metadata.to_dict()) == []


@pytest.mark.parametrize("path", [("spec", "replicas"), ("spec", "failurePolicy", "restarts")])
def test_the_schema_check_can_fail(path):
    manifest = jobsets(manifests())[0]
    inner = manifest
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = 3
    assert dropped(manifest, read_by_schema(manifest)) == [f".{'.'.join(path)}"]


def test_a_jobset_for_every_number_of_nodes():
    """16, 32, 64 rows, 2 a device of 8 a node."""
    found = jobsets(manifests())
    jobs = [m["spec"]["replicatedJobs"][0]["template"]["spec"] for m in found]
    assert [(j["parallelism"], j["completions"]) for j in jobs] == [(1, 1), (2, 2), (4, 4)]
    for manifest, job in zip(found, jobs, strict=True):
        container = job["template"]["spec"]["containers"][0]
        given = {e["name"]: e["value"] for e in container["env"]}
        name = manifest["metadata"]["name"]
        # Pod 0 of job 0 of replicated job "nodes", in the headless service of the JobSet's name.
        assert given["MAXRAMP_COORDINATOR"].startswith(f"{name}-nodes-0-0.{name}:")
        assert given["MAXRAMP_NUM_PROCESSES"] == str(job["completions"])
        assert len(f"{name}-nodes-0-0") < 50  # of the 63 of a pod's name
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_tpu_jobs_grow_by_slices():
    found = jobsets(manifests(*TPU))
    replicas = [m["spec"]["replicatedJobs"][0]["replicas"] for m in found]
    assert replicas == [2, 4]  # 16 rows on 8 chips, 32 on 16, and 64 in two passes
    for m in found:
        pod = m["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2x1"
        assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
        assert m["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
        assert m["metadata"]["annotations"]["maxramp/run-name"] == "no"


def test_the_config_in_the_cluster_is_the_one_launched(tmp_path):
    text = yaml.safe_load(manifests()["config.yaml"])["data"]["config.yml"]
    path = tmp_path / "config.yml"
    path.write_text(text)
    config = config_lib.load([str(path)])
    assert config.run_name == HARMLESS and config.stop_at_node_change
    assert config.step_batch_size_schedule == "0:16 800:32 2000:64" and config.num_nodes == 4


def test_exit_statuses():
    manifest = jobsets(manifests())[0]
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    rules = [
        (rule["action"], rule.get("onExitCodes", {}).get("values"))
        for rule in job["podFailurePolicy"]["rules"]
    ]
    assert rules == [("FailJob", [2]), ("Ignore", [76]), ("Ignore", None)]
    assert job["backoffLimit"] == 0  # every other failure goes to the JobSet, which restarts all
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy asks for it


def container_command(*program: str) -> list[str]:
    job = jobsets(manifests())[0]["spec"]["replicatedJobs"][0]["template"]["spec"]
    return [*job["template"]["spec"]["containers"][0]["command"], *program]


@pytest.mark.parametrize("status, seen", [(0, 0), (75, 0), (76, 76), (2, 2), (1, 1), (137, 137)])
def test_what_a_container_ends_with(status, seen):
    done = subprocess.run(container_command("sh", "-c", f"exit {status}"), check=False, timeout=20)
    assert done.returncode == seen


def test_a_container_hands_sigterm_on(tmp_path):
    """The trainer saves and ends with 76, and so does the container."""
    trainer = f"trap 'sleep 0.3; exit 76' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done"
    process = subprocess.Popen(container_command("sh", "-c", trainer))
    deadline = time.monotonic() + 20
    while not (tmp_path / "up").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 76


def test_run_sh_applies_one_after_another(tmp_path):
    """With a kubectl that writes down what it is asked (there is no cluster here)."""
    for name, text in manifests().items():
        (tmp_path / name).write_text(text)
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> "$LOG"\n')
    kubectl.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{kubectl.parent}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
    }
    subprocess.run(["sh", str(tmp_path / "run.sh")], env=environment, check=True, timeout=20)
    asked = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [words[-1] for words in asked if words[0] == "apply"] == [
        "config.yaml",
        *(f"{m['metadata']['name']}.yaml" for m in jobsets(manifests())),
    ]
    assert [words[3] for words in asked if words[0] == "-n"] == ["--for=condition=Completed"] * 3
    assert not list(tmp_path.glob("**/pwned"))


def test_dry_run_prints_everything():
    line = [BASE, *GPU, "--cluster", "gke", "--dry-run"]
    done = run(*line, module="launch")
    assert done.returncode == 0, done.stderr
    for name, text in manifests().items():
        assert f"### {name}\n{text}" in done.stdout
