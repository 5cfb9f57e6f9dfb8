"""One replica by itself: model, objective, optimizer, metrics. Nothing here knows of others."""

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
from isotrain.testing.reference.losses import Means, build_objective
from isotrain.testing.reference.network import Network
from isotrain.testing.reference.optimizers import build_optimizer, clipped

_OPTIMIZER = "optimizer/"
STEPS = f"{_OPTIMIZER}steps"
"""The one number of an optimizer that is not about a weight."""


class ReplicaTrainer:
    """What a replica has, and what it computes.

    Attributes:
        network: The model.
        metrics: Of training.
        evaluated: Of evaluation.
        losses: Of evaluation: the sum, and the number of samples.
        state: The arrays of each kind of state, by name.
    """

    def __init__(self, spec: TrainingSpec, replica: int) -> None:
        """Builds everything.

        Raises:
            SpecError: The model function gave no `Network`, or a loss or metric is unknown.
        """
        self._spec = spec
        self.network = _built(spec)
        self.network.start(spec.seed, replica, spec.precision)
        self.network.freeze(spec.is_frozen)
        self._objective = build_objective(spec, self.network)
        self._optimizer = build_optimizer(spec, self.network.trainable)
        self._elsewhere: set[str] = set()
        self.metrics, self.evaluated = Means(spec.metrics), Means(spec.metrics)
        self.losses = np.zeros(2)
        self.state: dict[StateKind, Mapping[str, Array]] = {
            "trainable": self.network.trainable,
            "non-trainable": self.network.statistics | self.network.fixed | self.network.draws,
            "optimizer": self._slots(),
            "metrics": {f"metrics/{n}": value for n, value in self.metrics.of_each.items()},
        }

    def _slots(self) -> dict[str, Array]:
        return {_OPTIMIZER + name: value for name, value in self._optimizer.state.items()}

    def shard_optimizer(self, places: Sequence[int]) -> None:
        """Updates these of the trainable weights only from now on."""
        weights = list(self.network.trainable.items())
        self._optimizer = build_optimizer(self._spec, dict(weights[place] for place in places))
        before, self.state["optimizer"] = self.state["optimizer"], self._slots()
        self._elsewhere = before.keys() - self.state["optimizer"].keys()

    def reseed(self, replica: int, step: int) -> None:
        """Has random layers draw from here on what a replica draws in a step."""
        self.network.reseed(self._spec.seed, replica, step)

    def is_alone(self, name: str) -> bool:
        """Whether this replica alone has a state of this name: a slot of a weight that only it updates."""
        return bool(self._elsewhere) and name in self.state["optimizer"] and name != STEPS

    def is_remote(self, name: str) -> bool:
        """Whether a state of this name is a slot of a weight that only another replica updates."""
        return name in self._elsewhere

    def part(self, part: StatePart) -> list[Array]:
        """The arrays of a part of the state, as strategies know it."""
        if part == "statistics":
            return list(self.network.statistics.values())
        if part == "trainable":
            return list(self.network.trainable.values())
        return [slot for slot in self.state["optimizer"].values() if slot.ndim]

    def contribution(self, pieces: Sequence[Slice]) -> tuple[Array, list[Array]]:
        """The sum over slices of weight * mean loss, and its gradients."""
        total = np.zeros((), self._spec.precision)
        gradients = [np.zeros_like(weight) for weight in self.part("trainable")]
        for piece in pieces:
            if not piece.count:
                self.network.skip_draws()
                continue
            loss, own = self._forward_and_backward(piece)
            total = total + total.dtype.type(piece.weight * loss)
            gradients = [one + other for one, other in zip(gradients, own, strict=True)]
        return total, gradients

    def _forward_and_backward(self, piece: Slice) -> tuple[float, list[Array]]:
        self.network.training = True
        losses, predictions, slopes = self._computed(piece)
        self.metrics.add(piece.targets, predictions, piece.count)
        factor = np.dtype(self._spec.precision).type(piece.weight / piece.count)
        scaled = map_tree(lambda slope: slope * factor, slopes)
        return float(losses.mean()), self.network.backward(scaled)

    def _computed(self, piece: Slice) -> Any:
        """Losses, predictions, and the slopes of the former by the latter."""
        if isinstance(piece.targets, Weighted):
            raise UnsupportedError("data: backend 'reference' knows no sample weights.")
        return self._objective(piece.inputs, piece.targets)

    def evaluate(self, pieces: Sequence[Slice]) -> None:
        """Adds slices to what is evaluated."""
        self.network.training = False
        for piece in pieces:
            if piece.count:
                losses, predictions, _ = self._computed(piece)
                self.losses += (float(losses.mean()) * piece.count, piece.count)
                self.evaluated.add(piece.targets, predictions, piece.count)

    def predict(self, inputs: Any) -> Any:
        """What the model gives for samples that it is not trained on."""
        self.network.training = False
        return self.network(inputs)

    def update(self, gradients: Sequence[Array], rate: float, norm: float | None = None) -> None:
        """Clips, by a norm that is given or by their own, and applies gradients that are already reduced."""
        self._optimizer.update(clipped(self._spec, gradients, norm), rate)

    def write(self, given: Mapping[str, Array]) -> None:
        """Sets named state.

        Raises:
            IsotrainError: A name or a shape does not fit this model.
        """
        arrays = {name: value for kind in self.state.values() for name, value in kind.items()}
        given = {name: value for name, value in given.items() if name not in self._elsewhere}
        for name, value in given.items():
            if name not in arrays:
                raise IsotrainError(unknown_name("state", name, arrays))
            if np.shape(value) != arrays[name].shape:
                raise IsotrainError(
                    f"{name!r} has shape {arrays[name].shape} in this model, and the given state has"
                    f" {np.shape(value)}."
                )
        for name, value in given.items():
            arrays[name][...] = value


def _built(spec: TrainingSpec) -> Network:
    builder = import_strings.resolve(spec.for_framework("model", "reference"))
    network = builder(**spec.model_args)
    if not isinstance(network, Network):
        raise SpecError(
            f"model: the function returned {type(network).__name__!r}; backend 'reference' trains an"
            " isotrain.testing.reference.network.Network."
        )
    return network
