"""Does the actions of one stage: neutral to frameworks, at once or while a graph is traced."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isotrain.core.pipeline.actions import Action, Transfer
from isotrain.core.pipeline.schedules import Pass

Tensors = list[Any]
"""What crosses a cut: activations, or the gradients of them."""


class StageWork(ABC):
    """What one stage does for one step."""

    @abstractmethod
    def forward(self, work: Pass, received: Tensors) -> Tensors:
        """Takes a micro-batch through a chunk, and keeps what its backward pass needs.

        Returns:
            What the next chunk needs; nothing of the last one.
        """

    @abstractmethod
    def backward(self, work: Pass, received: Tensors) -> Tensors:
        """Adds the gradients of a chunk's weights, and forgets what was kept of the forward pass.

        Args:
            work: The pass.
            received: The gradients of what `forward` gave.

        Returns:
            The gradients of what `forward` received.
        """

    @abstractmethod
    def send(self, transfer: Transfer, tensors: Tensors) -> None:
        """Lets another stage have tensors; may return before it has them."""

    @abstractmethod
    def receive(self, transfer: Transfer) -> Tensors:
        """Waits for what another stage sends."""


@dataclass(frozen=True)
class ExecutedAction:
    """An action that was taken.

    Attributes:
        name: `forward`, `backward`, `send` or `wait`: for what another stage sends.
        begin: By `time.perf_counter`, in seconds, as is `end`.
        end: When it was done.
    """

    name: str
    begin: float
    end: float


def execute_stage(actions: Sequence[Action], stage: int, work: StageWork) -> list[ExecutedAction]:
    """Does a stage's actions, in their order; says when, which means something where they are not traced."""
    held: dict[Pass, Tensors] = {}
    taken = []
    for action in actions:
        begin = time.perf_counter()
        name = _do(action, stage, work, held)
        taken.append(ExecutedAction(name, begin, time.perf_counter()))
    return taken


def _do(action: Action, stage: int, work: StageWork, held: dict[Pass, Tensors]) -> str:
    """Does one, with what is held for it, and gives its name."""
    if isinstance(action, Transfer):
        needing = Pass(action.direction, action.chunk, action.micro_batch)
        if action.source == stage:
            work.send(action, held.pop(needing))
            return "send"
        held[needing] = work.receive(action)
        return "wait"
    take = work.forward if action.direction == "forward" else work.backward
    step = 1 if action.direction == "forward" else -1
    given = take(action, held.pop(action, []))
    held[Pass(action.direction, action.chunk + step, action.micro_batch)] = given
    return action.direction
