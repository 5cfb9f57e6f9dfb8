"""What is known of each layer of a model, and what flows between layers: what cuts are chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from isotrain.core.errors import PlanError

Cut = int
"""A set of layers, as bits by their places: those before a cut, each with all that it needs."""
_CUTS = 4096
"""So many cuts of a graph are looked at; of one with more, those between layers in their order."""


@dataclass(frozen=True)
class LayerCost:
    """One layer, measured for one micro-batch.

    Attributes:
        name: In the model.
        forward: Seconds of its forward pass.
        backward: Seconds of its backward pass.
        activation_bytes: What it gives to others.
        weight_bytes: Its trainable weights.
        sources: The places of the layers whose results it takes; each before its own.
        chunk: In which it is, where the model is cut.
    """

    name: str
    forward: float
    backward: float
    activation_bytes: int
    weight_bytes: int
    sources: tuple[int, ...] = ()
    chunk: int = 0

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward + self.backward


@dataclass(frozen=True)
class ModelProfile:
    """The layers of a model, each after those whose results it takes.

    Attributes:
        layers: In an order in which they can be computed.
    """

    layers: Sequence[LayerCost]

    def __post_init__(self) -> None:
        """Looks that the layers are in order.

        Raises:
            PlanError: One takes what is not there yet.
        """
        for place, layer in enumerate(self.layers):
            if any(source not in range(place) for source in layer.sources):
                raise PlanError(
                    f"profile: {layer.name}, the layer at {place}, takes results of {layer.sources};"
                    " expected places before its own."
                )

    @property
    def chunks(self) -> int:
        """Into how many the model is cut."""
        return 1 + max(layer.chunk for layer in self.layers)

    def of_chunk(self, chunk: int) -> list[LayerCost]:
        """The layers of one."""
        return [layer for layer in self.layers if layer.chunk == chunk]

    @property
    def whole(self) -> Cut:
        """The cut behind all layers."""
        return (1 << len(self.layers)) - 1

    def within(self, first: Cut, second: Cut) -> list[LayerCost]:
        """The layers between two cuts, of which the first is the smaller."""
        return [layer for place, layer in enumerate(self.layers) if (second & ~first) >> place & 1]

    def seconds(self, first: Cut, second: Cut) -> float:
        """Forward and backward, of the layers between two cuts."""
        return self._seconds_until(second) - self._seconds_until(first)

    def _seconds_until(self, cut: Cut) -> float:
        if cut not in self._known_seconds:
            self._known_seconds[cut] = sum(layer.seconds for layer in self.within(0, cut))
        return self._known_seconds[cut]

    @cached_property
    def _known_seconds(self) -> dict[Cut, float]:
        """By the cut: a graph has thousands, and every two are asked for."""
        return {}

    @cached_property
    def _known_bytes(self) -> dict[Cut, int]:
        """As above, of what goes over a cut."""
        return {}

    def weight_bytes(self, first: Cut, second: Cut) -> int:
        """The weights of the layers between two cuts."""
        return sum(layer.weight_bytes for layer in self.within(first, second))

    def crossing_bytes(self, cut: Cut) -> int:
        """What goes over a cut: all that layers behind it take from before it, also past other stages."""
        if cut not in self._known_bytes:
            self._known_bytes[cut] = self._crossing_bytes(cut)
        return self._known_bytes[cut]

    def _crossing_bytes(self, cut: Cut) -> int:
        needed = {
            source
            for place, layer in enumerate(self.layers)
            if not cut >> place & 1
            for source in layer.sources
            if cut >> source & 1
        }
        return sum(self.layers[source].activation_bytes for source in needed)

    def cuts(self) -> list[Cut]:
        """The cuts that can be made, smaller ones first: from before all layers to behind all."""
        found = {0}
        edge = {0}
        while edge and len(found) <= _CUTS:
            edge = {cut | 1 << place for cut in edge for place in self._next(cut)} - found
            found |= edge
        if len(found) > _CUTS:
            found = {(1 << place) - 1 for place in range(len(self.layers) + 1)}
        return sorted(found, key=lambda cut: (cut.bit_count(), cut))

    def _next(self, cut: Cut) -> list[int]:
        """The layers that can be computed first behind a cut."""
        return [
            place
            for place, layer in enumerate(self.layers)
            if not cut >> place & 1 and all(cut >> source & 1 for source in layer.sources)
        ]
