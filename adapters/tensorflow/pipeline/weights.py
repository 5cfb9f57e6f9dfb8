"""Weights of a model in stages on TensorFlow: each process keeps those of its own stage up to date."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

from isotrain.adapters.tensorflow.base.variables import assign_anew, value_of
from isotrain.adapters.tensorflow.comm.base import plan_buckets
from isotrain.adapters.tensorflow.pipeline.comm import PipelineCommunicator


class StageWeights:
    """All weights, as they are while all stages have all of them; then those of this stage alone.

    The variables of other stages' weights are empty from then on, whatever their shape says, until all
    weights are joined again.

    Attributes:
        is_gathered: Whether all weights are here.
    """

    def __init__(
        self,
        weights: Mapping[str, tf.Variable],
        stage_of: Mapping[int, int],
        communicator: PipelineCommunicator,
    ) -> None:
        """Takes weights that are all here.

        Args:
            weights: By name.
            stage_of: The stage of each, by identity; the first where it is none's.
            communicator: Ties this stage to the others.
        """
        self._weights = weights
        self._stage_of = stage_of
        self._communicator = communicator
        self.is_gathered = True

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def is_own(self, weight: tf.Variable) -> bool:
        """Whether it is of this stage."""
        return self._stage_of_weight(weight) == self._communicator.stage

    def is_remote(self, name: str) -> bool:
        """Whether a name is that of a weight which other stages alone have as it is now."""
        weight = None if self.is_gathered else self._weights.get(name)
        return weight is not None and not self.is_own(weight)

    def trace_start(self) -> None:
        """Gives all the weights of the first process of all, while this is traced by all."""
        self._trace(lambda weight: self._communicator.broadcast_from_first(value_of(weight)))

    def drop_other_stages(self) -> None:
        """Leaves this stage its own weights; not traced."""
        if not self.is_gathered:
            return
        self.is_gathered = False
        for weight in self._weights.values():
            if not self.is_own(weight):
                assign_anew(weight, tf.zeros([0], weight.dtype))

    def trace_gather(self) -> None:
        """Gives this stage the weights of the others, while this is traced by all."""
        self._trace(self._from_home)

    def mark_gathered(self) -> None:
        """Notes that all weights are here."""
        self.is_gathered = True

    def _trace(self, found: Callable[[tf.Variable], tf.Tensor]) -> None:
        """Sets weights, some after others: never are all of them here twice."""
        weights = list(self._weights.values())
        before: list[tf.Operation] = []
        for places in plan_buckets(weights, self._communicator.bucket_bytes):
            with tf.control_dependencies(before):
                values = [found(weights[place]) for place in places]
                before = [
                    assign_anew(weights[place], value)
                    for place, value in zip(places, values, strict=True)
                ]

    def _from_home(self, weight: tf.Variable) -> tf.Tensor:
        like = value_of(weight) if self.is_own(weight) else tf.zeros(weight.shape, weight.dtype)
        return self._communicator.broadcast_from_stage(like, self._stage_of_weight(weight))

    def _stage_of_weight(self, weight: tf.Variable) -> int:
        return self._stage_of.get(id(weight), 0)
