"""A model on TensorFlow of which a process trains one stage alone."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from isotrain.adapters.tensorflow.program import ReplicaTrainer
from isotrain.adapters.tensorflow.state import native
from isotrain.adapters.tensorflow.variables import named_as
from isotrain.adapters.tensorflow.weight_update import WeightUpdate
from isotrain.plugin import TrainingSpec


class PipelineTrainer(ReplicaTrainer):
    """Has slots once `update.shard_optimizer` tells which weights are of this stage: never those of all."""

    def _update_of(self, spec: TrainingSpec, trainable: list[Any]) -> WeightUpdate:
        return WeightUpdate(spec, trainable, slots_for=list(map(_small, trainable)))


def _small(weight: Any) -> Any:
    """What slots of a weight are named after and typed by, without its numbers."""
    own = native(weight)
    return named_as(weight, tf.zeros([1] * own.shape.rank, own.dtype))
