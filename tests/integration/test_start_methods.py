"""Processes of a run that are forked find the same as those that start by themselves, and end as they do."""

from __future__ import annotations

import inspect
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import numpy as np
import psutil
import pytest
from helpers.isolated import run_isolated
from helpers.waiting import wait_until

import isotrain
from isotrain.analysis.compare.measurement.measure import Measurement
from isotrain.analysis.compare.measurement.runner import run_here
from isotrain.core.contracts.process import VARIABLE
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError
from isotrain.core.launching.forkserver.client import ForkServer, ForkServerError
from isotrain.core.launching.forkserver.pool import FORK_SERVERS, ForkServerPool
from isotrain.core.launching.forkserver.process_handle import ProcessArgs
from isotrain.plugin import StartMethod
from isotrain.testing.reference.adapter import Reference
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

pytestmark = pytest.mark.usefixtures("reference")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAYS = ("forked", "fresh")
LIMIT_SECONDS = 60.0
"""A busy machine is slow; what these tests are about is never, or at once."""
SILENCE, LIMIT = 30.0, 120.0
PLANTED_SEED = 987654321


def model() -> Network:
    return Network([Dense(4, 2)])


def portable() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


MODELS = {"reference": model}


def spec(**changes: Any) -> dict[str, Any]:
    inputs = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
    fields = {"name": "starting", "model": MODELS, "data": (inputs, inputs[:, :2].copy())}
    fields |= {"loss": "mean_squared_error", "optimizer": {"name": "sgd", "lr": 0.125}}
    return fields | {"global_batch_size": 8, "epochs": 1} | changes


def launch(
    work: Any,
    folder: Path,
    hear: Callable[[Any], None] = id,
    backend: str = "reference",
    **changes: Any,
) -> list[Any]:
    return isotrain.launch(
        work,
        spec(**changes),
        backend=backend,
        replicas=2,
        run_directory=folder,
        on_event=hear,
    )


MODULE = """
import sys

WIDTH = int(sys.argv[2])

def model():
    from isotrain.testing.reference.layers import Dense
    from isotrain.testing.reference.network import Network
    return Network([Dense(4, WIDTH)])

def data():
    import numpy as np
    inputs = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
    return inputs, np.repeat(inputs[:, :1], WIDTH, axis=1)
"""
PROGRAM = """
import sys
import isotrain
spec = {"name": "arguments", "model": "mine:model", "data": "mine:data", "steps": 2, "global_batch_size": 8}
spec |= {"loss": "mean_squared_error", "optimizer": {"name": "sgd", "lr": 0.125}}
spec |= {"plugins": "isotrain.testing.reference"}
result = isotrain.run(spec, backend="reference", replicas=2)
print(result.plan["start_method"]["way"], "parameters", result.plan["parameters"])
def work(session):
    return sys.argv
for argv in isotrain.launch(work, spec, backend="reference", replicas=2):
    print(argv == sys.argv)
"""


@pytest.mark.parametrize("way", ["forked", pytest.param("fresh", marks=pytest.mark.slow)])
def test_modules_that_read_the_command_line_when_imported_find_it(way: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(PROGRAM)
    many = [f"--odd=\udcff{number}" for number in range(20_000)]  # more than one argument may hold
    done = subprocess.run(
        [sys.executable, "train.py", "--width", "3", *many],
        cwd=tmp_path,
        env={**os.environ, "ISOTRAIN_START": way},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [way, "parameters", "15", "True", "True"]


def surroundings(session: Any) -> dict[str, Any]:
    """What a process finds that must not depend on how it has started."""
    import gc
    import resource
    import threading

    numbers = [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]
    opened = [os.path.basename(os.readlink(f"/proc/self/fd/{n}")) for n in range(64) if is_open(n)]
    return {
        "leads its session": os.getsid(0) == os.getpgrp() == os.getpid(),
        "folder": os.getcwd(),
        "argv": sys.argv,
        "path": sys.path,
        "variables": {k: v for k, v in os.environ.items() if k not in ("ISOTRAIN_START", "_")},
        "descriptors": sorted(name.split(":")[0] for name in opened),
        "streams": [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)],
        **{f"handler of {n}": str(signal.getsignal(n)).partition(" at ")[0] for n in numbers},
        "blocked": [str(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "mask": os.umask(0o077),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        "collects": gc.isenabled(),
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("isotrain")),
        "flags": str(sys.flags),
    }


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_a_forked_process_finds_what_a_fresh_one_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_PERSON", "1")
    for way in WAYS:
        monkeypatch.setenv("ISOTRAIN_START", way)
        found[way] = launch(surroundings, tmp_path / way)
        for rank, each in enumerate(found[way]):
            place = each["variables"].pop("ISOTRAIN_PROCESS")
            assert json.loads(place)["rank"] == rank
    for forked_one, fresh_one in zip(found["forked"], found["fresh"], strict=True):
        apart = {k: (v, fresh_one[k]) for k, v in forked_one.items() if v != fresh_one[k]}
        assert not apart
    assert found["forked"][0]["leads its session"]
    assert found["forked"][0]["variables"]["OF_THE_PERSON"] == "1"


def plants(session: Any) -> list[float]:
    """Changes whatever a process can change of itself; gives numbers that are drawn anew."""
    import keras
    import torch

    torch.set_default_dtype(torch.float64)
    keras.config.set_epsilon(0.5)
    keras.planted = True
    os.environ["PLANTED"] = "1"
    sys.path.insert(0, "/planted")
    sys.argv.append("planted")
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    drawn = [random.random(), float(np.random.random())]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(PLANTED_SEED)
    return drawn


def looks(session: Any) -> list[Any]:
    """What is left of it, and numbers that are drawn anew."""
    import keras
    import torch

    left = [
        torch.get_default_dtype() is torch.float64,
        keras.config.epsilon() == 0.5,
        hasattr(keras, "planted"),
        "PLANTED" in os.environ,
        "/planted" in sys.path,
        "planted" in sys.argv,
        os.getcwd() == "/",
        signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
        torch.initial_seed() == PLANTED_SEED,
    ]
    return [any(left), random.random(), float(np.random.random())]


@pytest.mark.slow
def test_the_next_run_finds_nothing_of_the_one_before(tmp_path: Path) -> None:
    planted = launch(plants, tmp_path / "a", backend="torch-ddp", model=portable)
    before = fork_server_pids()
    found = launch(looks, tmp_path / "b", backend="torch-ddp", model=portable)
    assert fork_server_pids() == before
    assert [each[0] for each in found] == [False, False]
    draws = [tuple(drawn) for drawn in (*planted, *(each[1:] for each in found))]
    assert len({first for first, _ in draws}) == len(draws)
    assert len({second for _, second in draws}) == len(draws)


def parameters(session: Any) -> int | None:
    return session.plan.parameters  # type: ignore[no-any-return]


def test_a_module_that_was_changed_between_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    fields = {"model": "mine_changing:model", "data": "mine_changing:data"}
    for width in (3, 30):
        text = MODULE.replace("int(sys.argv[2])", str(width))
        (tmp_path / "mine_changing.py").write_text(text)
        assert launch(parameters, tmp_path / str(width), **fields) == [5 * width, 5 * width]


def test_a_fork_server_imports_while_the_run_s_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for a run that is refused, nor for one inside of a run."""
    get, seen = FORK_SERVERS.get, list[bool]()

    def watched(*given: Any) -> ForkServer:
        seen.append((tmp_path / "plan.json").exists())
        return get(*given)

    monkeypatch.setattr(FORK_SERVERS, "get", watched)
    assert launch(parameters, tmp_path) == [10, 10]
    assert seen == [False, True]
    with pytest.raises(PlanError):
        launch(parameters, tmp_path)
    monkeypatch.setenv(VARIABLE, "{}")
    with pytest.raises(IsotrainError, match="inside of a process that belongs to a run"):
        launch(parameters, tmp_path / "inside")
    assert seen == [False, True]


def leaves_one_behind(session: Any) -> None:
    """Leaves a process that has neither its parent nor its session, and runs no program of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            (session.run_directory / f"left-{session.rank}").write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    wait_until(lambda: len(list(session.run_directory.glob("left-*"))) == 2, LIMIT_SECONDS)
    if session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.parametrize("way", ["forked", pytest.param("fresh", marks=pytest.mark.slow)])
def test_what_a_killed_process_forked_and_left_behind_is_ended(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOTRAIN_START", way)
    with pytest.raises(RunFailedError, match="rank 1 of 2 was ended by SIGKILL"):
        launch(leaves_one_behind, tmp_path)
    left = [int(path.read_text()) for path in tmp_path.glob("left-*")]
    assert len(left) == 2
    assert not [pid for pid in left if is_alive(pid)]


def test_a_fork_server_that_is_killed_ends_its_run_and_the_next_has_another(tmp_path: Path) -> None:
    def kills(session: Any) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(RunFailedError, match="was ended by SIGKILL"):
        launch(kills, tmp_path / "a")
    assert launch(parameters, tmp_path / "b") == [10, 10]


def test_a_fork_server_that_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_fork_server_that_imports_ends_with_its_program(tmp_path: Path) -> None:
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


def test_fork_servers_are_shared_where_circumstances_are_the_same_and_are_few() -> None:
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


def test_a_process_that_is_forked_from_the_program_leaves_its_fork_servers_alone() -> None:
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
def test_a_fork_server_that_is_suspended_is_replaced() -> None:
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


def test_a_fork_server_that_does_not_answer_one_run_lives_on_for_another() -> None:
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


def test_a_fork_server_that_cannot_fork_says_so_and_its_processes_live_on() -> None:
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


@pytest.mark.parametrize("begun", [0, 1])
def test_a_run_whose_fork_server_cannot_fork(
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


def test_what_was_forked_ends_with_its_fork_server() -> None:
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


def test_an_imported_file_that_changes_makes_a_fork_server_useless(
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


def test_what_is_measured_starts_cold(tmp_path: Path) -> None:
    """And leaves alone what the runs before and after it start from."""
    launch(parameters, tmp_path / "warm")
    warm = fork_server_pids()
    measurement = Measurement(steps=1, evaluate=False, blocks=1, block_seconds=0.01, seconds=0.1)
    given = isotrain.TrainingSpec.model_validate(spec())
    used = []
    with mock.patch.object(ForkServer, "fork", autospec=True, side_effect=ForkServer.fork) as fork:
        for number in range(2):
            found = run_here(given, "reference", 1, measurement, tmp_path / str(number))
            assert found["ranks"][0]["plan"]["start_method"]["way"] == "forked"
            used.append(fork.call_args.args[0].pid)
    assert len({*used, *warm}) == 2 + len(warm)
    assert fork_server_pids() == warm


def fork_server_pids() -> set[int]:
    """Process ids of the fork servers of this program."""
    return {
        child.pid
        for child in psutil.Process().children()
        if is_alive(child.pid) and "forkserver.server" in " ".join(child.cmdline())
    }


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def what_keras_left(session: isotrain.Session) -> list[bool]:
    """Whether what two parts of Keras need was imported: first, and once they were used.

    To ask all modules for their files, or whether they are classes, is not to use them.
    """
    import keras

    needed = ("sklearn", "matplotlib.pyplot")
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    assert files["keras.wrappers"]
    assert not inspect.isclass(sys.modules["keras.wrappers"])
    found = [name in sys.modules for name in needed]
    assert keras.wrappers.SKLearnClassifier.__module__.startswith("keras")
    assert callable(keras.visualization.plot_image_gallery)
    return [*found, *(name in sys.modules for name in needed)]


@pytest.mark.slow
def test_keras_imports_what_few_need_when_they_use_it(tmp_path: Path) -> None:
    left = run_isolated(what_keras_left, spec(model=portable), "torch-ddp", tmp_path / "run")
    assert left == [False, False, True, True]
