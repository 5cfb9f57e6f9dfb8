"""Stands in for `kubectl` and the cluster behind it, for no cluster can be had here.

It takes the commands that the launcher gives, and refuses manifests that the schemas of Kubernetes refuse.
Each pod of a Job is a process of this host, with a name and folders of its own; what it finds set is what
Kubernetes would set, and what the manifest says. An image is what is installed here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from cluster import jobset_schema

STATE = Path("/run/kubectl")
"""Of each host its own: a folder for each Job, in it one for each pod."""
LABELS = {
    "metadata.labels['batch.kubernetes.io/controller-uid']": "0b7e5c1a",
    "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": "4f5f4d57",
    "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "0",
}
JOB, INDEX = "batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index"
_OF_IMAGE = ("PATH", "PYTHONPATH", "HOME")
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 10.0
_POD = """
hostname "$1"; shift
mount --bind hosts /etc/hosts
while [ "$1" != -- ]; do mkdir -p "$2"; mount --bind "$1" "$2"; shift 2; done
shift
set +e; "$@" > log 2>&1; echo $? > status.new; mv status.new status
"""
Parts = Mapping[str, Mapping[str, Any]]


def read(manifest: str) -> dict[str, dict[str, Any]]:
    """The parts of a manifest by their kinds, if they are as they should be."""
    parts = {part["kind"]: part for part in yaml.safe_load_all(Path(manifest).read_text())}
    for part in parts.values():
        jobset_schema.validate(part)
    return parts


def job_of(parts: Parts) -> tuple[str, dict[str, Any]]:
    """Name and spec of the one Job."""
    if "Job" in parts:
        return parts["Job"]["metadata"]["name"], parts["Job"]["spec"]
    (job,) = parts["JobSet"]["spec"]["replicatedJobs"]
    return f"{parts['JobSet']['metadata']['name']}-{job['name']}-0", job["template"]["spec"]


def create(asked: argparse.Namespace) -> None:
    """Starts all pods of a manifest."""
    parts = read(asked.filename)
    job, spec = job_of(parts)
    pod = spec["template"]["spec"]
    domain = pod["subdomain"] if "Job" in parts else parts["JobSet"]["metadata"]["name"]
    names = [f"{job}-{index}" for index in range(spec["completions"])]
    own = socket.gethostbyname(socket.gethostname())
    known = Path("/etc/hosts").read_text()
    for index, name in enumerate(names):
        place = STATE / job / str(index)
        place.mkdir(parents=True)
        names_here = " ".join([*(f"{each}.{domain}" for each in names), name])
        (place / "hosts").write_text(f"{known}{own} {names_here}\n")
        start(place, name, pod, parts)


def start(place: Path, name: str, pod: Mapping[str, Any], parts: Parts) -> None:
    """Starts a pod, and notes its process."""
    (container,) = pod["containers"]
    where = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    mounts = [part for each in pod["volumes"] for part in mounted(place, each, parts, where)]
    image = {each: os.environ[each] for each in _OF_IMAGE if each in os.environ}
    told = {each["name"]: value_of(each, parts) for each in container["env"]}
    process = subprocess.Popen(
        ["unshare", "--mount", "--uts", "sh", "-ec", _POD, "pod", name, *mounts, "--"]
        + container["command"],
        cwd=place,
        env={**image, "JOB_COMPLETION_INDEX": place.name, "HOSTNAME": name, **told},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    (place / "process").write_text(str(process.pid))


def mounted(
    place: Path, volume: Mapping[str, Any], parts: Parts, where: Mapping[str, str]
) -> Sequence[str]:
    """A folder of this host, and where the pod has it."""
    folder = place / volume["name"]
    folder.mkdir()
    if "configMap" in volume:
        assert volume["configMap"]["name"] == parts["ConfigMap"]["metadata"]["name"]
        for name, text in parts["ConfigMap"]["data"].items():
            (folder / name).write_text(text)
    return str(folder), where[volume["name"]]


def value_of(variable: Mapping[str, Any], parts: Parts) -> str:
    """What a variable of a container is set to."""
    if "value" in variable:
        return str(variable["value"])
    source = variable["valueFrom"]
    if "fieldRef" in source:
        return LABELS[source["fieldRef"]["fieldPath"]]
    asked = source["secretKeyRef"]
    assert asked["name"] == parts["Secret"]["metadata"]["name"]
    return str(parts["Secret"]["stringData"][asked["key"]])


def places(selector: str) -> Iterator[Path]:
    """Folders of the pods that a selector asks for."""
    asked = dict(part.split("=") for part in selector.split(","))
    yield from sorted((STATE / asked[JOB]).glob(asked.get(INDEX, "*")))


def get(asked: argparse.Namespace) -> None:
    """Prints Jobs or pods."""
    assert asked.output == "json"
    found = [{"status": {}}] if asked.what == "jobs" else map(as_pod, places(asked.selector))
    print(json.dumps({"items": list(found)}))


def as_pod(place: Path) -> dict[str, Any]:
    """The pod as Kubernetes shows it."""
    status = place / "status"
    code = int(status.read_text()) if status.exists() else None
    phase = "Running" if code is None else "Failed" if code else "Succeeded"
    state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
    name = f"{place.parent.name}-{place.name}-abcde"
    shown = {"phase": phase, "containerStatuses": [{"state": state}]}
    return {"metadata": {"name": name}, "status": shown}


def logs(asked: argparse.Namespace) -> None:
    """Prints the last that pods have said; or all that one says, until it ends."""
    if asked.selector:
        for place in places(asked.selector):
            for line in (place / "log").read_text().splitlines()[-asked.tail :]:
                print(f"[pod/{place.name}] {line}")
        return
    job, index, _ = asked.pod.rsplit("-", 2)
    place = STATE / job / index
    has_ended = False
    with (place / "log").open() as log:
        while not has_ended:
            has_ended = (place / "status").exists()
            print(log.read(), end="", flush=True)
            time.sleep(_LOOK_SECONDS)


def delete(asked: argparse.Namespace) -> None:
    """Ends the pods of a manifest, and forgets them."""
    job, _ = job_of(read(asked.filename))
    groups = [int(file.read_text()) for file in (STATE / job).glob("*/process")]
    deadline = time.monotonic() + _GRACE_SECONDS
    while groups:
        number = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
        groups = [group for group in groups if is_signalled(group, number)]
        time.sleep(_LOOK_SECONDS)
    shutil.rmtree(STATE / job)


def is_signalled(group: int, number: signal.Signals) -> bool:
    """Whether there is still somebody to hear it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Does what it is asked for."""
    parser = argparse.ArgumentParser(prog="kubectl")
    commands = parser.add_subparsers(required=True)
    for does in (create, get, logs, delete):
        command = commands.add_parser(does.__name__)
        command.set_defaults(does=does)
        for option in ("filename", "selector", "field-selector", "output", "cascade", "timeout"):
            command.add_argument(f"--{option}")
        command.add_argument("--tail", type=int)
        for option in ("follow", "prefix", "ignore-not-found"):
            command.add_argument(f"--{option}", action="store_true")
    commands.choices["get"].add_argument("what", choices=["pods", "jobs"])
    commands.choices["logs"].add_argument("pod", nargs="?")
    asked = parser.parse_args()
    asked.does(asked)


if __name__ == "__main__":
    main()
