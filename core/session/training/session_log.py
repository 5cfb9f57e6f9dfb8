"""The log of a custom loop or a callback: named scalars of steps, beside loss and learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.replica import Tensor
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.errors import IsotrainError
from isotrain.core.session.training.step_logger import StepLogger
from isotrain.core.session.training.trainer_state import TrainerState

_RESERVED = ("step", "epoch", "loss", "learning_rate")


class SessionLog:
    """Checks and records what is logged; rank 0 reports it. Local."""

    def __init__(
        self, group: ReplicaGroup, trainer_state: TrainerState, step_logger: StepLogger
    ) -> None:
        self._group = group
        self._trainer_state = trainer_state
        self._step_logger = step_logger

    def scalars(self, scalars: Mapping[str, Any], step: int | None) -> None:
        """Records named scalars of a step, as `Session.log`."""
        checked = self.step("log", step)
        for name, value in scalars.items():
            _require_name("log", name)
            if math.prod(shape := getattr(value, "shape", ())) != 1:
                raise IsotrainError(
                    f"log: {name!r}: expected a number or a scalar tensor, received shape {[*shape]}."
                )
        if scalars and not self.is_silent:
            values = {name: self._snapshot(value) for name, value in scalars.items()}
            self._step_logger.log(checked, values)

    @property
    def is_silent(self) -> bool:
        """Whether nothing is recorded: on ranks above 0, or where nobody listens."""
        return self._step_logger.is_silent

    def step(self, call: str, step: int | None) -> int:
        """The step that is logged for: the last one taken by default, the first one before any.

        Raises:
            IsotrainError: The step is still to come after the next one.
        """
        steps_done = self._trainer_state.steps_done
        if step is None:
            return max(0, steps_done - 1)
        if not 0 <= step <= steps_done:
            raise IsotrainError(
                f"{call}: step: expected a step from 0 to the next one, {steps_done}, received {step!r}."
            )
        return step

    def _snapshot(self, value: Any) -> Tensor | float:
        """The value as it is now: a number at once, a tensor later, when it is computed."""
        if isinstance(value, int | float | np.ndarray | np.generic):
            return float(np.asarray(value).item())
        return self._group.snapshot_scalar(value)


def _require_name(call: str, name: Any) -> None:
    if not isinstance(name, str) or not name or name in _RESERVED:
        raise IsotrainError(
            f"{call}: expected a name other than {', '.join(_RESERVED)}, which the run has itself;"
            f" received {name!r}."
        )
