"""Average of the weights over the steps of a run: exponential moving average (`ema`) or mean (`swa`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from isotrain.core.contracts.backend.computations import flatten
from isotrain.core.contracts.backend.replica import Replica, Tensor
from isotrain.core.contracts.backend.replica_group import AVERAGED, ReplicaGroup
from isotrain.core.session.training.trainer_state import TrainerState
from isotrain.core.spec.sections import Ema, Swa


class WeightAverage:
    """The average of trainable weights and moving statistics; none without `ema` and `swa`. Local.

    Replicas hold equal weights after every step, and so have equal averages without communication.

    Attributes:
        count: Number of weights in the average so far; 0 before it begins.
    """

    def __init__(self, policy: Ema | Swa | None, trainer_state: TrainerState) -> None:
        self.count = 0
        self._policy = policy
        self._trainer_state = trainer_state
        self._averages: list[list[Tensor]] = []

    def begin_if_due(self, group: ReplicaGroup, step: int) -> None:
        """Copies the weights before the step of index `start`, or a later one if it was passed over."""
        if self._policy is not None and not self.count and step >= self._policy.start:
            self._take(group, 1)

    def update(self, group: ReplicaGroup, steps_done: int) -> None:
        """Takes the weights after a step into the average, every `every` steps."""
        policy = self._policy
        if policy is not None and self.count and (steps_done - policy.start) % policy.every == 0:
            self._averages = group.update_averages(self._averages, policy.weight(self.count))
            self.count += 1

    @contextmanager
    def applied(self, group: ReplicaGroup) -> Iterator[None]:
        """Context in which the replicas hold the average; on exit they hold the training weights again."""
        if not self.count or self._trainer_state.is_averaged:
            yield
            return
        weights = group.compute(_read)
        group.compute(_write, self._averages)
        self._trainer_state.is_averaged = True
        try:
            yield
        finally:
            self._trainer_state.is_averaged = False
            group.compute(_write, [[vector] for vector in weights])

    def restore(self, group: ReplicaGroup, count: int) -> bool:
        """Takes the weights that the group now holds as an average of `count` weights; 0 for no average.

        Returns:
            Whether it continues from them: False where there is no `ema` or `swa`.
        """
        self.count, self._averages = 0, []
        if self._policy is not None and count:
            self._take(group, count)
        return bool(self.count)

    def _take(self, group: ReplicaGroup, count: int) -> None:
        self._averages = group.copy_averaged()
        self.count = count


def _read(replica: Replica) -> Tensor:
    return replica.read(AVERAGED)


def _write(replica: Replica, tensors: Sequence[Tensor]) -> None:
    replica.write(AVERAGED, flatten(replica.ops, tensors))
