"""Real runs through a parameter server: equal to data parallelism, and not stopped by a lost worker."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import numpy as np
import psutil
import pytest
from helpers.leftover_processes import no_leftover_processes
from helpers.waiting import wait_until

import isotrain
from isotrain.core.contracts.process import from_variables
from isotrain.core.errors import RunFailedError
from isotrain.core.plugins.manager import plugin_manager
from isotrain.testing import digits, reference_model
from isotrain.testing.reference import kit_models

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("reference")

REPLICAS = 2
MOMENT = 2
"""The step after which something bad happens."""
RATE = 0.125
CALLS = 3
ADAM = {
    "optimizer": {
        "name": "adam",
        "lr": 0.0078125,
        "beta_1": 0.875,
        "beta_2": 0.96875,
        "epsilon": 2.0**-20,  # which float32 holds
    },
    "clip": {"global_norm": 0.5},
    "gradient_accumulation_steps": 2,
}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test may leave a process behind."""
    with no_leftover_processes():
        yield


def parameter_server_spec(
    staleness: int | None, backend: str = "reference", **changes: Any
) -> dict[str, Any]:
    chosen = {"name": "parameter-server", "options": {"staleness": staleness}}
    adapter = plugin_manager().backend(backend)
    return reference_model.spec(adapter, strategy=chosen, threads=1, **changes)


def launch(work: Any, spec: Any, backend: str, folder: Path) -> dict[str, Any]:
    returned = isotrain.launch(
        work,
        spec,
        backend=backend,
        replicas=REPLICAS,
        output=folder,
        on_event=lambda _: None,
    )
    found: dict[str, Any] = returned[0]
    return found


def train(session: isotrain.Session) -> dict[str, Any]:
    """Trains on batches of 7, 7, 7 and 1: uneven, and in the end with empty replicas."""
    losses, metrics = [], []
    for batch in session.batches():
        losses.append(session.step(batch))
        if batch.is_last_of_epoch:
            metrics.append({**session.metrics(), **session.evaluate()})
    state = session.read_state(["trainable", "non-trainable"])
    return {
        "loss": [float(loss) for loss in losses],
        "metrics": metrics,
        "state": {
            name: value
            for name, value in state.items()
            if not name.endswith(("seed_generator_state", "draws"))
        },
        "report": session.strategy_report,
        "processes": [process.role for process in session.plan.processes],
    }


@functools.cache
def by_data_parallelism() -> dict[str, Any]:
    import tempfile

    spec = reference_model.spec(plugin_manager().backend("reference"), **ADAM, threads=1)
    return launch(train, spec, "reference", Path(tempfile.mkdtemp()) / "run")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "backend",
    [
        "reference",
        *(pytest.param(b, marks=SLOW) for b in ("torch-ddp", "tf-multiworker", "horovod-tf")),
    ],
)
def test_without_staleness_it_equals_data_parallel(backend: str, tmp_path: Path) -> None:
    """It is tried with Adam, clipping, accumulation, uneven and empty slices, statistics and metrics.

    Under one backend workers compute all layers again in the backward pass.
    """
    expected = by_data_parallelism()
    again = {"recompute": "*"} if backend == "horovod-tf" else {}
    found = launch(
        train, parameter_server_spec(0, backend, **ADAM, **again), backend, tmp_path / "run"
    )
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-10)
    for one, other in zip(found["metrics"], expected["metrics"], strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    assert found["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        np.testing.assert_allclose(found["state"][name], value, rtol=1e-9, atol=1e-10, err_msg=name)
    assert found["report"]["updates"] == len(expected["loss"])
    assert found["report"]["staleness_max"] == 0
    assert found["processes"].count("server") == (backend == "tf-multiworker")


def pid_of(session: isotrain.Session, rank: int) -> int:
    """As the process itself has told, once the launcher has written that."""

    def told() -> list[int]:
        text = (session.run_directory / "events.jsonl").read_text(encoding="utf-8")
        events = [
            json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")
        ]
        return [e["pid"] for e in events if e["event"] == "started" and e["rank"] == rank]

    wait_until(lambda: bool(told()), 60)
    return told()[0]


def hit(number: signal.Signals, rank: int) -> Any:
    """Work in which a process is sent a signal in the middle of the run."""

    def work(session: isotrain.Session) -> dict[str, Any]:
        start, losses = session.read_state(["trainable"]), []
        for batch in session.batches():
            losses.append(session.step(batch))
            if batch.step == MOMENT:
                os.kill(pid_of(session, rank), number)
        return {
            "start": start,
            "end": session.read_state(["trainable"]),
            "loss": [float(loss) for loss in losses],
            "report": session.strategy_report,
            "validation": session.evaluate(),
        }

    return work


def lost_in(folder: Path) -> list[int]:
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return [event["lost_rank"] for event in events if event["event"] == "worker lost"]


@pytest.mark.parametrize("backend", ["reference", pytest.param("tf-multiworker", marks=SLOW)])
def test_each_sample_counts_once_though_a_worker_is_killed(backend: str, tmp_path: Path) -> None:
    """The gradient of `seen` is the same at any weights, so it shows which samples counted, and how much."""
    bound, epochs = 1, 6
    spec = parameter_server_spec(
        bound, backend, optimizer={"name": "sgd", "lr": RATE}, epochs=epochs
    )
    found = launch(hit(signal.SIGKILL, 2), spec, backend, tmp_path / "run")
    moved = np.zeros(reference_model.SAMPLES)
    for epoch in range(epochs):
        for rows in reference_model.epoch_batches(epoch):
            moved[rows] += RATE / len(rows)
    seen = found["start"]["seen/embeddings"] - found["end"]["seen/embeddings"]
    np.testing.assert_allclose(seen[:, 0], moved, rtol=1e-12)
    report = found["report"]
    assert [loss["rank"] for loss in report["workers_lost"]] == [2] == lost_in(tmp_path / "run")
    assert report["lag_max"] <= bound
    assert report["staleness_max"] < (2 * bound + 1) * REPLICAS
    if backend == "reference":  # both slices of the first batch are sent before an update is made
        assert report["staleness_max"] > 0
    assert report["slices"] == report["updates"] == epochs * (3 * REPLICAS + 1)
    assert sum(report["staleness_histogram"].values()) == report["slices"]
    assert np.isfinite(found["loss"]).all()


def lose_a_result(session: isotrain.Session) -> dict[str, Any]:
    """The first result is lost with the worker that has it, after it was computed."""
    import tensorflow as tf

    submit, lost = ThreadPoolExecutor.submit, [True]

    def fetched(fetch: Any) -> Any:
        result = fetch()
        if lost and lost.pop():
            raise tf.errors.UnavailableError(None, None, "its worker is gone")
        return result

    def submitted(waiting: ThreadPoolExecutor, fetch: Any) -> Any:
        return submit(waiting, fetched, fetch)

    with mock.patch.object(ThreadPoolExecutor, "submit", submitted):
        for batch in session.batches():
            session.step(batch)
    assert not lost
    return session.strategy_report


@SLOW
def test_a_slice_whose_result_was_lost_is_computed_again(tmp_path: Path) -> None:
    spec = parameter_server_spec(1, "tf-multiworker", epochs=2)
    report = launch(lose_a_result, spec, "tf-multiworker", tmp_path / "run")
    assert report["slices"] == report["updates"] == 2 * (3 * REPLICAS + 1)


def give_up_a_worker(session: isotrain.Session) -> dict[str, Any]:
    """Whether the process of a worker that was silent for too long ends while this one still trains."""
    other = psutil.Process(pid_of(session, 2))
    batches = session.batches()
    session.step(next(batches))
    other.suspend()
    while not session.strategy_report["workers_lost"]:
        session.step(next(batches))
    with contextlib.suppress(psutil.NoSuchProcess):
        other.resume()
    end = time.monotonic() + 30.0
    while other.is_running() and other.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.05)
    return {"ended": time.monotonic() < end, "rest": len([session.step(b) for b in batches])}


Suspended = dict[str, tuple[dict[str, Any], list[int]]]


@pytest.fixture(scope="module")
def suspended(reference: None, tmp_path_factory: pytest.TempPathFactory) -> Suspended:
    """What two runs return in which a worker is suspended, and whom they lost: both wait at once."""
    timeouts = {"silence": 3.0}
    unbounded = {"name": "parameter-server", "options": {"staleness": None}}
    adapter, folder = plugin_manager().backend("reference"), tmp_path_factory.mktemp("suspended")
    runs = {
        "one that stays so": (
            hit(signal.SIGSTOP, 1),
            digits.spec(adapter=adapter, strategy=unbounded, timeouts=timeouts),
        ),
        "one that goes on": (give_up_a_worker, parameter_server_spec(0, timeouts=timeouts)),
    }

    def ended(name: str) -> tuple[dict[str, Any], list[int]]:
        return launch(*runs[name], "reference", folder / name), lost_in(folder / name)

    with no_leftover_processes(), ThreadPoolExecutor(len(runs)) as pool:
        return dict(zip(runs, pool.map(ended, runs), strict=True))


@SLOW  # the digits come with a library that is slow to import
def test_it_converges_though_a_worker_is_suspended(suspended: Suspended) -> None:
    found, lost = suspended["one that stays so"]
    expected = digits.Oracle(found["start"]).trained().accuracy()
    assert found["validation"]["accuracy"] > expected - 0.05
    report = found["report"]
    assert report["staleness_bound"] is None
    assert [loss["rank"] for loss in report["workers_lost"]] == [1] == lost
    assert sum(report["slices_by_worker"].values()) == report["slices"]


@pytest.mark.slow
def test_a_worker_that_was_given_up_ends_before_the_run(suspended: Suspended) -> None:
    found, lost = suspended["one that goes on"]
    assert found["ended"]
    assert found["rest"] > 0
    assert lost == [2]


def test_the_run_ends_with_its_coordinator(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="rank 0 of 3 was ended by SIGKILL"):
        launch(hit(signal.SIGKILL, 0), parameter_server_spec(None), "reference", tmp_path / "run")


def fail_on_a_worker(model: Any, batch: Any) -> Any:
    """The objective of the probe, which fails in a worker at some call."""
    global CALLS
    context = from_variables(os.environ)
    if context is not None and context.role == "worker":
        CALLS -= 1
        if CALLS < 0:
            raise ValueError("a deliberate mistake")
    return kit_models.probe_objective(model, batch)


def test_a_model_that_fails_on_a_worker_fails_the_run(tmp_path: Path) -> None:
    spec = parameter_server_spec(None, objective=fail_on_a_worker, metrics=[])
    with pytest.raises(RunFailedError) as caught:
        launch(train, spec, "reference", tmp_path / "run")
    text = str(caught.value)
    assert "of 3 raised ValueError" in text.splitlines()[0]
    assert "fail_on_a_worker" in text
    assert "a deliberate mistake" in text


@SLOW
def test_metrics_that_cannot_be_added_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(isotrain.RunFailedError, match="r2_score makes its variables when it sees"):
        launch(
            train,
            parameter_server_spec(0, "torch-ddp", metrics=["r2_score"]),
            "torch-ddp",
            tmp_path / "run",
        )
