"""Plans and makes the runs of a comparison, in this interpreter or in another one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.core import errors
from isotrain.core.comparison.measure import Measurement
from isotrain.core.comparison.travel import as_plain
from isotrain.core.contracts.plan import split_backend
from isotrain.core.errors import IsotrainError, PlanError
from isotrain.core.launching.run_directory import RunDirectory
from isotrain.core.launching.run_job import run_job
from isotrain.core.launching.templates import OF_THIS_PROGRAM
from isotrain.core.planning.make_plan import make_plan
from isotrain.core.plugins.host import plugin_host
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.version import VERSION

_MODULE = "isotrain.core.comparison.elsewhere"
_END_SECONDS = 10.0
_SHOWN_LINES = 5


class Runner:
    """Plans and makes runs, each in the interpreter of its backend."""

    def __init__(self, interpreters: Mapping[str, str]) -> None:
        """Takes note of the interpreters.

        Args:
            interpreters: Backend, `NAME` or `NAME:COLLECTIVE`, to the path of its interpreter.

        Raises:
            PlanError: One of them is no program.
        """
        for backend, python in interpreters.items():
            if not os.access(python, os.X_OK) or os.path.isdir(python):
                raise PlanError(
                    f"--python {backend}={python}: there is no program of that path. Expected"
                    " the interpreter of another environment, such as /home/me/env/bin/python."
                )
        self._interpreters = dict(interpreters)

    def python_of(self, backend: str) -> str | None:
        """The interpreter of a backend; None for this program's own."""
        own = self._interpreters.get(backend)
        return own or self._interpreters.get(split_backend(backend)[0])

    def plan(self, spec: TrainingSpec, backend: str, replicas: int) -> dict[str, Any]:
        """Resolves one cell's run.

        Raises:
            IsotrainError: It does not fit together.
        """
        python = self.python_of(backend)
        if python is None:
            return plan_here(spec, backend, replicas)
        task = {"spec": as_plain(spec), "backend": backend, "replicas": replicas}
        with tempfile.TemporaryDirectory(prefix="isotrain-compare-") as folder:
            return _ask(python, {"do": "plan", **task}, Path(folder))

    def run(
        self,
        spec: TrainingSpec,
        backend: str,
        replicas: int,
        measurement: Measurement,
        folder: Path,
    ) -> dict[str, Any]:
        """Makes one run in fresh processes.

        Args:
            spec: What to train.
            backend: On what.
            replicas: With how many.
            measurement: How to measure it.
            folder: New or empty, for the run's files.

        Returns:
            `started` (monotonic seconds), and `ranks`: what each process returned.

        Raises:
            IsotrainError: The run failed.
        """
        python = self.python_of(backend)
        if python is None:
            return run_here(spec, backend, replicas, measurement, folder)
        folder.mkdir(parents=True, exist_ok=True)
        task = {
            "spec": as_plain(spec),
            "backend": backend,
            "replicas": replicas,
            "measurement": vars(measurement),
        }
        return _ask(python, {"do": "run", **task}, folder)


def plan_here(spec: TrainingSpec, backend: str, replicas: int) -> dict[str, Any]:
    """As `Runner.plan`, in this interpreter."""
    found = make_plan(spec, backend=backend, replicas=replicas, host=plugin_host(spec.plugins))
    return found.to_dict()


def run_here(
    spec: TrainingSpec, backend: str, replicas: int, measurement: Measurement, folder: Path
) -> dict[str, Any]:
    """As `Runner.run`, in this interpreter."""
    host = plugin_host(spec.plugins)
    plan = make_plan(spec, backend=backend, replicas=replicas, host=host)
    directory = RunDirectory.create(spec.name, folder)
    OF_THIS_PROGRAM.retire()  # what is measured is what a new program would see
    started = time.monotonic()
    ranks = run_job(measurement, spec, plan, host, directory)
    return {"started": started, "ranks": ranks}


def _ask(python: str, task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Has another interpreter do a task; raises the error that it met."""
    answer, log = folder / "answer.json", folder / "launcher.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _tell(process, {**task, "folder": str(folder), "path": _own_folders()})
        process.wait()
    finally:
        _end(process)
    if not answer.exists():
        raise IsotrainError(_no_answer(python, process.returncode, log))
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    if found["version"] != VERSION:
        raise PlanError(
            f"{python} has isotrain {found['version']}, and this is {VERSION}: they may measure"
            " in different ways. Install the same version in both."
        )
    if "error" in found:
        raise _error(found["error"], f"{found['message']} (in {python})")
    result: dict[str, Any] = found["result"]
    return result


def _tell(process: subprocess.Popen[bytes], task: Mapping[str, Any]) -> None:
    """Hands the task over; the pipe stays open, and its end tells the other that this one is gone."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the other interpreter, which ends its run's processes, if it still runs."""
    assert process.stdin is not None
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def _no_answer(python: str, code: int, log: Path) -> str:
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    words = " / ".join(line.strip() for line in said[-_SHOWN_LINES:]) or "nothing"
    hint = ""
    if "No module named" in words and "isotrain" in words:
        hint = f" Install isotrain {VERSION} there: {python} -m pip install isotrain."
    return f"{python} ended with code {code} before it answered; it said: {words}.{hint}"


def _error(name: str, message: str) -> IsotrainError:
    """The error of that name, as far as it is one of isotrain's."""
    kind = getattr(errors, name, IsotrainError)
    found: IsotrainError = (kind if issubclass(kind, IsotrainError) else IsotrainError)(message)
    return found


def _own_folders() -> Sequence[str]:
    """Where this program finds modules that belong to no environment: a person's own."""
    environments = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return [
        folder
        for folder in map(os.path.abspath, sys.path)
        if not any(Path(folder).is_relative_to(prefix) for prefix in environments)
    ]
