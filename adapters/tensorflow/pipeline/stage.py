"""What one TensorFlow process does of one step of a pipeline run, while this is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.common.pipeline.interfaces import PipelineLosses, PipelineModel
from isotrain.adapters.tensorflow.pipeline.comm import PipelineCommunicator
from isotrain.adapters.tensorflow.trainer.base import MicroBatch, ReplicaTrainer
from isotrain.adapters.tensorflow.trainer.state import native
from isotrain.plugin import Pass, StageWork, Transfer


@dataclass
class PipelineContext:
    """What stays from step to step.

    Attributes:
        model: The model, cut.
        communicator: With the other stages.
        loss: Of its chunks.
        trainer: The replica, of whose weights this stage trains its own.
        known_specs: By the shapes of the inputs, what each chunk gives to those behind it is like.
    """

    model: PipelineModel
    communicator: PipelineCommunicator
    loss: PipelineLosses
    trainer: ReplicaTrainer
    known_specs: dict[tuple[tf.TensorShape, ...], list[list[tf.TensorSpec]]] = field(
        default_factory=dict
    )

    def boundary_specs(self, inputs: Any) -> list[list[tf.TensorSpec]]:
        """What each chunk gives to those behind it, for such inputs: shapes and types."""
        given = self.model.inputs(inputs)
        key = tuple(each.shape for each in given.values())
        if key not in self.known_specs:
            self.known_specs[key] = _crossing_each(self.model, given)
        return self.known_specs[key]


@dataclass(frozen=True, eq=False)
class _Kept:
    """Of a forward pass, for its backward pass."""

    tape: tf.GradientTape
    received: list[tf.Tensor]
    given: list[tf.Tensor]
    loss: tf.Tensor


class TensorFlowStageWork(StageWork):
    """Passes through the chunks of this process, one after the other, as their order is.

    Attributes:
        share: The sum of the weighted losses so far, which is all of it once all passes are done.
        keepalive_outputs: For whoever traces to return: without them, TensorFlow would leave out what is
            sent, or received for nothing, while another stage waits.
        times: When all began, and when each pass and each wait ended, in seconds since 1970; nothing unless
            that is to be noted.
    """

    def __init__(
        self,
        stages: PipelineContext,
        micro_batches: Sequence[MicroBatch],
        weights: tf.Tensor | None,
        holes: bool,
        notes: bool = False,
    ) -> None:
        """Takes a step up.

        Args:
            stages: What stays.
            micro_batches: The micro-batches.
            weights: Of each, shape `[micro_batches]`; None when all are 1.
            holes: Whether a micro-batch may be a placeholder, which is one of weight 0.
            notes: Whether to note when what is done.
        """
        self._stages = stages
        self._micro_batches = micro_batches
        self._weights = weights
        self._holes = holes
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._sums: dict[int, tf.Tensor] = {}
        self._before: list[tf.Tensor] = []
        self._likes = [stages.boundary_specs(inputs) for inputs, _ in micro_batches]
        self.share: tf.Tensor = tf.zeros((), tf.float64)
        self.keepalive_outputs: list[tf.Tensor] = []
        self.times = [tf.timestamp()] if notes else []

    def gradients(self, weights: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Those of weights of this stage, once all passes are done."""
        return [
            self._sums.get(id(weight), tf.zeros(weight.shape, weight.dtype)) for weight in weights
        ]

    def forward(self, work: Pass, received: list[tf.Tensor]) -> list[tf.Tensor]:
        chunk, trainer = self._stages.model.chunks[work.chunk], self._stages.trainer
        inputs, targets = self._micro_batches[work.micro_batch]
        weight = None if self._weights is None else self._weights[work.micro_batch]
        with (
            tf.control_dependencies(self._before),
            trainer.undo_placeholder(self._holes, weight, "train"),
        ):
            received = [tf.identity(each) for each in received]
            with tf.GradientTape() as tape:
                tape.watch([each for each in received if each.dtype.is_floating])
                given = dict(zip(chunk.input_keys, received, strict=True))
                known = chunk(self._stages.model.inputs(inputs) | given, training=True)
                loss, predictions = self._stages.loss.of(chunk, known, targets)
                loss = loss if weight is None else loss * tf.cast(weight, loss.dtype)
            if chunk is self._stages.model.chunks[-1]:
                trainer.metrics.update("train", targets, predictions)
        self.share = self.share + tf.cast(loss, tf.float64)
        sent = chunk.boundary_tensors(known)
        self._kept[work.chunk, work.micro_batch] = _Kept(tape, received, sent, loss)
        self._before = [*sent, loss]
        self._note(self._before)
        return sent

    def backward(self, work: Pass, received: list[tf.Tensor]) -> list[tf.Tensor]:
        kept = self._kept.pop((work.chunk, work.micro_batch))
        weights = _trained(self._stages.model.chunks[work.chunk])
        sources = [each for each in kept.received if each.dtype.is_floating]
        targets = [each for each in kept.given if each.dtype.is_floating]
        with tf.control_dependencies(self._before):
            found = kept.tape.gradient(
                [*targets, kept.loss], [*sources, *weights], [*received, tf.ones_like(kept.loss)]
            )
            given = [
                tf.zeros_like(source) if gradient is None else gradient
                for source, gradient in zip(sources, found[: len(sources)], strict=True)
            ]
            self._add(weights, found[len(sources) :])
        self._before = [*given, *self._sums.values()]
        self._note(self._before)
        return given

    def _add(self, weights: Sequence[tf.Variable], gradients: Sequence[Any]) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:  # dense: of rows that occur twice, Adam would make two updates
                dense, before = tf.convert_to_tensor(gradient), self._sums.get(id(weight))
                self._sums[id(weight)] = dense if before is None else before + dense

    def send(self, transfer: Transfer, tensors: list[tf.Tensor]) -> None:
        communicator = self._stages.communicator
        self._prove([communicator.send(each, transfer.destination) for each in tensors])

    def receive(self, transfer: Transfer) -> list[tf.Tensor]:
        communicator = self._stages.communicator
        found = [communicator.receive(each, transfer.source) for each in self._expected(transfer)]
        self._prove(found)
        self._note(found)
        return found

    def _note(self, done: Sequence[tf.Tensor]) -> None:
        """Notes when it is done, and what was noted before is; the next pass waits for that."""
        if self.times:
            with tf.control_dependencies([*done, self.times[-1]]):
                self.times.append(tf.timestamp())
            self._before = [*self._before, self.times[-1]]

    def _prove(self, tensors: Sequence[tf.Tensor]) -> None:
        self.keepalive_outputs += [tf.reshape(each, [-1])[:1] for each in tensors]

    def _expected(self, transfer: Transfer) -> list[tf.Tensor]:
        """Tensors like those that come."""
        if transfer.direction == "backward":
            kept = self._kept[transfer.chunk, transfer.micro_batch]
            return [tf.zeros_like(each) for each in kept.given if each.dtype.is_floating]
        likes = self._likes[transfer.micro_batch][transfer.chunk - 1]
        return [tf.zeros(like.shape, like.dtype) for like in likes]


def _trained(chunk: Any) -> list[tf.Variable]:
    return [native(variable) for variable in chunk.trainable_variables]


def _crossing_each(
    model: PipelineModel, given: Mapping[int, tf.Tensor]
) -> list[list[tf.TensorSpec]]:
    """Traces a forward pass for what each chunk gives; computes nothing."""

    def through(*tensors: tf.Tensor) -> list[list[tf.Tensor]]:
        known: Mapping[int, Any] = dict(zip(given, tensors, strict=True))
        found = []
        for chunk in model.chunks:
            known = chunk(known, training=True)
            found.append(chunk.boundary_tensors(known))
        return found

    with keras.StatelessScope():
        traced = tf.function(through, autograph=False).get_concrete_function(*given.values())
    return traced.structured_outputs
