"""Program of the launcher `kubernetes`: creates a Job, and follows the pod of rank 0.

It talks to the cluster by `kubectl` only, prints the log of rank 0, and exits with the exit code of rank 0.
When it ends, also by SIGTERM, it deletes what it has created.
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

_POLL_SECONDS = 1.0
_DELETE_SECONDS = 10
"""Seconds to wait for the end of the pods."""
_MAX_ATTEMPTS = 30
"""Attempts of a query that the cluster does not answer."""
_LAST_LINES = 30
_UNKNOWN = 1
"""Exit code if the pod's is unknown."""


class Kubectl:
    """Runs `kubectl` commands."""

    def __init__(self, command: Sequence[str]) -> None:
        """Keeps the program with its options."""
        self._command = command

    def __call__(self, *arguments: str) -> str:
        """Runs a command to its end; returns its output.

        Raises:
            CalledProcessError: It has failed, with a message on standard error.
        """
        command = [*self._command, *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        """Current list of objects (`kubectl get`)."""
        failures = 0
        while True:
            try:
                objects: dict[str, Any] = json.loads(self("get", *arguments, "--output=json"))
            except subprocess.CalledProcessError:
                failures += 1
                if failures == _MAX_ATTEMPTS:
                    raise
                time.sleep(_POLL_SECONDS)
            else:
                return objects

    def lines(self, *arguments: str) -> Iterator[str]:
        """Output lines of a command, while it runs."""
        with subprocess.Popen(
            [*self._command, *arguments], stdout=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            try:
                yield from process.stdout
            finally:
                process.terminate()


class Job:
    """A Job in the cluster, each of whose pods is a rank."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        self._kubectl = kubectl
        self._name = name
        self._pods = f"--selector=batch.kubernetes.io/job-name={name}"
        self._printed = 0
        """Number of printed log lines of rank 0."""

    def follow(self) -> int:
        """Prints the log of rank 0 until it ends; returns its exit code."""
        status = self._follow() if self._wait_for_start() else _UNKNOWN
        if status:
            with contextlib.suppress(subprocess.CalledProcessError):
                last = self._kubectl("logs", self._pods, "--prefix", f"--tail={_LAST_LINES}")
                print(last, file=sys.stderr)
        return status

    def _wait_for_start(self) -> bool:
        """Waits until rank 0 has started; returns False if the Job has failed before."""
        printed = ""
        while (reason := _waiting_reason(self._first_pod())) is not None:
            failure = self._failure()
            if failure:
                print(f"job {self._name} has failed: {failure}", file=sys.stderr)
                return False
            if reason not in ("", printed):
                print(f"the pod of rank 0 waits: {reason}", flush=True)
                printed = reason
            time.sleep(_POLL_SECONDS)
        return True

    def _follow(self) -> int:
        while True:
            pod = self._first_pod()
            status = _exit_code(pod)
            if pod is not None:
                self._print_log(pod["metadata"]["name"])
            if status is not None:
                return status
            time.sleep(_POLL_SECONDS)

    def _print_log(self, pod: str) -> None:
        """Prints new lines of a log; reads it from its start, as an earlier connection may have broken."""
        for number, line in enumerate(self._kubectl.lines("logs", "--follow", pod), start=1):
            if number > self._printed:
                print(line, end="", flush=True)
                self._printed = number

    def _first_pod(self) -> dict[str, Any] | None:
        """The pod of rank 0, if there is one now."""
        first = f"{self._pods},batch.kubernetes.io/job-completion-index=0"
        pods: list[dict[str, Any]] = self._kubectl.get("pods", first)["items"]
        return pods[0] if pods else None

    def _failure(self) -> str:
        """Reason why the Job has failed; empty: it has not."""
        (job,) = self._kubectl.get("jobs", f"--field-selector=metadata.name={self._name}")["items"]
        conditions = job["status"].get("conditions", [])
        return next((each["message"] for each in conditions if each["type"] == "Failed"), "")


def _waiting_reason(pod: Mapping[str, Any] | None) -> str | None:
    """Reason why a pod has not started, empty if unknown; None: it has started."""
    if pod is None:
        return ""
    status = pod["status"]
    if status.get("phase") in ("Running", "Succeeded", "Failed"):
        return None
    waiting = [each["state"].get("waiting", {}) for each in status.get("containerStatuses", [])]
    scheduled = [each for each in status.get("conditions", []) if each["status"] == "False"]
    reasons = [(each.get("reason"), each.get("message")) for each in (*waiting, *scheduled)]
    return next((": ".join(filter(None, each)) for each in reasons if any(each)), "")


def _exit_code(pod: Mapping[str, Any] | None) -> int | None:
    """The exit code of a pod; None while it runs."""
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


def _exit_on_signal(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def main() -> int:
    """Runs the Job; returns the exit code."""
    arguments = _arguments()
    kubectl = Kubectl(arguments.kubectl)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        # `create`, not `apply`, which would also write the key into an annotation; the names are unique.
        kubectl("create", f"--filename={arguments.manifest}")
        return Job(kubectl, arguments.job).follow()
    except subprocess.CalledProcessError as error:  # kubectl has printed the reason
        return int(error.returncode)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        options = ("--ignore-not-found", "--cascade=foreground", f"--timeout={_DELETE_SECONDS}s")
        with contextlib.suppress(subprocess.CalledProcessError):
            kubectl("delete", f"--filename={arguments.manifest}", *options)


if __name__ == "__main__":
    sys.exit(main())
