"""Context of a check: an open session, and helpers that many checks need.

Arrays are NumPy's, float64 in the run of `reference_model`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.loader import Loader
from isotrain.core.data.sources import as_source
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.session.session import Session
from isotrain.testing import reference_model
from isotrain.testing.file_exchange import FileExchange

CLOSE = 1e-12
"""Relative and absolute tolerance for the rounding of float64 sums."""


@dataclass(frozen=True)
class Trained:
    """Results of a full training run on this process.

    Attributes:
        losses: Loss of every step.
        metrics: Metrics over all samples, by name.
        weights: Final trainable weights, by name.
        statistics: Final non-trainable state (moving statistics), by name.
    """

    losses: list[float]
    metrics: dict[str, float]
    weights: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]


class CheckContext:
    """Session under test. Every process makes the same checks in the same order.

    Attributes:
        session: Session under test.
        group: Replica group of the session.
        supported: Capabilities that the backend declares for the group's parallel layout.
        file_exchange: File exchange between the processes, which needs no collectives of the backend.
        starts: State of every process before the first step, by rank.
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
        self.file_exchange = FileExchange(
            session.run_directory, session.rank, len(session.plan.processes)
        )
        self.starts = self.file_exchange.all_gather(session.read_state())

    def restart(self) -> None:
        """Resets weights, moving statistics and optimizer state on every replica. Collective.

        Every process writes the same state, as `write_state` requires: the initial state of process 0, with
        the weights of `reference_model.starting_state`.
        """
        self.session.write_state({**self.starts[0], **reference_model.starting_state()})
        self.session.seek(0)

    @functools.cached_property
    def trained(self) -> Trained:
        """Results of all steps of the run, computed at first use. Collective at first use."""
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
        """Names of the trainable weights, in the order of `ReplicaGroup.gradients`."""
        return list(self.session.read_state(("trainable",)))

    def batches(self, count: int, size: int, gradient_accumulation_steps: int = 1) -> list[Batch]:
        """The first `count` samples in order, in global batches of `size`."""
        return batches_in_order(
            self.group, reference_model.samples(count), size, gradient_accumulation_steps
        )

    def same_for_all(self, count: int, noise: float = 0.0) -> Batch:
        """Batch in which every replica has the same `count` samples."""
        inputs, targets = reference_model.samples(count, noise)
        micro_batch = Slice(self.group.to_device(inputs), self.group.to_device(targets), count, 1.0)
        size = count * self.group.replicas
        return Batch(
            0, 0, 0, size, False, True, tuple((micro_batch,) for _ in self.group.local_replicas)
        )

    def gradients_of_all(self, batch: Batch) -> tuple[list[dict[str, np.ndarray]], float]:
        """Gradients of every replica by name, gathered through files; and the loss, a scalar. Collective.

        Args:
            batch: Local slices of the batch.
        """
        names = self.trainable_names()
        gradients, loss = self.group.gradients(batch)
        flat = [
            np.concatenate([self.group.numpy(gradient).ravel() for gradient in of_replica])
            for of_replica in gradients
        ]
        shapes = {name: value.shape for name, value in reference_model.starting_state().items()}
        return [
            _split(row, names, shapes) for row in self.file_exchange.all_gather_rows(flat)
        ], float(loss)


def batches_in_order(
    group: ReplicaGroup, samples: Any, size: int, gradient_accumulation_steps: int = 1
) -> list[Batch]:
    """Global batches of `size` from all samples in order, for the local replicas."""
    loader = Loader(
        as_source(samples),
        global_batch_size=size,
        replicas=group.replicas,
        local_replicas=group.local_replicas,
        seed=0,
        drop_remainder=False,
        gradient_accumulation_steps=gradient_accumulation_steps,
        epochs=1,
        to_device=group.to_device,
    )
    return list(loader)


def _split(
    row: np.ndarray, names: list[str], shapes: dict[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Cuts a vector into arrays by name, each of its shape in `shapes`."""
    ends = np.cumsum([int(np.prod(shapes[name])) for name in names])[:-1]
    parts = np.split(row, ends)
    return {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}


def assert_close(actual: Any, expected: Any, what: str) -> None:
    """Asserts equality up to `CLOSE`: arrays of one shape, numbers, or dicts of them."""
    if isinstance(expected, dict):
        assert set(actual) == set(expected), f"{what}: {sorted(actual)} != {sorted(expected)}"
        for name, value in expected.items():
            assert_close(actual[name], value, f"{what}: {name}")
        return
    np.testing.assert_allclose(actual, expected, rtol=CLOSE, atol=CLOSE, err_msg=what)


def assert_same(actual: Any, expected: Any, what: str) -> None:
    """Asserts equality to the bit, of dtype and of shape: arrays, or dicts of them."""
    if isinstance(expected, dict):
        assert set(actual) == set(expected), f"{what}: {sorted(actual)} != {sorted(expected)}"
        for name, value in expected.items():
            assert_same(actual[name], value, f"{what}: {name}")
        return
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    assert np.array_equal(actual, expected, equal_nan=True), f"{what}: {actual} != {expected}"
