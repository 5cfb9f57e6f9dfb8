"""Trainer of one replica: model, objective, optimizer and metrics. It does not communicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.plugin import (
    IsotrainError,
    Slice,
    SpecError,
    StateKind,
    StatePart,
    TrainingSpec,
    UnsupportedError,
    Weighted,
    import_strings,
    map_tree,
    unknown_name,
)
from isotrain.testing.reference.layers import Array
from isotrain.testing.reference.losses_and_metrics import Means, build_objective
from isotrain.testing.reference.network import Network
from isotrain.testing.reference.optimizers import build_optimizer, clipped

_OPTIMIZER = "optimizer/"
STEPS = f"{_OPTIMIZER}steps"
"""State name of the optimizer's step count, the one entry that belongs to no weight."""


class ReplicaTrainer:
    """Model, objective, optimizer and metrics of one replica. Every method is local.

    Attributes:
        network: Model.
        metrics: Metric sums of training.
        evaluated: Metric sums of evaluation.
        losses: Sum of the losses and number of samples of evaluation, shape [2], float64.
        state: Arrays by name, for each kind of state.
    """

    def __init__(self, spec: TrainingSpec, replica: int) -> None:
        """Builds the model, the objective and the optimizer; the replica seeds the random layers.

        Raises:
            SpecError: The model function returned no `Network`, or a loss or metric is unknown.
        """
        self._spec = spec
        self.network = _built(spec)
        self.network.start(spec.seed, replica, spec.precision)
        self.network.freeze(spec.is_frozen)
        self._objective = build_objective(spec, self.network)
        self._optimizer = build_optimizer(spec, self.network.trainable)
        self._shard: Sequence[int] = range(len(self.network.trainable))
        self._remote_names: set[str] = set()
        self.metrics, self.evaluated = Means(spec.metrics), Means(spec.metrics)
        self.losses = np.zeros(2)
        self.state: dict[StateKind, Mapping[str, Array]] = {
            "trainable": self.network.trainable,
            "non-trainable": self.network.statistics | self.network.fixed | self.network.draws,
            "optimizer": self._slots(),
            "metrics": {f"metrics/{n}": value for n, value in self.metrics.of_each.items()},
        }

    def _slots(self) -> dict[str, Array]:
        """Optimizer state by name, in its shapes."""
        return {_OPTIMIZER + name: value for name, value in self._optimizer.state.items()}

    def set_group_rates(self, rates: Mapping[int, float]) -> None:
        """Sets the rates of later updates by the schedules of optimizer groups, by index of the group."""
        self._optimizer.group_rates = rates

    def shard_optimizer(self, indices: Sequence[int]) -> None:
        """Restricts the optimizer and its state to the trainable weights at these indices (ZeRO stage 1)."""
        self._optimizer = build_optimizer(self._spec, self.network.trainable, indices)
        self._shard = indices
        before, self.state["optimizer"] = self.state["optimizer"], self._slots()
        self._remote_names = before.keys() - self.state["optimizer"].keys()

    def reseed(self, replica: int, step: int) -> None:
        """Seeds the random layers for a replica and a step."""
        self.network.reseed(self._spec.seed, replica, step)

    def is_alone(self, name: str) -> bool:
        """Whether only this replica has this state: optimizer state of a weight that only it updates."""
        return bool(self._remote_names) and name in self.state["optimizer"] and name != STEPS

    def is_remote(self, name: str) -> bool:
        """Whether another replica has this state: optimizer state of a weight that only it updates."""
        return name in self._remote_names

    def part(self, part: StatePart) -> list[Array]:
        """Arrays of one part of the state, each in the shape and dtype of its weight or statistic."""
        if part == "statistics":
            return list(self.network.statistics.values())
        if part == "trainable":
            return list(self.network.trainable.values())
        return [slot for slot in self.state["optimizer"].values() if slot.ndim]

    def contribution(self, micro_batches: Sequence[Slice]) -> tuple[Array, list[Array]]:
        """Forward and backward over micro-batches, summed.

        Args:
            micro_batches: Micro-batches of this replica; empty ones advance the random layers only.

        Returns:
            Sum of slice weight times mean loss, a scalar of the spec's precision; and its gradients, in
            the shapes and dtypes of the trainable weights.
        """
        total = np.zeros((), self._spec.precision)
        gradients = [np.zeros_like(weight) for weight in self.part("trainable")]
        for micro_batch in micro_batches:
            if not micro_batch.count:
                self.network.skip_draws()
                continue
            loss, terms = self._forward_and_backward(micro_batch)
            total = total + total.dtype.type(micro_batch.weight * loss)
            gradients = [partial + term for partial, term in zip(gradients, terms, strict=True)]
        return total, gradients

    def _forward_and_backward(self, micro_batch: Slice) -> tuple[float, list[Array]]:
        """Mean loss of a slice, and weighted gradients of the weights' shapes."""
        self.network.training = True
        losses, predictions, slopes = self._losses(micro_batch)
        self.metrics.add(micro_batch.targets, predictions, micro_batch.count)
        factor = np.dtype(self._spec.precision).type(micro_batch.weight / micro_batch.count)
        scaled = map_tree(lambda slope: slope * factor, slopes)
        return float(losses.mean()), self.network.backward(scaled)

    def _losses(self, micro_batch: Slice) -> Any:
        """Losses, shape [samples]; predictions; and the derivatives of the losses by the predictions."""
        if isinstance(micro_batch.targets, Weighted):
            raise UnsupportedError("data: the NumPy backend knows no sample weights.")
        return self._objective(micro_batch.inputs, micro_batch.targets)

    def evaluate(self, micro_batches: Sequence[Slice]) -> None:
        """Adds the losses and metrics of micro-batches to the sums of evaluation."""
        self.network.training = False
        for micro_batch in micro_batches:
            if micro_batch.count:
                losses, predictions, _ = self._losses(micro_batch)
                self.losses += (float(losses.mean()) * micro_batch.count, micro_batch.count)
                self.evaluated.add(micro_batch.targets, predictions, micro_batch.count)

    def predict(self, inputs: Any) -> Any:
        """Predictions in evaluation mode, shape [samples, ...]."""
        self.network.training = False
        return self.network(inputs)

    def update(self, gradients: Sequence[Array], rate: float, norm: float | None) -> None:
        """Clips the reduced gradients of the weights that are updated here, and takes one step.

        Args:
            gradients: Gradients of these weights, in their shapes.
            rate: Learning rate.
            norm: Global norm over all weights, where the spec clips by it; None for that of `gradients`.
        """
        self._optimizer.update(clipped(self._spec, gradients, norm), rate)

    def update_by_all(self, gradients: Sequence[Array], rate: float) -> None:
        """Clips reduced gradients of all weights, and takes one step of those that are updated here."""
        all_clipped = clipped(self._spec, gradients)
        self._optimizer.update([all_clipped[index] for index in self._shard], rate)

    def write(self, state: Mapping[str, Array]) -> None:
        """Writes named state; optimizer state that another replica has is skipped.

        Raises:
            IsotrainError: A name is unknown, or a shape differs from the model's.
        """
        arrays = {name: value for kind in self.state.values() for name, value in kind.items()}
        local = {name: value for name, value in state.items() if name not in self._remote_names}
        for name, value in local.items():
            if name not in arrays:
                raise IsotrainError(unknown_name("state", name, arrays))
            if np.shape(value) != arrays[name].shape:
                raise IsotrainError(
                    f"{name!r} has shape {arrays[name].shape} in this model, and the state to write has"
                    f" {np.shape(value)}."
                )
        for name, value in local.items():
            arrays[name][...] = value


def _built(spec: TrainingSpec) -> Network:
    builder = import_strings.resolve(spec.for_framework("model", "numpy"))
    network = builder(**spec.model_args)
    if not isinstance(network, Network):
        raise SpecError(
            f"model: the function returned {type(network).__name__!r}; the NumPy backend trains an"
            " isotrain.testing.reference.network.Network."
        )
    return network
