"""Pipelines without a flush follow their equation in float64 to 1e-12, whatever comes between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.pipeline_tasks import Tasks, done

import isotrain
from isotrain.core.spec.schedules import CosineSchedule, OneCycleSchedule, RunLength
from isotrain.testing import digits, reference_model
from isotrain.testing.launching import try_run

pytestmark = pytest.mark.features

COUNT, EPOCHS, MOMENTUM = 3 * digits.GLOBAL_BATCH + 1, 2, 0.5
"""The last global batch of an epoch has one sample: all micro-batches but one are empty."""
BACKENDS = ("torch-ddp", "horovod-torch", "tf-multiworker", "horovod-tf")
STOP = 3
"""Steps after which a checkpoint is saved."""
RUN = RunLength(steps_per_epoch=4, total_steps=4 * EPOCHS)
CYCLE = OneCycleSchedule(momentum_range=(0.25, 0.75))
COSINE = CosineSchedule()


def spec(stages: Any, options: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    options = {"stages": stages, "schedule": "2bw", **(options or {})}
    chosen = {"name": "pipeline", "options": options}
    fields = {"model_args": {"hidden_layers": 4}, "gradient_accumulation_steps": 4, **fields}
    optimizer = {"name": "sgd", "lr": digits.RATE, "momentum": MOMENTUM}
    fields = {"optimizer": optimizer, "epochs": EPOCHS, "capture": False, **fields}
    return digits.spec(COUNT, strategy=chosen, **fields)


def weights(session: isotrain.Session) -> dict[str, np.ndarray]:
    with session.strategy.evaluating(session.group):
        return session.read_state(("trainable",))


def trained(session: isotrain.Session, name: str = "") -> dict[str, Any]:
    """Trains to the end without a break."""
    start = weights(session)
    return {"start": start, **gone_on(session)}


def gone_on(session: isotrain.Session) -> dict[str, Any]:
    losses = [float(session.step(batch)) for batch in session.batches()]
    return {"losses": losses, "end": weights(session)}


def interrupted(session: isotrain.Session, name: str, *, folder: Path) -> dict[str, Any]:
    """Evaluates, saves and reads weights between steps; then goes on, twice, from what was saved."""
    start, losses, read = weights(session), [], []
    for batch in session.batches():
        losses.append(float(session.step(batch)))
        if batch.step + 1 == STOP:
            session.save(folder / name)
        if batch.step % 3 == 1:
            read.append(weights(session))
    found = {"start": start, "losses": losses, "end": weights(session), "read": read}
    session.restore(folder / name)
    found["again"] = gone_on(session)
    session.seek(0)
    session.step(next(session.batches()))  # in the pipeline when the state is replaced
    session.restore(folder / name)
    return {**found, "replaced": gone_on(session), "report": session.strategy_report}


def from_checkpoint(session: isotrain.Session, name: str, *, checkpoint: Path) -> dict[str, Any]:
    session.restore(checkpoint)
    return gone_on(session)


def written(session: isotrain.Session, name: str) -> dict[str, Any]:
    """Trains anew from weights that are written while a step is in the pipeline."""
    start = weights(session)
    batches = session.batches()
    for _ in range(2):
        session.step(next(batches))
    state = session.read_state(("optimizer",))
    session.write_state(start | {n: np.zeros_like(v) for n, v in state.items() if v.ndim})
    session.seek(0)
    return {"start": start, **gone_on(session)}


Rates = Callable[[int, str], tuple[float, float]]
"""Learning rate and momentum of a step, counted from 0, for the weight of a name."""


def constant(step: int, name: str) -> tuple[float, float]:
    return digits.RATE, MOMENTUM


def one_cycle(step: int, name: str) -> tuple[float, float]:
    """As in Keras, the momentum is a float32 number."""
    momentum = CYCLE.momentum(step, RUN)
    assert momentum is not None
    return digits.RATE * CYCLE.fraction(step, RUN), float(np.float32(momentum))


def cosine_head(step: int, name: str) -> tuple[float, float]:
    fraction = COSINE.fraction(step, RUN) if name.startswith("head/") else 1.0
    return digits.RATE * fraction, MOMENTUM


def delayed(
    start: Mapping[str, np.ndarray], norm: float | None = None, rates: Rates = constant
) -> Iterator[tuple[float, dict[str, np.ndarray]]]:
    """Loss and next weights of each step: w(t + 1) = w(t) - lr gradient_t(w(t - 1)), with momentum.

    Args:
        start: Initial weights.
        norm: Largest norm of a gradient; None for any.
        rates: Learning rate and momentum of each step.
    """
    step = 0
    before = current = dict(start)
    velocity = {name: np.zeros_like(value) for name, value in start.items()}
    for epoch in range(EPOCHS):
        for rows in reference_model.epoch_batches(epoch, digits.GLOBAL_BATCH, COUNT):
            oracle = digits.Oracle(before, COUNT)
            gradients = oracle.gradients(rows)
            size = np.sqrt(sum((each**2).sum() for each in gradients.values()))
            factor = 1.0 if norm is None else min(1.0, norm / size)
            for name, gradient in gradients.items():
                rate, momentum = rates(step, name)
                velocity[name] = momentum * velocity[name] - rate * factor * gradient
            before, current = current, {n: value + velocity[n] for n, value in current.items()}
            step += 1
            yield oracle.loss(rows), current


def assert_follows(
    found: Mapping[str, Any], norm: float | None = None, rates: Rates = constant
) -> None:
    assert_equal_to(found, list(delayed(found["start"], norm, rates)))


def assert_equal_to(
    found: Mapping[str, Any], expected: Sequence[tuple[float, dict[str, np.ndarray]]]
) -> None:
    assert len(found["losses"]) == len(expected)
    np.testing.assert_allclose(found["losses"], [loss for loss, _ in expected], rtol=1e-12)
    assert_close(found["end"], expected[-1][1])
    for each, (_, near) in zip(found.get("read", ()), expected[1::3], strict=False):
        assert_close(each, near)
    for part in ("again", "replaced"):
        if part in found:
            assert found[part]["losses"] == found["losses"][STOP:], part
            for name, value in found["end"].items():
                assert np.array_equal(found[part]["end"][name], value), (part, name)


def assert_close(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)


def test_the_oracle_is_of_delayed_updates() -> None:
    """Its first two losses are both of the initial weights; those of plain SGD are not."""
    generator = np.random.default_rng(3)
    start = {"head/kernel": generator.normal(size=(64, 10)), "head/bias": generator.normal(size=10)}
    losses = [loss for loss, _ in delayed(start)]
    oracle, plain = digits.Oracle(start, COUNT), []
    for rows in reference_model.epoch_batches(0, digits.GLOBAL_BATCH, COUNT):
        plain.append(oracle.loss(rows))
        oracle.step(rows)
    assert losses[0] == plain[0]
    assert losses[1] != pytest.approx(plain[1], rel=1e-3)


def two_stages(folder: Path) -> Tasks:
    cycle = CYCLE.model_dump(mode="json")
    head = {"weights": "head/*", "schedule": {"name": "cosine"}}
    sgd = {"name": "sgd", "lr": digits.RATE, "momentum": MOMENTUM, "groups": [head]}
    return {
        "plain": (spec(2), trained),
        "interrupted": (spec(2), partial(interrupted, folder=folder / "constant")),
        "written": (spec(2), written),
        "clipped": (spec(2, clip={"global_norm": 0.25}), trained),
        "recomputed": (spec(2, recompute="*", gradient_accumulation_steps=1), trained),
        "one-cycle": (spec(2, schedule=cycle), partial(interrupted, folder=folder / "one-cycle")),
        "group": (spec(2, optimizer=sgd), partial(interrupted, folder=folder / "group")),
    }


RATES: Mapping[str, Rates] = {"one-cycle": one_cycle, "group": cosine_head}


@functools.cache
def of_backend(backend: str, folder: Path) -> Sequence[dict[str, Any]]:
    return done(two_stages(folder), 1, backend)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("delayed")


@pytest.mark.parametrize("name", two_stages(Path()))
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_stages_follow_the_equation(folder: Path, backend: str, name: str) -> None:
    for process in of_backend(backend, folder / backend):
        norm = 0.25 if name == "clipped" else None
        assert_follows(process[name], norm, RATES.get(name, constant))
        if name == "interrupted":
            assert process[name]["report"] == {"staleness": [1, 1]}


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker"])
def test_more_stages_and_unequal_ones_follow_the_equation(backend: str, tmp_path: Path) -> None:
    tasks: Tasks = {
        "2-1-1": (spec([2, 1, 1]), partial(interrupted, folder=tmp_path / "2-1-1")),
        "four": (spec(4), partial(interrupted, folder=tmp_path / "four")),
    }
    for process in done(tasks, 1, backend):
        for found in process.values():
            assert_follows(found)


@pytest.mark.parametrize("backend", ["torch-ddp", "horovod-tf"])
def test_replicas_follow_the_equation(backend: str) -> None:
    clip = {"global_norm": 0.25}
    tasks: Tasks = {"": (spec(2), trained), "clipped": (spec(2, clip=clip), trained)}
    for process in done(tasks, 2, backend):
        assert_follows(process[""])
        assert_follows(process["clipped"], 0.25)


def restored(session: isotrain.Session, *, checkpoint: Path) -> dict[str, np.ndarray]:
    session.restore(checkpoint)
    return weights(session)


def test_another_strategy_goes_on_from_the_newest_weights(folder: Path) -> None:
    """The version before them is of no use there."""
    (found, *_) = of_backend("torch-ddp", folder / "torch-ddp")
    plain = spec(2) | {"strategy": {"name": "data-parallel"}}
    work = partial(restored, checkpoint=folder / "torch-ddp" / "constant")
    run = try_run(work, plain, "torch-ddp", 1)
    assert run.failure is None, run.failure
    expected = list(delayed(found["interrupted"]["start"]))
    assert_close(run.returned[0], expected[STOP - 1][1])


def saved(session: isotrain.Session, *, checkpoint: Path) -> None:
    session.step(next(session.batches()))
    session.save(checkpoint)


def said_late(fields: dict[str, Any], checkpoint: Path, output: Path) -> bool:
    """Whether a run that restores a checkpoint says that its first updates are not late."""
    told: list[Mapping[str, Any]] = []
    isotrain.launch(
        partial(restored, checkpoint=checkpoint),
        fields,
        backend="torch-ddp",
        replicas=1,
        output=output,
        on_event=told.append,
    )
    (resumed,) = (each for each in told if each["event"] == "resumed")
    versions = [line for line in resumed["lost"] if "versions" in line or "execution/" in line]
    assert len(versions) <= 1, versions
    return any("starts with equal versions of the weights" in line for line in versions)


def test_a_resumed_run_says_that_its_first_update_is_not_late(folder: Path, tmp_path: Path) -> None:
    """After another schedule or in other stages; not where the checkpoint has the version before."""
    of_backend("torch-ddp", folder / "torch-ddp")
    late, flushed = folder / "torch-ddp" / "constant", tmp_path / "1f1b"
    fields = spec(2) | {"strategy": {"name": "pipeline", "options": {"stages": 2}}}
    run = try_run(partial(saved, checkpoint=flushed), fields, "torch-ddp", 1)
    assert run.failure is None, run.failure
    assert said_late(spec(2), flushed, tmp_path / "schedule")
    assert said_late(spec(3), late, tmp_path / "stages")
    assert not said_late(spec(2), late, tmp_path / "same")
