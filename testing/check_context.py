"""What a check is given: an open session, and the little that checks do over and over."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.loader import Loader
from isotrain.core.data.sources import as_source
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.session.session import Session
from isotrain.testing import reference_model
from isotrain.testing.file_exchange import FileExchange

CLOSE = 1e-12
"""Relative difference that rounding of float64 sums explains."""


@dataclass(frozen=True)
class Trained:
    """What training gives from the start to the end, on this process.

    Attributes:
        losses: Of every step.
        metrics: Of all samples, by name.
        weights: At the end, by name.
        statistics: At the end: the state that is not trained, by name.
    """

    losses: list[float]
    metrics: dict[str, float]
    weights: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]


class CheckContext:
    """A session under test.

    Attributes:
        session: The session.
        group: Its replicas.
        supported: What its backend declares of such groups.
        board: For comparing notes over the processes.
        starts: The state of every process before the first step.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.group = session.group
        self.supported = (
            plugin_manager()
            .backend(session.plan.backend)
            .capabilities_for(session.plan.parallel_layout)
            .has
        )
        self.board = FileExchange(session.run_directory, session.rank, len(session.plan.processes))
        self.starts = self.board.all_gather(session.read_state())

    def restart(self) -> None:
        """Puts weights, moving statistics and optimizer slots to the start on every replica.

        Every process writes the same, as `write_state` asks: what process 0 started with, and NumPy's
        weights.
        """
        self.session.write_state({**self.starts[0], **reference_model.starting_state()})
        self.session.seek(0)

    @functools.cached_property
    def trained(self) -> Trained:
        """Takes every step of the run, when a check first asks; all processes ask in the same check."""
        self.restart()
        self.session.metrics()
        losses = [float(self.session.step(batch)) for batch in self.session.batches()]
        return Trained(
            losses,
            self.session.metrics(),
            self.session.read_state(("trainable",)),
            self.session.read_state(("non-trainable",)),
        )

    def trainable_names(self) -> list[str]:
        """In the order of `gradients`."""
        return list(self.session.read_state(("trainable",)))

    def batches(self, count: int, size: int, gradient_accumulation_steps: int = 1) -> list[Batch]:
        """The first `count` samples in order, in global batches of `size`."""
        return batches_in_order(
            self.group, reference_model.samples(count), size, gradient_accumulation_steps
        )

    def same_for_all(self, count: int, noise: float = 0.0) -> Batch:
        """A batch in which every replica has the very same samples."""
        inputs, targets = reference_model.samples(count, noise)
        placed = Slice(self.group.to_device(inputs), self.group.to_device(targets), count, 1.0)
        size = count * self.group.replicas
        return Batch(
            0, 0, 0, size, False, True, tuple((placed,) for _ in self.group.local_replicas)
        )

    def gradients_of_all(self, batch: Batch) -> tuple[list[dict[str, np.ndarray]], float]:
        """Every replica's gradients by name, brought together without collectives; and the loss."""
        names = self.trainable_names()
        gradients, loss = self.group.gradients(batch)
        flat = [
            np.concatenate([self.group.numpy(gradient).ravel() for gradient in own])
            for own in gradients
        ]
        shapes = {name: value.shape for name, value in reference_model.starting_state().items()}
        return [_split(row, names, shapes) for row in self.board.all_gather_rows(flat)], float(loss)


def batches_in_order(
    group: ReplicaGroup, samples: Any, size: int, gradient_accumulation_steps: int = 1
) -> list[Batch]:
    """Global batches of `size` from all samples, for the replicas of this process."""
    loader = Loader(
        as_source(samples),
        global_batch_size=size,
        replicas=group.replicas,
        local_replicas=group.local_replicas,
        seed=0,
        shuffle=False,
        drop_remainder=False,
        gradient_accumulation_steps=gradient_accumulation_steps,
        epochs=1,
        to_device=group.to_device,
    )
    return list(loader)


def _split(
    row: np.ndarray, names: list[str], shapes: dict[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    ends = np.cumsum([int(np.prod(shapes[name])) for name in names])[:-1]
    parts = np.split(row, ends)
    return {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}


def assert_close(actual: Any, expected: Any, what: str) -> None:
    """Equal but for the rounding of sums; arrays, numbers, or dicts of them."""
    if isinstance(expected, dict):
        assert set(actual) == set(expected), f"{what}: {sorted(actual)} != {sorted(expected)}"
        for name, value in expected.items():
            assert_close(actual[name], value, f"{what}: {name}")
        return
    np.testing.assert_allclose(actual, expected, rtol=CLOSE, atol=CLOSE, err_msg=what)


def assert_same(actual: Any, expected: Any, what: str) -> None:
    """Equal to the bit, in the same type and shape."""
    if isinstance(expected, dict):
        assert set(actual) == set(expected), f"{what}: {sorted(actual)} != {sorted(expected)}"
        for name, value in expected.items():
            assert_same(actual[name], value, f"{what}: {name}")
        return
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    assert np.array_equal(actual, expected, equal_nan=True), f"{what}: {actual} != {expected}"
