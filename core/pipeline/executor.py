"""Executes the actions of one process; framework-neutral, eagerly or while a graph is traced."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isotrain.core.pipeline.actions import Action, Transfer
from isotrain.core.pipeline.schedules import Pass

Tensors = list[Any]
"""Tensors sent between chunks, of any shapes: activations, or their gradients."""


class StageWork(ABC):
    """The passes and transfers of one process in one step, as a framework implements them."""

    @abstractmethod
    def forward(self, work: Pass, received: Tensors) -> Tensors:
        """Runs the forward pass of a chunk on a micro-batch; keeps what its backward pass needs. Local.

        Args:
            work: The pass.
            received: Activations of the chunk before, shape `[samples, ...]`; empty for the first chunk.

        Returns:
            Activations for the next chunk, shape `[samples, ...]`; empty for the last chunk.
        """

    @abstractmethod
    def backward(self, work: Pass, received: Tensors) -> Tensors:
        """Accumulates the gradients of a chunk's weights, in their shapes; frees what forward kept. Local.

        Args:
            work: The pass.
            received: Gradients of what `forward` returned.

        Returns:
            Gradients of what `forward` received.
        """

    @abstractmethod
    def send(self, transfer: Transfer, tensors: Tensors) -> None:
        """Sends tensors of any shape to another stage; may return before they arrive. Point-to-point."""

    @abstractmethod
    def receive(self, transfer: Transfer) -> Tensors:
        """Waits for another stage's tensors, in the shapes and dtypes as sent. Point-to-point."""


@dataclass(frozen=True)
class ExecutedAction:
    """An action with its measured time.

    Attributes:
        name: `forward`, `backward`; in pipeline runs `send`, or `wait` for the tensors of another stage; else
            `exposed exchange` (waiting for collectives while nothing is computed), `update`.
        begin: Start time by `time.perf_counter`, in seconds.
        end: End time by `time.perf_counter`, in seconds.
    """

    name: str
    begin: float
    end: float


def execute_stage(actions: Sequence[Action], process: int, work: StageWork) -> list[ExecutedAction]:
    """Executes a process's actions in order; their times mean something only where nothing is traced."""
    inputs: dict[Pass, Tensors] = {}
    executed = []
    for action in actions:
        begin = time.perf_counter()
        name = _execute(action, process, work, inputs)
        executed.append(ExecutedAction(name, begin, time.perf_counter()))
    return executed


def _execute(action: Action, process: int, work: StageWork, inputs: dict[Pass, Tensors]) -> str:
    """Executes one action; returns its name."""
    if isinstance(action, Transfer):
        receiver = Pass(action.direction, action.chunk, action.micro_batch)
        if action.source == process:
            work.send(action, inputs.pop(receiver))
            return "send"
        inputs[receiver] = work.receive(action)
        return "wait"
    run = work.forward if action.direction == "forward" else work.backward
    step = 1 if action.direction == "forward" else -1
    results = run(action, inputs.pop(action, []))
    inputs[Pass(action.direction, action.chunk + step, action.micro_batch)] = results
    return action.direction
