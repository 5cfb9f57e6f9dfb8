"""Weights of a pipeline model on TensorFlow: each process keeps its own stage's weights up to date."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

from isotrain.adapters.tensorflow.base.variables import assign_anew, value_of
from isotrain.adapters.tensorflow.base.without_values import lacks_value
from isotrain.adapters.tensorflow.comm.base import plan_buckets
from isotrain.adapters.tensorflow.pipeline.comm import PipelineCommunicator


class StageWeights:
    """All weights of the model while they are gathered; otherwise those of this stage alone.

    The variables of other stages' weights are then empty, whatever their shape says, until all weights are
    gathered again.

    Attributes:
        is_gathered: Whether all stages' weights are here.
    """

    def __init__(
        self,
        weights: Mapping[str, tf.Variable],
        stage_of: Mapping[int, int],
        communicator: PipelineCommunicator,
    ) -> None:
        """Begins with all weights here.

        Args:
            weights: Weights by name.
            stage_of: Stage of each weight, by identity; weights of no stage belong to the first.
            communicator: Communicator of this stage.
        """
        self._weights = weights
        self._stage_of = stage_of
        self._communicator = communicator
        self.is_gathered = True

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def is_local(self, weight: tf.Variable) -> bool:
        """Whether a weight, of any shape, belongs to this stage."""
        return self._stage_of_weight(weight) == self._communicator.topology.stage

    def is_remote(self, name: str) -> bool:
        """Whether a name is that of a weight whose current value only other stages have."""
        weight = None if self.is_gathered else self._weights.get(name)
        return weight is not None and not self.is_local(weight)

    def trace_start(self) -> None:
        """Broadcasts all weights from the first process, while this is traced. Collective."""
        self._trace(lambda weight: self._communicator.broadcast_from_first(value_of(weight)))

    def drop_other_stages(self) -> None:
        """Frees the weights of other stages; not traced. Local."""
        if not self.is_gathered:
            return
        self.is_gathered = False
        for weight in self._weights.values():
            if not (self.is_local(weight) or lacks_value(weight)):
                assign_anew(weight, tf.zeros([0], weight.dtype))

    def trace_gather(self) -> None:
        """Gathers the weights of all stages, while this is traced. Collective."""
        self._trace(self._from_owner)

    def mark_gathered(self) -> None:
        """Records that all weights are here. Local."""
        self.is_gathered = True

    def _trace(self, read: Callable[[tf.Variable], tf.Tensor]) -> None:
        """Assigns all weights, in their shapes, bucket by bucket: never are all of them in memory twice."""
        weights = list(self._weights.values())
        previous: list[tf.Operation] = []
        for indices in plan_buckets(weights, self._communicator.bucket_bytes):
            with tf.control_dependencies(previous):
                values = [read(weights[index]) for index in indices]
                previous = [
                    assign_anew(weights[index], value)
                    for index, value in zip(indices, values, strict=True)
                ]

    def _from_owner(self, weight: tf.Variable) -> tf.Tensor:
        """Broadcasts a weight, in its shape, from the stage that it belongs to. Collective."""
        like = value_of(weight) if self.is_local(weight) else tf.zeros(weight.shape, weight.dtype)
        source = self._communicator.topology.first_of(self._stage_of_weight(weight))
        return self._communicator.broadcast_in_replica(like, source)

    def _stage_of_weight(self, weight: tf.Variable) -> int:
        """Stage that a weight of any shape belongs to; 0 for what no stage has for itself."""
        return self._stage_of.get(id(weight), 0)
