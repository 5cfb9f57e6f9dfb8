"""Has Kubernetes run a Job, and follows its first pod: the program that the launcher `kubernetes` starts.

It speaks with the cluster by `kubectl` alone. What the pod of rank 0 says comes out of it, and it ends with
that pod's exit status. What it has created is deleted when it ends, also by SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_LOOK_SECONDS = 1.0
_DELETE_SECONDS = 10
"""So long the end of the pods is waited for."""
_PATIENCE = 30
"""How often a question is asked that the cluster does not answer."""
_LAST_LINES = 30
_UNKNOWN = 1
"""The exit status where that of the pod cannot be told."""


class Kubectl:
    """Runs `kubectl`."""

    def __init__(self, command: Sequence[str]) -> None:
        """Takes the program, with its options."""
        self._command = command

    def __call__(self, *arguments: str) -> str:
        """Runs it to its end; what it printed.

        Raises:
            CalledProcessError: It has failed, and has said why.
        """
        command = [*self._command, *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    def found(self, *what: str) -> dict[str, Any]:
        """A list of objects, as the cluster has them now."""
        failures = 0
        while True:
            try:
                found: dict[str, Any] = json.loads(self("get", *what, "--output=json"))
            except subprocess.CalledProcessError:
                failures += 1
                if failures == _PATIENCE:
                    raise
                time.sleep(_LOOK_SECONDS)
            else:
                return found

    def lines(self, *arguments: str) -> Iterator[str]:
        """What it prints, as it comes."""
        with subprocess.Popen(
            [*self._command, *arguments], stdout=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            try:
                yield from process.stdout
            finally:
                process.terminate()


class Job:
    """A Job of which each pod is a rank."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        self._kubectl = kubectl
        self._name = name
        self._pods = f"--selector=batch.kubernetes.io/job-name={name}"
        self._said = 0
        """Lines of rank 0 that were passed on."""

    def follow(self) -> int:
        """Passes on what rank 0 says until it ends; gives its exit status."""
        status = self._follow() if self._has_begun() else _UNKNOWN
        if status:
            with contextlib.suppress(subprocess.CalledProcessError):
                last = self._kubectl("logs", self._pods, "--prefix", f"--tail={_LAST_LINES}")
                print(last, file=sys.stderr)
        return status

    def _has_begun(self) -> bool:
        """Whether rank 0 runs, or ever has, once that is known."""
        told = ""
        while (why := _why_not_begun(self._first())) is not None:
            failure = self._failure()
            if failure:
                print(f"job {self._name} has failed: {failure}", file=sys.stderr)
                return False
            if why not in ("", told):
                print(f"the pod of rank 0 waits: {why}", flush=True)
                told = why
            time.sleep(_LOOK_SECONDS)
        return True

    def _follow(self) -> int:
        while True:
            pod = self._first()
            status = _status(pod)
            if pod is not None:
                self._pass_on(pod["metadata"]["name"])
            if status is not None:
                return status
            time.sleep(_LOOK_SECONDS)

    def _pass_on(self, pod: str) -> None:
        """Reads from the beginning: the connection to one that still runs may have been lost."""
        for number, line in enumerate(self._kubectl.lines("logs", "--follow", pod), start=1):
            if number > self._said:
                print(line, end="", flush=True)
                self._said = number

    def _first(self) -> dict[str, Any] | None:
        """The pod of rank 0, if there is one now."""
        first = f"{self._pods},batch.kubernetes.io/job-completion-index=0"
        pods: list[dict[str, Any]] = self._kubectl.found("pods", first)["items"]
        return pods[0] if pods else None

    def _failure(self) -> str:
        """Why it has failed; empty: it has not."""
        (job,) = self._kubectl.found("jobs", f"--field-selector=metadata.name={self._name}")[
            "items"
        ]
        conditions = job["status"].get("conditions", [])
        return next((each["message"] for each in conditions if each["type"] == "Failed"), "")


def _why_not_begun(pod: Mapping[str, Any] | None) -> str | None:
    """What a pod waits for, as far as that is told; None: it waits no more."""
    if pod is None:
        return ""
    status = pod["status"]
    if status.get("phase") in ("Running", "Succeeded", "Failed"):
        return None
    waiting = [each["state"].get("waiting", {}) for each in status.get("containerStatuses", [])]
    scheduled = [each for each in status.get("conditions", []) if each["status"] == "False"]
    told = [(each.get("reason"), each.get("message")) for each in (*waiting, *scheduled)]
    return next((": ".join(filter(None, each)) for each in told if any(each)), "")


def _status(pod: Mapping[str, Any] | None) -> int | None:
    """The exit status of a pod; None while it runs."""
    if pod is None:
        return _UNKNOWN
    for each in pod["status"].get("containerStatuses", []):
        if "terminated" in each["state"]:
            return int(each["state"]["terminated"]["exitCode"])
    return None if pod["status"]["phase"] in ("Pending", "Running") else _UNKNOWN


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="isotrain.launchers.kubernetes_main")
    parser.add_argument("--kubectl", type=shlex.split, required=True)
    parser.add_argument("--manifest", required=True)
    parser.add_argument("--job", required=True)
    return parser.parse_args()


def _end(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    """Runs the Job; gives the exit status."""
    asked = _arguments()
    kubectl = Kubectl(asked.kubectl)
    signal.signal(signal.SIGTERM, _end)
    try:
        # Not `apply`, which would write the key into an annotation as well: the names are new each time.
        kubectl("create", f"--filename={asked.manifest}")
        return Job(kubectl, asked.job).follow()
    except subprocess.CalledProcessError as error:  # kubectl has said why
        return int(error.returncode)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        how = ("--ignore-not-found", "--cascade=foreground", f"--timeout={_DELETE_SECONDS}s")
        with contextlib.suppress(subprocess.CalledProcessError):
            kubectl("delete", f"--filename={asked.manifest}", *how)


if __name__ == "__main__":
    sys.exit(main())
