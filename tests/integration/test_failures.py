"""Whatever happens to a process of a run, the run ends in time, says what happened, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import numpy as np
import psutil
import pytest
from helpers.leftover_processes import is_alive, no_leftover_processes
from helpers.signals import heed_signals
from helpers.waiting import wait_until
from integration.failure_runs import (
    STEP,
    Deed,
    abort,
    alive_children,
    data,
    doing,
    exit_3,
    exit_as_frameworks_do,
    exit_at_once,
    failure,
    kill,
    model,
    raise_error,
    spec,
    stop,
)

pytestmark = pytest.mark.usefixtures("reference", "no_processes_left")

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BACKENDS = ("torch-ddp", "tf-multiworker", "tf-mirrored", "horovod-torch", "horovod-tf")
"""Of each, one that raises; one that is killed or hangs is among the conformance checks."""
LIMIT_SECONDS = 60.0
"""Time within which a process ends that ends at once on an idle machine."""
FORK_SERVER_SECONDS = 240.0
"""Limit for a fork server to import a framework, on a busy machine too."""
SLOW = pytest.mark.slow
FAILURES = (SLOW, pytest.mark.failures)


def culprit_of(backend: str) -> int:
    return 0 if backend == "tf-mirrored" else 1


FAULT_ACTIONS = {
    kill: "was ended by SIGKILL",
    raise_error: "raised ValueError",
    exit_3: "raised SystemExit",
    exit_at_once: "ended with exit code 3 before its work was done",
    exit_as_frameworks_do: "ended with exit code 1 before its work was done",
    abort: "was ended by SIGABRT",
}
FRESH = (kill, raise_error, exit_at_once)
"""A signal, an error and an exit code of a process that was not forked."""
CASES = [
    *(("reference", deed, "forked") for deed in FAULT_ACTIONS),
    *(("reference", deed, "fresh") for deed in FRESH),
    *((backend, raise_error, "forked") for backend in BACKENDS),
]
EVERYDAY = [("reference", deed, "forked") for deed in FAULT_ACTIONS]
OF_TORCH = ("torch-ddp", raise_error, "forked")


def cases() -> list[Any]:
    return [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1].__name__}-{case[2]}",
            marks=() if case in EVERYDAY else SLOW if case == OF_TORCH else FAILURES,
        )
        for case in CASES
    ]


@pytest.mark.parametrize(("backend", "deed", "way"), cases())
def test_a_rank_that_ends_or_raises_is_named(
    backend: str, deed: Deed, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOTRAIN_START", way)
    rank = culprit_of(backend)
    text = failure(doing(deed, rank), spec(), backend, tmp_path)
    processes = 1 if backend == "tf-mirrored" else 2
    first, *others = text.splitlines()
    assert first.startswith(f"rank {rank} of {processes} {FAULT_ACTIONS[deed]}")
    assert first.endswith(f"after step {STEP}, in call 'between calls'.")
    if deed is raise_error:
        assert "ValueError: a deliberate mistake" in text
        assert "in raise_error" in text
    if processes == 2:
        last_steps = tuple(f"rank 0: last step {step}" for step in (STEP, STEP + 1))
        assert any(line.startswith(last_steps) for line in others), text


class BlocksWhenUnpickled:
    """Travels to every process, and one of them never gets it open."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _block_on_rank_1, ()


def _block_on_rank_1() -> str:
    if os.environ.get("ISOTRAIN_PROCESS", "").startswith('{"rank": 1,'):
        time.sleep(600)
    return "open"


def that_cannot_be_opened() -> Any:
    obstacle = BlocksWhenUnpickled()
    return doing(lambda: obstacle, 1)


@dataclass(frozen=True)
class Wait:
    """A run that ends because a time-out was waited for.

    Attributes:
        work: Of its processes.
        timeouts: Of its spec.
        expected: How its error begins.
        backend: Under what.
    """

    work: Any
    timeouts: dict[str, float]
    expected: str
    backend: str = "reference"


HOOK = """
import json, os, pathlib, signal, time
place = json.loads(os.environ.get("ISOTRAIN_PROCESS", "{}"))
folder = pathlib.Path(place.get("run_directory", ""))
if place.get("rank") == 1 and folder.name in ("sleeps", "sleeps-tf", "stops"):
    (folder / "moment").touch()
    if folder.name == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
"""
"""Makes a process that is not forked do nothing before it starts; what is forked has started already."""
STOPPED = "rank 1 of 2 is suspended (SIGSTOP) and was "
WAITS = {
    "suspended": Wait(doing(stop, 1), {"silence": 5.0}, f"{STOPPED}last heard of"),
    "behind": Wait(
        doing(lambda: time.sleep(600), 1), {"progress": 10.0}, "rank 1 of 2 made no progress for "
    ),
    "unopened": Wait(
        that_cannot_be_opened(),
        {"silence": 3.0},
        "rank 1 of 2 did not start within 3 s: it does nothing",
    ),
    "suspended-tf": Wait(
        doing(stop, 1), {"silence": 10.0}, f"{STOPPED}last heard of", "tf-multiworker"
    ),
    "sleeps": Wait(doing(kill, 99), {"silence": 5.0}, "rank 1 of 2 did not start within 5 s"),
    "stops": Wait(doing(kill, 99), {"silence": 5.0}, f"{STOPPED}never heard of"),
    "sleeps-tf": Wait(
        doing(kill, 99),
        {"silence": 10.0},
        "rank 1 of 2 did not start within 10 s",
        "tf-multiworker",
    ),
}
BOTH_WAYS = ("suspended", "behind", "unopened")
AFTER_STEP = f"after step {STEP}, in call 'between calls'."
BEFORE = "before its first step, in call 'start'."
ENDS = {"behind": AFTER_STEP, "suspended": AFTER_STEP, "suspended-tf": AFTER_STEP}


ENDS |= {"sleeps": BEFORE, "stops": BEFORE, "sleeps-tf": BEFORE}


"""How the first line of their errors ends, but for one that goes on to say more."""


WAITED = [
    *((name, "forked") for name in (*BOTH_WAYS, "suspended-tf")),
    *((name, "fresh") for name in (*BOTH_WAYS, "sleeps", "stops", "sleeps-tf")),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """The errors of all runs that wait for a time-out: they wait at the same time."""
    hooks = tmp_path_factory.mktemp("hooks")
    (hooks / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(hooks), os.environ["PYTHONPATH"]])
    variables: dict[str, dict[str, str]] = {"forked": {}, "fresh": {"PYTHONPATH": path}}
    found = {}
    with no_leftover_processes(), ThreadPoolExecutor(len(WAITED)) as pool:
        for way, own in variables.items():
            names = [name for name, its_way in WAITED if its_way == way]
            begun = [threading.Event() for _ in names]
            folder = tmp_path_factory.mktemp(way)
            with mock.patch.dict(os.environ, {"ISOTRAIN_START": way, **own}):
                for name, event in zip(names, begun, strict=True):
                    found[name, way] = pool.submit(waited, name, folder / name, event)
                assert all(event.wait(FORK_SERVER_SECONDS) for event in begun)
    return {case: future.result() for case, future in found.items()}


def waited(name: str, folder: Path, begun: threading.Event) -> str:
    """The error of one; tells when it has begun, from when on variables may change."""
    wait = WAITS[name]
    fields = spec(timeouts=wait.timeouts)
    try:
        return failure(wait.work, fields, wait.backend, folder, on_event=lambda _: begun.set())
    finally:
        begun.set()


@pytest.mark.slow
@pytest.mark.failures
@pytest.mark.parametrize(("name", "way"), WAITED)
def test_the_rank_that_keeps_others_waiting_is_blamed(
    texts: dict[tuple[str, str], str], name: str, way: str
) -> None:
    """The others may fail first."""
    text = texts[name, way]
    first = text.splitlines()[0]
    assert first.startswith(WAITS[name].expected)
    if name == "unopened":
        assert "in call 'read job'" in first
        assert "_block_on_rank_1" in text  # where it is, from its stacks
    else:
        assert first.endswith(ENDS[name]), first
    if name == "behind":
        assert "time.sleep(600)" in text or "in <lambda>" in text


def fails_late(inputs: Any, targets: Any, random: Any) -> Any:
    fails_late.calls += 1  # type: ignore[attr-defined]
    if fails_late.calls > STEP and os.environ["ISOTRAIN_PROCESS"].startswith('{"rank": 1,'):  # type: ignore[attr-defined]
        raise ArithmeticError("the transform does not like this batch")
    return inputs, targets


fails_late.calls = 0  # type: ignore[attr-defined]


def model_that_fails() -> Any:
    if os.environ["ISOTRAIN_PROCESS"].startswith('{"rank": 1,'):
        raise LookupError("no such layer")
    return model()


def data_that_fails() -> Any:
    if os.environ["ISOTRAIN_PROCESS"].startswith('{"rank": 1,'):
        raise EOFError("the file is cut short")
    return data()


class BreaksOnRank1:
    """Validation data that one rank cannot read."""

    def __len__(self) -> int:
        return 16

    def gather(self, indices: Any) -> Any:
        if os.environ["ISOTRAIN_PROCESS"].startswith('{"rank": 1,'):
            raise ZeroDivisionError("a bad sector")
        inputs = np.ones((len(indices), 4), dtype="float32")
        return inputs, inputs[:, :2]


def evaluates(session: Any) -> None:
    session.evaluate(BreaksOnRank1())


def trains(session: Any) -> None:
    for batch in session.batches():
        session.step(batch)


@pytest.mark.parametrize(
    ("work", "changes", "error", "call", "way"),
    [
        (trains, {"transform": fails_late}, "ArithmeticError", "next batch", "forked"),
        (trains, {"model": model_that_fails}, "LookupError", "build model", "forked"),
        (trains, {"data": data_that_fails}, "EOFError", "load data", "forked"),
        (evaluates, {}, "ZeroDivisionError", "evaluate", "forked"),
        (evaluates, {}, "ZeroDivisionError", "evaluate", "fresh"),
    ],
)
def test_the_call_that_raised_is_named(
    work: Any,
    changes: dict[str, Any],
    error: str,
    call: str,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ISOTRAIN_START", way)
    text = failure(work, spec(**changes), "reference", tmp_path)
    first = text.splitlines()[0]
    assert first.startswith(f"rank 1 of 2 raised {error} ")
    assert first.endswith(f"in call {call!r}.")
    assert "Traceback (most recent call last)" in text


SCRIPT = """
import sys
import isotrain
from integration.failure_runs import doing, spec, stop
backend, folder, deed = sys.argv[1:]
deed = {"none": lambda: None, "stop": stop}[deed]
fields = spec(plugins="isotrain.testing.reference")
isotrain.launch(doing(deed, 1), fields, backend=backend, replicas=2, output=folder)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "backend", "deed", "way"),
    [
        (signal.SIGINT, "reference", "none", "forked"),
        pytest.param(signal.SIGINT, "reference", "none", "fresh", marks=FAILURES),
        pytest.param(signal.SIGTERM, "reference", "none", "forked", marks=FAILURES),
        (signal.SIGKILL, "reference", "none", "forked"),
        pytest.param(signal.SIGKILL, "reference", "stop", "forked", marks=FAILURES),
        pytest.param(signal.SIGKILL, "reference", "stop", "fresh", marks=FAILURES),
    ],
)
def test_ranks_end_with_the_process_that_started_them(
    number: signal.Signals, backend: str, deed: str, way: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    starter = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, backend, str(folder), deed],
        env={**os.environ, "ISOTRAIN_START": way},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )
    with starter:
        wait_until(lambda: (folder / "moment").exists() or starter.poll() is not None, 120)
        ranks = psutil.Process(starter.pid).children(recursive=True)
        assert len(ranks) >= 2
        starter.send_signal(number)
        _, errors = starter.communicate(timeout=LIMIT_SECONDS)
    wait_until(lambda: not any(is_alive(rank.pid) for rank in ranks), LIMIT_SECONDS)
    if number == signal.SIGINT:
        assert b"KeyboardInterrupt" in errors
        assert not alive_children(folder)
    for pid in alive_children(folder):  # after SIGKILL nobody finds those that left their session
        os.kill(pid, signal.SIGKILL)
