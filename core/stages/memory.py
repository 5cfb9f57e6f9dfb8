"""How much of a pipeline lies on each of its stages."""

from __future__ import annotations

from dataclasses import dataclass

from isotrain.core.stages.partition import Stage
from isotrain.core.stages.schedules import PipelineShape, live, stage_orders


@dataclass(frozen=True)
class StageMemory:
    """What one process of a stage holds, in bytes.

    Attributes:
        weights: The trainable ones, and their gradients.
        slots: Of the optimizer.
        activations: What is kept for backward passes, at most at once.
        micro_batches: Whose activations these are.
    """

    weights: int
    slots: int
    activations: int
    micro_batches: int

    @property
    def total(self) -> int:
        """Of all of it."""
        return self.weights + self.slots + self.activations


def stage_memory(
    chunks: tuple[Stage, ...], schedule: str, shape: PipelineShape, slots: int
) -> list[StageMemory]:
    """What each stage holds.

    Args:
        chunks: Of the model, in order; chunk c is on stage c modulo the number of stages.
        schedule: Its name.
        shape: How much there is to order.
        slots: Numbers that the optimizer keeps for each weight.
    """
    found = []
    for stage, order in enumerate(stage_orders(schedule, shape)):
        own = chunks[stage :: shape.stages]
        kept = max(sum(layer.kept_bytes for layer in chunk.layers) for chunk in own)
        weights = sum(chunk.weight_bytes for chunk in own)
        found.append(StageMemory(2 * weights, slots * weights, live(order) * kept, live(order)))
    return found
