"""Fork servers: which runs share one, when it ends, and what happens when it fails."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from helpers.leftover_processes import is_alive
from helpers.waiting import wait_until
from integration.start_method_runs import LIMIT_SECONDS, launch, parameters

from isotrain.core.errors import RunFailedError
from isotrain.core.launching.forkserver.client import ForkServer, ForkServerError
from isotrain.core.launching.forkserver.pool import FORK_SERVERS, ForkServerPool
from isotrain.core.launching.forkserver.process_handle import ProcessArgs
from isotrain.plugin import StartMethod
from isotrain.testing.reference.adapter import Reference

pytestmark = pytest.mark.usefixtures("reference")

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SILENCE, LIMIT = 30.0, 120.0


@pytest.mark.slow
def test_a_killed_fork_server_ends_its_run_and_is_replaced(tmp_path: Path) -> None:
    def kills(session: Any) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(RunFailedError, match="was ended by SIGKILL"):
        launch(kills, tmp_path / "a")
    assert launch(parameters, tmp_path / "b") == [10, 10]


@pytest.mark.slow
@pytest.mark.failures
def test_a_fork_server_that_cannot_import_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Reference, "preload", lambda self, spec, *, device: StartMethod(("no_such_module",))
    )
    for name in ("a", "b"):
        told: list[Mapping[str, Any]] = []
        assert launch(parameters, tmp_path / name, told.append) == [10, 10]
        (note,) = (event["text"] for event in told if event["event"] == "note")
        assert "every process starts with a fresh interpreter" in note
        assert "No module named 'no_such_module'" in note


ENDING = """
import os, signal
import isotrain
from isotrain.core.launching.forkserver.pool import FORK_SERVERS
print(FORK_SERVERS.get((), dict(os.environ)).pid, flush=True)
{ending}
"""


@pytest.mark.parametrize("ending", ["", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_fork_server_ends_with_its_program(ending: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING.replace("{ending}", ending)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    fork_server = int(done.stdout)
    assert not done.stderr
    wait_until(lambda: not is_alive(fork_server), LIMIT_SECONDS)


IMPORTING = """
import ctypes, pathlib
pathlib.Path("importing").touch()
ctypes.PyDLL(None).sleep(600)  # holds the interpreter
"""
KILLED_MEANWHILE = """
import os, pathlib, signal, time
from isotrain.core.launching.forkserver.pool import FORK_SERVERS
print(FORK_SERVERS.get(("importing",), dict(os.environ)).pid, flush=True)
while not pathlib.Path("importing").exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_importing_fork_server_ends_with_its_program(tmp_path: Path) -> None:
    (tmp_path / "importing.py").write_text(IMPORTING)
    program = [sys.executable, "-c", KILLED_MEANWHILE]
    done = subprocess.run(
        program,
        cwd=tmp_path,
        env=variables(PYTHONPATH=str(tmp_path)),
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    fork_server = int(done.stdout)
    wait_until(lambda: not is_alive(fork_server), LIMIT_SECONDS)


def variables(**more: str) -> dict[str, str]:
    return {**os.environ, **more}


def test_fork_servers_are_shared_by_variables_and_limited_in_number() -> None:
    kept = ForkServerPool()
    try:
        first = kept.get((), variables(PYTEST_CURRENT_TEST="another"))
        assert kept.get((), variables()) is first
        wave = kept.get(("wave",), variables())
        assert wave is not first
        assert kept.get(("wave",), variables()) is wave
        others = [kept.get((), variables(NUMBER=str(number))) for number in range(4)]
        wait_until(lambda: not is_alive(first.pid), LIMIT_SECONDS)
        assert all(is_alive(other.pid) for other in others)
    finally:
        kept.close()
    with pytest.raises(ForkServerError, match="this program is ending"):
        kept.get((), variables())


def test_a_fork_of_the_program_leaves_its_fork_servers_alone() -> None:
    fork_server = FORK_SERVERS.get((), variables())
    pid = os.fork()
    if pid == 0:
        FORK_SERVERS.close()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert fork_server.is_current()


def forked(fork_server: ForkServer, streams: tuple[int, int, int]) -> Any:
    return fork_server.fork(ProcessArgs(variables(), streams, streams), SILENCE, LIMIT)


@pytest.mark.slow
@pytest.mark.failures
def test_a_suspended_fork_server_is_replaced() -> None:
    kept = ForkServerPool(answer_seconds=2.0)
    try:
        first = kept.get((), variables())
        with open(os.devnull, "r+b") as null:
            streams = (null.fileno(),) * 3
            process = forked(first, streams)
            wait_until(lambda: process.exit_code is not None, LIMIT_SECONDS)
            process.release()
            os.kill(first.pid, signal.SIGSTOP)
            large = ProcessArgs(variables(LARGE="x" * 1_000_000), streams, streams)
            with pytest.raises(ForkServerError, match="it is gone, or does not answer"):
                first.fork(large, SILENCE, LIMIT)
        assert kept.get((), variables()) is not first
        wait_until(lambda: not is_alive(first.pid), LIMIT_SECONDS)
    finally:
        kept.close()


@pytest.mark.slow
def test_a_fork_server_that_one_run_gave_up_stays_for_another() -> None:
    kept = ForkServerPool()
    waiting, nothing_comes = os.pipe()
    try:
        first = kept.get((), variables())
        with open(waiting, "rb"), open(nothing_comes, "wb"), open(os.devnull, "r+b") as null:
            of_another_run = forked(first, (waiting, null.fileno(), null.fileno()))
            os.kill(first.pid, signal.SIGSTOP)
            with pytest.raises(ForkServerError, match="it is gone, or does not answer"):
                first.fork(ProcessArgs(variables(), (null.fileno(),) * 3, ()), 0.1, LIMIT)
            os.kill(first.pid, signal.SIGCONT)
            assert kept.get((), variables()) is not first
            assert is_alive(of_another_run.pid)
            assert of_another_run.exit_code is None
        wait_until(
            lambda: of_another_run.exit_code == 1, LIMIT_SECONDS
        )  # its input ended, and had no job
        of_another_run.release()
        assert not is_alive(first.pid)
    finally:
        kept.close()


def test_a_failed_fork_is_an_error_and_earlier_processes_live_on() -> None:
    fork_server = ForkServer((), variables())
    waiting, nothing_comes = os.pipe()
    try:
        with open(waiting, "rb"), open(nothing_comes, "wb"), open(os.devnull, "r+b") as null:
            process = forked(fork_server, (waiting, null.fileno(), null.fileno()))
            psutil.Process(fork_server.pid).rlimit(resource.RLIMIT_NOFILE, (8, 8))
            with pytest.raises(ForkServerError, match=r"it cannot fork: .* Too many open files"):
                forked(fork_server, (null.fileno(),) * 3)
            assert fork_server.is_current()
            assert is_alive(process.pid)
        wait_until(lambda: process.exit_code == 1, LIMIT_SECONDS)
        process.release()
    finally:
        fork_server.retire()


@pytest.mark.slow
@pytest.mark.failures
@pytest.mark.parametrize("begun", [0, 1])
def test_a_run_whose_fork_server_cannot_fork_starts_fresh_or_fails(
    begun: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    fork = ForkServer.fork

    def runs_out(fork_server: ForkServer, *given: Any) -> Any:
        calls.append(fork_server.pid)
        if len(calls) > begun:
            wait_until(lambda: fork_server.is_current() and fork_server.is_ready, LIMIT_SECONDS)
            psutil.Process(fork_server.pid).rlimit(resource.RLIMIT_NOFILE, (8, 8))
        return fork(fork_server, *given)

    monkeypatch.setattr(ForkServer, "fork", runs_out)
    told: list[Mapping[str, Any]] = []
    if begun:
        says = r"after 1 were: their fork server failed: .* Too many"
        with FORK_SERVERS.only_new(), pytest.raises(RunFailedError, match=says):
            launch(parameters, tmp_path, told.append)
    else:
        with FORK_SERVERS.only_new():
            assert launch(parameters, tmp_path, told.append) == [10, 10]
        (note,) = (event["text"] for event in told if event["event"] == "note")
        assert "Too many open files" in note


def test_forked_processes_end_with_their_fork_server() -> None:
    fork_server = ForkServer((), variables())
    waiting, nothing_comes = os.pipe()
    with open(waiting, "rb"), open(nothing_comes, "wb"), open(os.devnull, "r+b") as null:
        null_number = null.fileno()
        process = forked(fork_server, (waiting, null_number, null_number))
        os.kill(fork_server.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(process.pid), LIMIT_SECONDS)
        wait_until(lambda: process.exit_code == -signal.SIGKILL, LIMIT_SECONDS)
    process.release()
    fork_server.retire()


def test_a_changed_imported_file_makes_a_fork_server_stale(
    tmp_path: Path,
) -> None:
    (tmp_path / "imported_early.py").write_text("VALUE = 1\n")
    fork_server = ForkServer(
        ("imported_early",), variables(PYTHONPATH=os.pathsep.join([*sys.path, str(tmp_path)]))
    )
    try:
        with open(os.devnull, "r+b") as null:
            process = forked(fork_server, (null.fileno(),) * 3)
        wait_until(lambda: process.exit_code is not None, LIMIT_SECONDS)
        assert process.exit_code == 1  # it was given no job
        assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        process.release()
        assert not psutil.pid_exists(process.pid)
        assert fork_server.is_current()
        (tmp_path / "imported_early.py").write_text("VALUE = 10\n")
        assert not fork_server.is_current()
    finally:
        fork_server.retire()
    assert not is_alive(fork_server.pid)
