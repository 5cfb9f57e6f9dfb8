"""Processes of a run that are forked find the same as those that start by themselves, and end as they do."""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import numpy as np
import pytest
from helpers.isolated import run_isolated
from helpers.leftover_processes import is_alive
from helpers.waiting import wait_until
from integration.start_method_runs import (
    LIMIT_SECONDS,
    fork_server_pids,
    launch,
    parameters,
    portable,
    spec,
)

import isotrain
from isotrain.analysis.compare.measurement.measure import Measurement
from isotrain.analysis.compare.measurement.runner import run_here
from isotrain.core.contracts.process import VARIABLE
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError
from isotrain.core.launching.forkserver.client import ForkServer
from isotrain.core.launching.forkserver.pool import FORK_SERVERS

pytestmark = pytest.mark.usefixtures("reference")

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WAYS = ("forked", "fresh")
PLANTED_SEED = 987654321
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
def test_imported_modules_see_the_command_line(way: str, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_forked_process_starts_as_a_fresh_one(
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
def test_a_run_leaves_nothing_for_the_next(tmp_path: Path) -> None:
    planted = launch(plants, tmp_path / "a", backend="torch-ddp", model=portable)
    before = fork_server_pids()
    found = launch(looks, tmp_path / "b", backend="torch-ddp", model=portable)
    assert fork_server_pids() == before
    assert [each[0] for each in found] == [False, False]
    draws = [tuple(drawn) for drawn in (*planted, *(each[1:] for each in found))]
    assert len({first for first, _ in draws}) == len(draws)
    assert len({second for _, second in draws}) == len(draws)


def test_a_module_changed_between_two_runs_is_imported_again(
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
    """It does not for a run that is refused, nor for one inside of a run."""
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
def test_orphans_of_a_killed_process_are_ended(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOTRAIN_START", way)
    with pytest.raises(RunFailedError, match="rank 1 of 2 was ended by SIGKILL"):
        launch(leaves_one_behind, tmp_path)
    left = [int(path.read_text()) for path in tmp_path.glob("left-*")]
    assert len(left) == 2
    assert not [pid for pid in left if is_alive(pid)]


@pytest.mark.slow
def test_measured_runs_start_cold(tmp_path: Path) -> None:
    """The fork servers of other runs stay."""
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
def test_keras_imports_rare_dependencies_on_first_use(tmp_path: Path) -> None:
    left = run_isolated(what_keras_left, spec(model=portable), "torch-ddp", tmp_path / "run")
    assert left == [False, False, True, True]
