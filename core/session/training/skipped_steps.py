"""Steps that are left out because their loss or gradients are not finite: `on_nan: skip`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from isotrain.core.contracts.backend.computations import flatten
from isotrain.core.contracts.backend.replica import Replica, Tensor
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.contracts.state import StateKind
from isotrain.core.data.batch import Batch
from isotrain.core.errors import NotANumberError
from isotrain.core.session.training.global_gradients import GlobalGradients
from isotrain.core.session.training.trainer_state import TrainerState

_MOST_IN_A_ROW = 10
"""Number of skipped steps in a row at which the run ends."""
_CHANGED: tuple[StateKind, ...] = ("non-trainable", "metrics", "carry")
"""State that computing gradients changes; random streams go on after a skipped step."""


class StepSkipper:
    """Updates that change nothing, on all replicas alike, where loss or gradients are not finite."""

    def __init__(self, trainer_state: TrainerState, reporter: Reporter) -> None:
        """Counts the skipped steps in the trainer state."""
        self._trainer_state = trainer_state
        self._reporter = reporter

    def step(
        self, group: ReplicaGroup, gradients: GlobalGradients, batch: Batch, rate: float
    ) -> Tensor:
        """Takes one update, or leaves it out; returns the mean loss of the global batch. Collective.

        Raises:
            NotANumberError: Too many steps in a row are left out.
        """
        before = {each: group.read_state(_CHANGED, replica=each) for each in group.local_replicas}
        means, loss = gradients.of(group, batch)
        if self.are_finite(group, means, loss, batch.step):
            gradients.apply(group, means, rate)
        else:
            for replica, state in before.items():
                group.write_state(state, replica=replica)
        return loss

    def are_finite(
        self, group: ReplicaGroup, gradients: Sequence[Sequence[Tensor]], loss: Tensor, step: int
    ) -> bool:
        """Whether an update may be applied, the same on all processes; counts those that may not. Collective.

        Raises:
            NotANumberError: Too many in a row may not.
        """
        squares = group.compute(_squared_norm, gradients)
        value = float(loss)
        norms = [float(group.numpy(each).item()) for each in squares]
        is_bad = not all(map(math.isfinite, [value, *norms]))
        (any_bad,) = group.all_reduce_max([float(is_bad)])
        state = self._trainer_state
        if not any_bad:
            state.skipped_in_a_row = 0
            return True
        state.skipped_steps += 1
        state.skipped_in_a_row += 1
        what = f"its loss is {value}" if not math.isfinite(value) else "a gradient is not finite"
        if state.skipped_in_a_row >= _MOST_IN_A_ROW:
            raise NotANumberError(
                f"step {step} is the last of {state.skipped_in_a_row} in a row that were skipped (on_nan:"
                f" skip): {what}. Lower the learning rate, clip, or look at the data."
            )
        if self._reporter.rank == 0:
            self._reporter.warn(f"step {step} is skipped (on_nan: skip): {what}.")
        return False


def _squared_norm(replica: Replica, gradients: Sequence[Tensor]) -> Tensor:
    """Squared norm of one replica's gradients, shape `[1, 1]`; not finite if one of them is not."""
    vector = flatten(replica.ops, gradients)
    column = replica.ops.reshape(vector, (-1, 1))
    return replica.ops.transpose(column) @ column
