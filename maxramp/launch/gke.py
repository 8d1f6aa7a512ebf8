"""Jobs on Kubernetes: a JobSet for the stages on the same nodes, applied one after another.

`gke/NAME/` in the folder of the launch holds the YAML and `run.sh`, which applies a JobSet, waits
for its end and goes on to the next. It can be ended and started again at any time: what is
completed stays so.

NAME ends in a hash of everything that is applied, so a changed configuration gets objects of its
own: it neither changes those of a job that runs nor finds them completed. The label `maxramp/run`
joins all objects of a run; run.sh refuses to start beside a job of the same run.

What the exit statuses become: 75 completes the JobSet (it fails the last one, which nothing
follows); 76, and pods that Kubernetes takes away, are replaced without being counted; 2 fails the
JobSet at once; anything else restarts all its pods, up to `max_restarts` times.
"""

import hashlib
import itertools
import json
import pathlib
import re
import shlex
import shutil
import subprocess
from typing import Any

import yaml

from maxramp.config.load import to_yaml
from maxramp.errors import ConfigError
from maxramp.keys.section import is_object_storage
from maxramp.launch.jobs import TRAINER_KEYS, Run, write_private
from maxramp.launch.jobset import TPUS, jobset

_RUN_SH = r"""#!/bin/sh
# Runs the JobSets of a run one after another. Written by maxramp.launch; it can be started again.
set -eu
cd "$(dirname "$0")"
is() {
    kubectl -n @NAMESPACE@ wait "--for=condition=$1" "--timeout=$2" "jobset/$name" 2> /dev/null
}
# JobSets of this run that another configuration started, each with the conditions that are true.
states='{.status.conditions[?(@.status=="True")].type}'
others=$(kubectl -n @NAMESPACE@ get jobset -l 'maxramp/run=@RUN@,maxramp/launch!=@LAUNCH@' \
    -o "jsonpath={range .items[*]}{.metadata.name} $states{\"\n\"}{end}")
active=$(echo "$others" | grep -v -E "^$| (.* )?(Completed|Failed)( |$)" || true)
if [ -n "$active" ]; then
    echo "error:" ${active%% *} "of this run is active with another configuration;" \
        "kubectl -n @NAMESPACE@ delete jobset" ${active%% *} "ends it" >&2
    exit 2
fi
kubectl apply -f config.yaml
for name in @NAMES@; do
    if is Completed 0s; then
        echo "$name was completed before; kubectl -n @NAMESPACE@ delete jobset $name forgets it"
        continue
    fi
    kubectl apply -f "$name.yaml"
    until is Completed 60s; do
        if is Failed 0s; then
            echo "$name failed: kubectl -n @NAMESPACE@ describe jobset $name says why;" \
                "delete it and start again to go on" >&2
            exit 1
        fi
        sleep 1
    done
done
"""


def apply(run: Run, dry_run: bool) -> int:
    """Writes the YAML and runs it to its end; returns the exit status.

    Raises:
      ConfigError: a key does not fit the cluster, or there is no kubectl here.
    """
    files = manifests(run)
    if dry_run:
        for name, text in files.items():
            print(f"### {name}\n{text}")
        return 0
    if not shutil.which("kubectl"):
        raise ConfigError(
            "--cluster gke: no kubectl on the path; install it and get the cluster's "
            "credentials, or use --dry-run to see the YAML"
        )
    # The run's folder is the cluster's; what is applied is kept here.
    folder = pathlib.Path("gke") / _launch_name(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_private(folder / name, text)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write there: {error.strerror}") from None
    return subprocess.run(["sh", str(folder / "run.sh")], check=False).returncode


def manifests(run: Run) -> dict[str, str]:
    """File name -> content: config.yaml, a JobSet for each job of the run, and run.sh.

    Raises:
      ConfigError: a key does not fit the cluster.
    """
    launch = _launch_name(run)
    labels = {"maxramp/run": _run_label(run), "maxramp/launch": launch}
    config_map = _config_map(run)
    config_map["metadata"] |= {"name": launch, "labels": labels}
    files = {"config.yaml": _dump(config_map)}
    names = []
    for one in _jobsets(run, launch):
        names.append(one["metadata"]["name"])
        one["metadata"].setdefault("labels", {}).update(labels)
        files[f"{names[-1]}.yaml"] = _dump(one)
    values = {
        "NAMES": " ".join(names),
        "NAMESPACE": shlex.quote(run.keys.gke_namespace),
        "RUN": labels["maxramp/run"],
        "LAUNCH": launch,
    }
    files["run.sh"] = re.sub("@([A-Z]+)@", lambda match: values[match[1]], _RUN_SH)
    return files


def _launch_name(run: Run) -> str:
    """The run's name with a hash of all that is applied: another configuration, another name."""
    _check(run)
    content = json.dumps([_config_map(run), *_jobsets(run, "")], sort_keys=True)
    return _hashed(run.name, content)


def _run_label(run: Run) -> str:
    """A run is a folder of a storage: what all jobs that write there have in common."""
    keys = run.keys
    far = is_object_storage(str(run.folder))  # whatever volume the data may be on
    storage = [keys.gke_namespace, *(("", "") if far else (keys.gke_bucket, keys.gke_volume_claim))]
    return _hashed(run.name, json.dumps([*storage, str(run.folder)]))


def _hashed(name: str, content: str) -> str:
    """A name that Kubernetes takes, short because the names of pods begin with it.

    Its last part tells two contents apart where the first is cut or rewritten to the same.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:21].strip("-")
    if not slug[:1].isalpha():
        slug = f"run-{slug}".rstrip("-")
    return f"{slug}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _config_map(run: Run) -> dict[str, Any]:
    """The configuration as the jobs read it, without a name."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"namespace": run.keys.gke_namespace},
        # What the command line would have changed is in it.
        "data": {"config.yml": to_yaml(run.config.replace(**TRAINER_KEYS))},
    }


def _jobsets(run: Run, launch: str) -> list[dict[str, Any]]:
    """The JobSets of a launch of that name, in the order in which they run."""
    counts = [nodes for nodes, _ in itertools.groupby(stage.nodes for stage in run.stages)]
    return [
        jobset(run, f"{launch}-{i}", launch, nodes, last=i == len(counts) - 1)
        for i, nodes in enumerate(counts)
    ]


def _dump(manifest: dict[str, Any]) -> str:
    """YAML as Kubernetes reads it, which is 1.1: a run named "no" needs quotes."""
    return yaml.dump(manifest, Dumper=_Manifest, sort_keys=False, width=100)


class _Manifest(yaml.SafeDumper):
    """Texts of several lines as blocks, in which they can be read."""


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Manifest.add_representer(str, _as_block)


def _check(run: Run) -> None:
    keys, output = run.keys, run.config.run.base_output_directory
    for name in ("container_image", "gke_accelerator"):
        if not getattr(keys, name):
            raise ConfigError(f"{name} is not given; --cluster gke needs it")
    if keys.processes_per_node != 1:
        raise ConfigError(
            f"processes_per_node={keys.processes_per_node}: a pod of --cluster gke is one "
            "process; use 1"
        )
    for name in ("gke_namespace", "gke_queue", "gke_service_account", "gke_volume_claim"):
        value = getattr(keys, name)
        if value and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", value):
            raise ConfigError(
                f"{name}={value} is no Kubernetes name (lower-case letters, digits, - and .)"
            )
    far = is_object_storage(output)  # the pods need no volume for the run
    volumes = [name for name in (keys.gke_bucket, keys.gke_volume_claim) if name]
    if len(volumes) > 1 or not (volumes or far):
        raise ConfigError(
            f"gke_bucket={keys.gke_bucket} and gke_volume_claim={keys.gke_volume_claim}: "
            "give one of them, the storage that all pods share"
            + ("" if volumes else ", or a base_output_directory such as gs://bucket/folder")
        )
    mount = pathlib.PurePosixPath(keys.gke_mount_path)
    if not far and mount not in (path := pathlib.PurePosixPath(output), *path.parents):
        raise ConfigError(
            f"base_output_directory={output} does not lie below "
            f"gke_mount_path={keys.gke_mount_path}, where the pods see the storage that they "
            "share"
        )
    if keys.gke_accelerator.startswith("tpu") and keys.gke_accelerator not in TPUS:
        raise ConfigError(f"gke_accelerator={keys.gke_accelerator} is not one of {', '.join(TPUS)}")
