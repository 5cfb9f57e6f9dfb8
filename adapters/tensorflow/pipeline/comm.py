"""How a TensorFlow process of a pipeline run exchanges: along the data axis, and along that of the stages."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from isotrain.adapters.tensorflow.comm.base import Communicator, in_buckets
from isotrain.plugin import DATA, STAGE, ProcessContext, ReduceOp, Subgroups, UnsupportedError


class PipelineCommunicator(Communicator):
    """Ties a stage to the same stage of other replicas, as which it appears, and to its replica's others.

    All of it is done by two verbs that any exchange within parts of all processes has.

    Attributes:
        stage: This process's.
        stages: How many there are.
        bucket_bytes: Up to how many travel together.
    """

    def __init__(self, processes: Communicator, context: ProcessContext, bucket_bytes: int) -> None:
        """Takes an exchange over.

        Args:
            processes: Of all processes of the run, as if each were a replica.
            context: This process's place.
            bucket_bytes: Up to how many bytes of gradients travel together.
        """
        mesh, place = context.device_mesh, context.rank
        self._processes = processes
        self.bucket_bytes = bucket_bytes
        self._everyone = (tuple(range(mesh.total_size)),)
        self._same_stage, self._same_replica = mesh.groups(DATA), mesh.groups(STAGE)
        self.replicas, self.stages = mesh.size(DATA), mesh.size(STAGE)
        self.local_replicas = (mesh.coordinates(place)[DATA],)
        self.stage = mesh.coordinates(place)[STAGE]
        self._first = place - self.stage
        self._place = place

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp) -> list[tf.Tensor]:
        if op == "max":
            raise _unsupported_collective()
        sums = self._sums(tensors, self._same_stage)
        if op == "sum":
            return sums
        return [total / tf.cast(self.replicas, total.dtype) for total in sums]

    def sum_over_all(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over all stages of all replicas."""
        return self._sums(tensors, self._everyone)

    def max_over_all(self, vector: tf.Tensor) -> tf.Tensor:
        """The largest in each place over all stages of all replicas."""
        behind = len(self._everyone[0]) - self._place - 1
        rows = tf.pad(vector[tf.newaxis], [[self._place, behind], [0, 0]])
        return tf.reduce_max(self.sum_over_all([rows])[0], axis=0)

    def sum_over_stages(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum over the stages of this replica."""
        return self._processes.all_reduce_within(tensor, self._same_replica)

    def _sums(self, tensors: Sequence[tf.Tensor], subgroups: Subgroups) -> list[tf.Tensor]:
        def add(packed: list[tf.Tensor]) -> list[tf.Tensor]:
            return [self._processes.all_reduce_within(each, subgroups) for each in packed]

        return in_buckets(tensors, self.bucket_bytes, add)

    def broadcast_from_first(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor of the first process of all."""
        return self._broadcast(tensor, self._everyone)

    def broadcast_from_stage(self, tensor: tf.Tensor, stage: int) -> tf.Tensor:
        """The tensor of another stage of this replica."""
        source = self._first + stage
        others = [self._first + each for each in range(self.stages) if each != stage]
        return self._broadcast(tensor, ((source, *others),))

    def send(self, tensor: tf.Tensor, stage: int) -> tf.Tensor:
        """Sends to another stage of this replica; gives what is there once it has."""
        return self._broadcast(tensor, ((self._place, self._first + stage),))

    def receive(self, like: tf.Tensor, stage: int) -> tf.Tensor:
        """What another stage of this replica sends: a tensor like another."""
        return self._broadcast(like, ((self._first + stage, self._place),))

    def _broadcast(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        """The tensor of the first of each part, bit by bit: TensorFlow's collectives lack bfloat16."""
        if tensor.dtype != tf.bfloat16:
            return self._processes.broadcast_within(tensor, subgroups)
        bits = self._processes.broadcast_within(tf.bitcast(tensor, tf.float16), subgroups)
        return tf.bitcast(bits, tf.bfloat16)

    def all_gather(self, tensor: tf.Tensor) -> tf.Tensor:
        raise _unsupported_collective()

    def send_receive(self, tensor: tf.Tensor, destination: int, source: int) -> tf.Tensor:
        raise _unsupported_collective()

    def all_reduce_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        raise _unsupported_collective()

    def broadcast_within(self, tensor: tf.Tensor, subgroups: Subgroups) -> tf.Tensor:
        raise _unsupported_collective()

    def close(self) -> None:
        self._processes.close()


def _unsupported_collective() -> UnsupportedError:
    return UnsupportedError("stages exchange over their cuts, and all that others do they cannot.")
