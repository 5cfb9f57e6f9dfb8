"""The profile of a model: time and bytes of each layer, the graph of layers, and its possible cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from isotrain.core.errors import PlanError

Cut = int
"""The layers before a cut, as a bit set of layer indices; it contains the inputs of each of its layers."""
_MAX_CUTS = 4096
"""Maximum number of cuts; of a graph with more, only those between consecutive layers are considered."""


@dataclass(frozen=True)
class LayerCost:
    """Time and bytes of one layer, measured for one micro-batch.

    Attributes:
        name: Name of the layer in the model.
        forward: Seconds of its forward pass.
        backward: Seconds of its backward pass.
        activation_bytes: Bytes of its output.
        weight_bytes: Bytes of its trainable weights.
        sources: Indices of the layers whose outputs it takes; each less than its own.
        chunk: Index of the chunk that it is in.
        update: Seconds of the optimizer's update of its weights.
    """

    name: str
    forward: float
    backward: float
    activation_bytes: int
    weight_bytes: int
    sources: tuple[int, ...] = ()
    chunk: int = 0
    update: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward pass."""
        return self.forward + self.backward


@dataclass(frozen=True)
class ModelProfile:
    """The layers of a model, in topological order.

    Attributes:
        layers: Layers, each after those whose outputs it takes.
        loss_seconds: Seconds of the loss, its backward pass and the metrics, for one micro-batch.
    """

    layers: Sequence[LayerCost]
    loss_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Checks the order of the layers.

        Raises:
            PlanError: A layer takes the output of a later one.
        """
        for index, layer in enumerate(self.layers):
            if any(source not in range(index) for source in layer.sources):
                raise PlanError(
                    f"profile: layer {layer.name} has index {index} and sources {layer.sources}; expected"
                    " sources with smaller indices."
                )

    @property
    def chunks(self) -> int:
        """Number of chunks that the model is split into."""
        return 1 + max(layer.chunk for layer in self.layers)

    def of_chunk(self, chunk: int) -> list[LayerCost]:
        """The layers of a chunk."""
        return [layer for layer in self.layers if layer.chunk == chunk]

    @property
    def whole(self) -> Cut:
        """The cut after all layers."""
        return (1 << len(self.layers)) - 1

    def within(self, first: Cut, second: Cut) -> list[LayerCost]:
        """The layers between two cuts, the first of which is the smaller."""
        return [layer for index, layer in enumerate(self.layers) if (second & ~first) >> index & 1]

    def seconds(self, first: Cut, second: Cut) -> float:
        """Seconds of forward and backward pass of the layers between two cuts."""
        return self._seconds_until(second) - self._seconds_until(first)

    def _seconds_until(self, cut: Cut) -> float:
        if cut not in self._known_seconds:
            self._known_seconds[cut] = sum(layer.seconds for layer in self.within(0, cut))
        return self._known_seconds[cut]

    @cached_property
    def _known_seconds(self) -> dict[Cut, float]:
        """Cache by cut: a graph has thousands of cuts, and every pair of them is needed."""
        return {}

    @cached_property
    def _known_bytes(self) -> dict[Cut, int]:
        """Cache of `crossing_bytes` by cut."""
        return {}

    def update_seconds(self, first: Cut, second: Cut) -> float:
        """Seconds of the update of the weights of the layers between two cuts."""
        return sum(layer.update for layer in self.within(first, second))

    def weight_bytes(self, first: Cut, second: Cut) -> int:
        """Bytes of trainable weights of the layers between two cuts."""
        return sum(layer.weight_bytes for layer in self.within(first, second))

    def crossing_bytes(self, cut: Cut) -> int:
        """Bytes of all outputs before a cut that any layer after it takes, also beyond the next stage."""
        if cut not in self._known_bytes:
            self._known_bytes[cut] = self._crossing_bytes(cut)
        return self._known_bytes[cut]

    def _crossing_bytes(self, cut: Cut) -> int:
        needed = {
            source
            for index, layer in enumerate(self.layers)
            if not cut >> index & 1
            for source in layer.sources
            if cut >> source & 1
        }
        return sum(self.layers[source].activation_bytes for source in needed)

    def cuts(self) -> list[Cut]:
        """All possible cuts, by number of layers: from before the first layer to after the last."""
        cuts = {0}
        frontier = {0}
        while frontier and len(cuts) <= _MAX_CUTS:
            frontier = {cut | 1 << index for cut in frontier for index in self._next(cut)} - cuts
            cuts |= frontier
        if len(cuts) > _MAX_CUTS:
            cuts = {(1 << index) - 1 for index in range(len(self.layers) + 1)}
        return sorted(cuts, key=lambda cut: (cut.bit_count(), cut))

    def _next(self, cut: Cut) -> list[int]:
        """Indices of the layers after a cut all of whose inputs are before it."""
        return [
            index
            for index, layer in enumerate(self.layers)
            if not cut >> index & 1 and all(cut >> source & 1 for source in layer.sources)
        ]
