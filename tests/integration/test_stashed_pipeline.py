"""`schedule: pipedream` follows PipeDream's equations in float64 to 1e-12, whatever comes between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.pipeline_tasks import Tasks, done
from integration.test_delayed_pipeline import (
    BACKENDS,
    COUNT,
    CYCLE,
    EPOCHS,
    STOP,
    Rates,
    assert_equal_to,
    constant,
    cosine_head,
    from_checkpoint,
    interrupted,
    one_cycle,
    restored,
    said_late,
    spec,
    trained,
)

import isotrain
from isotrain.testing import digits, reference_model
from isotrain.testing.launching import try_run

pytestmark = pytest.mark.features

MICRO_BATCHES = 4
BOUND, NORM = 0.0625, 0.25
"""Largest element, and largest L2 norm, of a clipped gradient."""
LAYERS = ("hidden", "hidden_2", "hidden_3", "hidden_4", "head")
Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Pipe:
    """A pipeline, with the staleness that the paper states for it.

    Attributes:
        first: Names of the layers with which its stages begin.
        processes: Number of processes of each stage.
        delays: Updates of each stage that a gradient does not know of, by stage.
        replicas: Number of replicas.
        vertical: Micro-batches that the version of the first stage does not know, counted from the first one
            of those that its processes take together; None without vertical sync.
    """

    first: tuple[str, ...]
    processes: tuple[int, ...]
    delays: tuple[int, ...]
    replicas: int = 1
    vertical: int | None = None

    def spec(self, **fields: Any) -> dict[str, Any]:
        stages = list(self.processes) if max(self.processes) > 1 else len(self.processes)
        options = {"schedule": "pipedream", "cut": list(self.first[1:])}
        if self.vertical is not None:
            options["vertical_sync"] = True
        return spec(stages, options, **fields)

    def stage_of(self, name: str) -> int:
        layer = LAYERS.index(name.partition("/")[0])
        return sum(LAYERS.index(first) <= layer for first in self.first) - 1

    def version(self, stage: int, micro_batch: int) -> int:
        """Number of updates that a stage's weights have had when it computes a micro-batch of the run."""
        count = self.processes[stage]
        if self.vertical is None:
            return max(0, micro_batch // count - self.delays[stage])
        known = micro_batch // self.processes[0] * self.processes[0] - self.vertical
        return max(0, known // count)


TWO = ("hidden", "hidden_3")
THREE = ("hidden", "hidden_2", "hidden_4")
PIPES = {
    "two": Pipe(TWO, (1, 1), (1, 0)),
    "two, synchronous": Pipe(TWO, (1, 1), (1, 1), vertical=1),
    "three": Pipe(THREE, (1, 1, 1), (2, 1, 0)),
    "three, synchronous": Pipe(THREE, (1, 1, 1), (2, 2, 2), vertical=2),
    "2-1-1": Pipe(THREE, (2, 1, 1), (1, 1, 0)),
    "2-1-1, synchronous": Pipe(THREE, (2, 1, 1), (1, 3, 3), vertical=2),
    "two replicas": Pipe(TWO, (1, 1), (1, 0), replicas=2),
}


def micro_batches(rows: np.ndarray, replicas: int) -> list[list[np.ndarray]]:
    """Samples of each micro-batch, by replica; the first parts have one more where they cannot be equal."""
    slices = np.array_split(rows, replicas)
    return [np.array_split(each, MICRO_BATCHES) for each in slices]


def whole(gradient: np.ndarray) -> np.ndarray:
    return gradient


def of_bounded_values(gradient: np.ndarray) -> np.ndarray:
    return np.clip(gradient, -BOUND, BOUND)


def of_bounded_norm(gradient: np.ndarray) -> np.ndarray:
    return gradient * min(1.0, NORM / float(np.sqrt((gradient**2).sum())))


def stashed(
    start: Mapping[str, np.ndarray],
    pipe: Pipe,
    rates: Rates = constant,
    clipped: Callable[[np.ndarray], np.ndarray] = whole,
) -> Iterator[tuple[float, Weights]]:
    """Loss and next weights of each step: every stage keeps all versions of its weights.

    A stage of n processes makes an update by the mean gradient over the samples of n micro-batches of each
    replica, and none where there are no samples.
    """
    versions: dict[str, list[np.ndarray]] = {name: [value] for name, value in start.items()}
    velocity = {name: np.zeros_like(value) for name, value in start.items()}
    sums = {name: np.zeros_like(value) for name, value in start.items()}
    counts = dict.fromkeys(start, 0)
    step = 0
    for epoch in range(EPOCHS):
        for rows in reference_model.epoch_batches(epoch, digits.GLOBAL_BATCH, COUNT):
            loss, parts = 0.0, micro_batches(rows, pipe.replicas)
            for number in range(MICRO_BATCHES):
                index = step * MICRO_BATCHES + number
                used = {
                    name: of_name[pipe.version(pipe.stage_of(name), index)]
                    for name, of_name in versions.items()
                }
                oracle = digits.Oracle(used, COUNT)
                for own in (part[number] for part in parts):
                    if not len(own):
                        continue
                    loss += oracle.loss(own) * len(own) / len(rows)
                    for name, gradient in oracle.gradients(own).items():
                        sums[name] += gradient * len(own)
                        counts[name] += len(own)
                for name in start:
                    if (index + 1) % pipe.processes[pipe.stage_of(name)]:
                        continue
                    rate, momentum = rates(step, name)
                    newest = versions[name][-1]
                    if counts[name]:
                        mean = clipped(sums[name] / counts[name])
                        velocity[name] = momentum * velocity[name] - rate * mean
                        newest = newest + velocity[name]
                    versions[name].append(newest)
                    sums[name], counts[name] = np.zeros_like(newest), 0
            step += 1
            yield loss, {name: of_name[-1] for name, of_name in versions.items()}


def test_the_oracle_is_of_stashed_weights() -> None:
    """Its losses are those of updates that know of each other only where there is one stage."""
    generator = np.random.default_rng(3)
    start = {"hidden/kernel": generator.normal(size=(64, 16)), "hidden/bias": np.zeros(16)}
    start |= {"head/kernel": generator.normal(size=(16, 10)), "head/bias": np.zeros(10)}
    plain = {name: value.copy() for name, value in start.items()}
    velocity = {name: np.zeros_like(value) for name, value in start.items()}
    losses = []
    for rows in reference_model.epoch_batches(0, digits.GLOBAL_BATCH, COUNT)[:2]:
        for own in micro_batches(rows, 1)[0]:
            oracle = digits.Oracle(plain, COUNT)
            losses.append(oracle.loss(own))
            rate, momentum = constant(0, "")
            for name, gradient in oracle.gradients(own).items():
                velocity[name] = momentum * velocity[name] - rate * gradient
                plain[name] = plain[name] + velocity[name]
    means = [float(np.mean(losses[:4])), float(np.mean(losses[4:]))]
    one = [loss for loss, _ in stashed(start, Pipe(("hidden",), (1,), (0,)))][:2]
    two = [loss for loss, _ in stashed(start, Pipe(("hidden", "head"), (1, 1), (1, 0)))][:2]
    assert one == pytest.approx(means, rel=1e-12)
    assert two != pytest.approx(means, rel=1e-4)


def two_stages(folder: Path) -> Tasks:
    two = PIPES["two"]
    cycle = CYCLE.model_dump(mode="json")
    sgd = {"name": "sgd", "lr": digits.RATE, "momentum": 0.5}
    head = {"weights": "head/*", "schedule": {"name": "cosine"}}
    return {
        "two": (two.spec(), partial(interrupted, folder=folder / "two")),
        "two, synchronous": (
            PIPES["two, synchronous"].spec(),
            partial(interrupted, folder=folder / "synchronous"),
        ),
        "recomputed": (two.spec(recompute="*"), trained),
        "values": (two.spec(clip={"value": BOUND}), trained),
        "norms": (two.spec(clip={"norm": NORM}), trained),
        "one-cycle": (two.spec(schedule=cycle), partial(interrupted, folder=folder / "cycle")),
        "group": (
            two.spec(optimizer={**sgd, "groups": [head]}),
            partial(interrupted, folder=folder / "group"),
        ),
    }


RATES: Mapping[str, Rates] = {"one-cycle": one_cycle, "group": cosine_head}
CLIPPED = {"values": of_bounded_values, "norms": of_bounded_norm}


@functools.cache
def of_backend(backend: str, folder: Path) -> Sequence[dict[str, Any]]:
    return done(two_stages(folder), 1, backend)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stashed")


def assert_follows(
    found: Mapping[str, Any],
    pipe: Pipe,
    rates: Rates = constant,
    clipped: Callable[[np.ndarray], np.ndarray] = whole,
) -> None:
    assert_equal_to(found, list(stashed(found["start"], pipe, rates, clipped)))
    if "report" in found:
        assert found["report"] == {"staleness": list(pipe.delays)}


@pytest.mark.parametrize("name", two_stages(Path()))
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_stages_follow_the_equations(folder: Path, backend: str, name: str) -> None:
    for process in of_backend(backend, folder / backend):
        pipe, rates = PIPES.get(name, PIPES["two"]), RATES.get(name, constant)
        assert_follows(process[name], pipe, rates, CLIPPED.get(name, whole))


@pytest.mark.parametrize(
    "names", [("three", "three, synchronous"), ("2-1-1", "2-1-1, synchronous")]
)
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker", "horovod-tf"])
def test_more_stages_and_unequal_ones_follow_the_equations(
    backend: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    tasks: Tasks = {
        name: (PIPES[name].spec(), partial(interrupted, folder=tmp_path / name)) for name in names
    }
    for process in done(tasks, 1, backend):
        for name, found in process.items():
            assert_follows(found, PIPES[name])


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker"])
def test_replicas_follow_the_equations(backend: str) -> None:
    pipe = PIPES["two replicas"]
    for process in done({"": (pipe.spec(), trained)}, 2, backend):
        assert_follows(process[""], pipe)


@pytest.mark.parametrize(
    ("saver", "backend"),
    [("torch-ddp", "horovod-tf"), ("tf-multiworker", "horovod-torch"), ("horovod-tf", "torch-ddp")],
)
def test_another_framework_goes_on_with_the_versions(
    folder: Path, saver: str, backend: str
) -> None:
    first, *_ = of_backend(saver, folder / saver)
    saved = {"two": "two", "two, synchronous": "synchronous"}
    tasks: Tasks = {
        name: (
            PIPES[name].spec(),
            partial(from_checkpoint, checkpoint=folder / saver / subfolder),
        )
        for name, subfolder in saved.items()
    }
    for process in done(tasks, 1, backend):
        for name, found in process.items():
            expected = list(stashed(first[name]["start"], PIPES[name]))
            assert_equal_to(found, expected[STOP:])


def resumed(session: isotrain.Session, name: str, *, checkpoint: Path) -> tuple[bool, str]:
    """Whether this process then has a version that is not the newest; and what its strategy says of it."""
    session.restore(checkpoint)
    newest, versions = session.read_state(("trainable",)), session.group.read_state(("execution",))
    is_late = any(
        not np.array_equal(value, newest[weight])
        for of_version, value in versions.items()
        for weight in newest
        if of_version.endswith(f"/{weight}")
    )
    return is_late, " ".join(session.strategy.resume_notes("pipeline", 1, 1))


def test_all_stages_go_on_with_their_versions_or_none(folder: Path) -> None:
    """Where a stage lacks versions, no other takes its own; and the run says so."""
    of_backend("torch-ddp", folder / "torch-ddp")
    task = partial(resumed, checkpoint=folder / "torch-ddp" / "two")
    others = {
        "synchronous": PIPES["two, synchronous"],
        "later": Pipe(("hidden", "hidden_4"), (1, 1), (1, 0)),
        "earlier": Pipe(("hidden", "hidden_2"), (1, 1), (1, 0)),
    }
    tasks: Tasks = {"same": (PIPES["two"].spec(), task)}
    first, last = done({**tasks, **{n: (pipe.spec(), task) for n, pipe in others.items()}}, 1)
    assert [*first["same"]] == [True, ""]
    for name in others:
        assert not first[name][0], name
        assert not last[name][0], name
        assert "starts with equal versions of the weights" in first[name][1], name


def test_another_schedule_goes_on_from_the_newest_weights(folder: Path, tmp_path: Path) -> None:
    """It says so, and so does a pipeline with other versions; one with the same goes on exactly."""
    (found, *_) = of_backend("torch-ddp", folder / "torch-ddp")
    checkpoint = folder / "torch-ddp" / "two"
    run = try_run(
        partial(restored, checkpoint=checkpoint),
        spec(2) | {"strategy": {"name": "data-parallel"}},
        "torch-ddp",
        1,
    )
    assert run.failure is None, run.failure
    expected = list(stashed(found["two"]["start"], PIPES["two"]))
    for name, value in expected[2][1].items():
        np.testing.assert_allclose(run.returned[0][name], value, rtol=0, atol=1e-12, err_msg=name)
    assert said_late(spec(2), checkpoint, tmp_path / "2bw")
    assert said_late(PIPES["three"].spec(), checkpoint, tmp_path / "three")
    assert not said_late(PIPES["two"].spec(), checkpoint, tmp_path / "two")
