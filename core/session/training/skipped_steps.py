"""Steps that are left out because their loss or gradients are not finite: `on_nan: skip`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from isotrain.core.contracts.backend.computations import squared_norm
from isotrain.core.contracts.backend.replica import Tensor
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.errors import NotANumberError
from isotrain.core.session.training.trainer_state import TrainerState

_MOST_IN_A_ROW = 10
"""Number of skipped steps of an update in a row at which the run ends."""


class StepSkipper:
    """Updates that change nothing, on all replicas alike, where loss or gradients are not finite.

    Random streams of the framework go on after such an update; generators in attributes draw again.
    """

    def __init__(
        self, update: str, group: ReplicaGroup, trainer_state: TrainerState, reporter: Reporter
    ) -> None:
        """Counts the skipped steps of an update, whose name is empty without named updates."""
        self._update = update
        self._group = group
        self._trainer_state = trainer_state
        self._reporter = reporter
        self._step: int | None = None
        """Step of the last gradients, until they are applied."""
        self._restore: Callable[[], None] | None = None
        """Function that restores the state before the gradients of that step."""

    def begin(self, step: int) -> None:
        """Copies the state before the gradients of a step, which may compute several. Local."""
        if self._step != step:
            self._step, self._restore = step, self._group.savepoint()

    def keeps(self, gradients: Sequence[Sequence[Tensor]], loss: Tensor, step: int) -> bool:
        """Whether an update may be applied; if not, the state before its gradients is restored. Collective.

        Raises:
            NotANumberError: Too many in a row may not.
        """
        restore = self._restore if self._step == step else None
        self._step = self._restore = None
        is_finite = self._are_finite(gradients, loss, step)
        if not is_finite and restore is not None:
            restore()
        return is_finite

    def _are_finite(self, gradients: Sequence[Sequence[Tensor]], loss: Tensor, step: int) -> bool:
        """Whether an update may be applied, the same on all processes; counts those that may not."""
        group, update, state = self._group, self._update, self._trainer_state
        squares = group.compute(squared_norm, gradients)
        value = float(loss)
        norms = [float(group.numpy(each).item()) for each in squares]
        is_bad = not all(map(math.isfinite, [value, *norms]))
        (any_bad,) = group.all_reduce_max([float(is_bad)])
        if not any_bad:
            state.skipped_in_a_row[update] = 0
            return True
        count = state.skipped_in_a_row[update] = state.skipped_in_a_row.get(update, 0) + 1
        state.skipped_steps += 1
        what = f"its loss is {value}" if not math.isfinite(value) else "a gradient is not finite"
        label = f"update {update} of step {step}" if update else f"step {step}"
        if count >= _MOST_IN_A_ROW:
            raise NotANumberError(
                f"{label} is the last of {count} in a row that were skipped (on_nan: skip): {what}. Lower the"
                " learning rate, clip, or look at the data."
            )
        if self._reporter.rank == 0:
            self._reporter.warn(f"{label} is skipped (on_nan: skip): {what}.")
        return False
