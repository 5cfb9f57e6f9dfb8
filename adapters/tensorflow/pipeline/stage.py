"""Work of one TensorFlow process in one step of a pipeline run, while it is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.common.pipeline.split_model import PipelineLosses, PipelineModel
from isotrain.adapters.tensorflow.pipeline.comm import PipelineCommunicator
from isotrain.adapters.tensorflow.trainer.base import MicroBatch, ReplicaTrainer
from isotrain.adapters.tensorflow.trainer.state import native
from isotrain.plugin import Pass, StageWork, Transfer


@dataclass
class PipelineContext:
    """Objects that stay the same from step to step.

    Attributes:
        model: The split model.
        communicator: Communicator with the other stages.
        loss: Losses of the chunks.
        trainer: Trainer of the replica, of whose weights this stage trains its own.
        seeds: Keras variables of the stage's seed generators, shape `[2]`: seed, and number of draws so far;
            empty where the stage has one process.
        known_specs: Cached boundary specs of each chunk, by the shapes of the inputs.
    """

    model: PipelineModel
    communicator: PipelineCommunicator
    loss: PipelineLosses
    trainer: ReplicaTrainer
    seeds: Sequence[Any]
    known_specs: dict[tuple[tf.TensorShape, ...], list[list[tf.TensorSpec]]] = field(
        default_factory=dict
    )

    def boundary_specs(self, inputs: Any) -> list[list[tf.TensorSpec]]:
        """Shapes and dtypes of the tensors that each chunk sends on, for such inputs."""
        tensors = self.model.inputs(inputs)
        key = tuple(each.shape for each in tensors.values())
        if key not in self.known_specs:
            self.known_specs[key] = _trace_boundary_specs(self.model, tensors)
        return self.known_specs[key]

    @property
    def chunk(self) -> Any:
        """The only chunk of this stage."""
        return self.model.chunks[self.communicator.topology.stage]

    def forward(
        self,
        chunk: Any,
        micro_batch: MicroBatch,
        weight: tf.Tensor | None,
        has_placeholders: bool,
        received: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Traces the forward pass of a chunk, and updates the metrics.

        Args:
            chunk: The chunk.
            micro_batch: The micro-batch.
            weight: Weight of the micro-batch, a scalar; None for 1.
            has_placeholders: Whether it may be a placeholder, which has weight 0.
            received: Activations of the chunk before, shape `[samples, ...]`.

        Returns:
            Activations for the next chunk; and the weighted loss, a scalar.
        """
        inputs, targets = micro_batch
        with self.trainer.undo_placeholder(has_placeholders, weight, "train"):
            tensors = chunk(self._inputs(chunk, inputs, received), training=True)
            loss, predictions = self.loss.of(chunk, tensors, targets)
            loss = loss if weight is None else loss * tf.cast(weight, loss.dtype)
            if chunk is self.model.chunks[-1]:
                self.trainer.metrics.update("train", targets, predictions)
        return chunk.boundary_tensors(tensors), loss

    def draws(
        self,
        chunk: Any,
        inputs: Any,
        received: Sequence[tf.Tensor],
        starts: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Traces how far a micro-batch moves the seed generators; nothing else of it is computed.

        Args:
            chunk: The chunk.
            inputs: Inputs of the micro-batch.
            received: Activations of the chunk before, shape `[samples, ...]`.
            starts: States of the generators, shape `[2]` each.
        """
        with keras.StatelessScope() as scope:
            chunk(self._inputs(chunk, inputs, received), training=True)
            moved = [scope.get_current_value(seed) for seed in self.seeds]
        return [
            tf.zeros_like(start) if end is None else end - start
            for end, start in zip(moved, starts, strict=True)
        ]

    def _inputs(self, chunk: Any, inputs: Any, received: Sequence[tf.Tensor]) -> dict[Any, Any]:
        """Tensors that a chunk takes, by key."""
        return self.model.inputs(inputs) | dict(zip(chunk.input_keys, received, strict=True))


@dataclass(frozen=True, eq=False)
class SavedForward:
    """Saved state of a forward pass, for its backward pass."""

    tape: tf.GradientTape
    received: list[tf.Tensor]
    sent: list[tf.Tensor]
    loss: tf.Tensor


class TensorFlowStageWork(StageWork):
    """Forward and backward passes through the chunks of this process, in the order of the schedule.

    Attributes:
        weighted_loss: Sum of the weighted losses so far, a float64 scalar; complete once all passes are done.
        keepalive_outputs: Tensors that the traced function must return: without them, TensorFlow would prune
            sends, and receives of unused tensors, while another stage waits.
        times: Seconds since 1970: when the step began, and when each pass and each wait ended; empty unless
            measured.
    """

    def __init__(
        self,
        context: PipelineContext,
        micro_batches: Sequence[MicroBatch],
        weights: tf.Tensor | None,
        has_placeholders: bool,
        measure: bool = False,
    ) -> None:
        """Begins a step.

        Args:
            context: Objects that stay the same from step to step.
            micro_batches: The replica's micro-batches.
            weights: Weight of each micro-batch, shape `[micro_batches]`; None when all are 1.
            has_placeholders: Whether a micro-batch may be a placeholder, which has weight 0.
            measure: Whether to measure when actions end.
        """
        self._context = context
        self._micro_batches = micro_batches
        self._weights = weights
        self._has_placeholders = has_placeholders
        self._saved: dict[tuple[int, int], SavedForward] = {}
        self._sums: dict[int, tf.Tensor] = {}
        self._seed_starts = [tf.identity(native(seed)) for seed in context.seeds]
        self._draws: list[tf.Tensor] = []
        self._previous: list[tf.Tensor] = []
        self._boundary_specs = [context.boundary_specs(inputs) for inputs, _ in micro_batches]
        self.weighted_loss: tf.Tensor = tf.zeros((), tf.float64)
        self.keepalive_outputs: list[tf.Tensor] = []
        self.times = [tf.timestamp()] if measure else []

    def gradients(self, weights: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Accumulated gradients of this stage's weights, of their shapes and dtypes, after all passes."""
        return [
            self._sums.get(id(weight), tf.zeros(weight.shape, weight.dtype)) for weight in weights
        ]

    def forward(self, work: Pass, received: list[tf.Tensor]) -> list[tf.Tensor]:
        context, chunk = self._context, self._context.model.chunks[work.chunk]
        micro_batch = self._micro_batches[work.micro_batch]
        weight = None if self._weights is None else self._weights[work.micro_batch]
        with tf.control_dependencies(self._previous):
            received = [tf.identity(each) for each in received]
            if self._seed_starts and not self._draws:
                self._draws = context.draws(chunk, micro_batch[0], received, self._seed_starts)
            self.move_seeds(work.micro_batch)
            with tf.GradientTape() as tape:
                tape.watch(floating(received))
                sent, loss = context.forward(
                    chunk, micro_batch, weight, self._has_placeholders, received
                )
        self.weighted_loss = self.weighted_loss + tf.cast(loss, tf.float64)
        self._saved[work.chunk, work.micro_batch] = SavedForward(tape, received, sent, loss)
        self._previous = [*sent, loss]
        self._record_time(self._previous)
        return sent

    def move_seeds(self, micro_batch: int) -> None:
        """Sets the seed generators to their states before a micro-batch of the step, by its index."""
        for seed, start, draws in zip(
            self._context.seeds, self._seed_starts, self._draws, strict=True
        ):
            native(seed).assign(start + micro_batch * draws)

    def backward(self, work: Pass, received: list[tf.Tensor]) -> list[tf.Tensor]:
        saved = self._saved.pop((work.chunk, work.micro_batch))
        weights = _trained(self._context.model.chunks[work.chunk])
        sources, targets = floating(saved.received), floating(saved.sent)
        with tf.control_dependencies(self._previous):
            gradients = saved.tape.gradient(
                [*targets, saved.loss], [*sources, *weights], [*received, tf.ones_like(saved.loss)]
            )
            input_gradients = [
                tf.zeros_like(source) if gradient is None else gradient
                for source, gradient in zip(sources, gradients[: len(sources)], strict=True)
            ]
            self._add(weights, gradients[len(sources) :])
        self._previous = [*input_gradients, *self._sums.values()]
        self._record_time(self._previous)
        return input_gradients

    def _add(self, weights: Sequence[tf.Variable], gradients: Sequence[Any]) -> None:
        """Adds gradients of the weights' shapes to their sums, densely."""
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:  # dense: of rows that occur twice, Adam would make two updates
                dense, total = tf.convert_to_tensor(gradient), self._sums.get(id(weight))
                self._sums[id(weight)] = dense if total is None else total + dense

    def send(self, transfer: Transfer, tensors: list[tf.Tensor]) -> None:
        communicator = self._context.communicator
        self._keep_alive([communicator.send(each, transfer.destination) for each in tensors])

    def receive(self, transfer: Transfer) -> list[tf.Tensor]:
        communicator = self._context.communicator
        received = [
            communicator.receive(each, transfer.source) for each in self._expected(transfer)
        ]
        self._keep_alive(received)
        self._record_time(received)
        return received

    def _record_time(self, done: Sequence[tf.Tensor]) -> None:
        """Records when these tensors, of any shape, are computed; the next pass waits for that."""
        if self.times:
            with tf.control_dependencies([*done, self.times[-1]]):
                self.times.append(tf.timestamp())
            self._previous = [*self._previous, self.times[-1]]

    def _keep_alive(self, tensors: Sequence[tf.Tensor]) -> None:
        """Keeps an element of each tensor, of any shape, as an output, so that the graph computes it."""
        self.keepalive_outputs += [tf.reshape(each, [-1])[:1] for each in tensors]

    def _expected(self, transfer: Transfer) -> list[tf.Tensor]:
        """Zeros of the shapes and dtypes of the tensors to receive."""
        if transfer.direction == "backward":
            saved = self._saved[transfer.chunk, transfer.micro_batch]
            return [tf.zeros_like(each) for each in floating(saved.sent)]
        likes = self._boundary_specs[transfer.micro_batch][transfer.chunk - 1]
        return [tf.zeros(like.shape, like.dtype) for like in likes]


def floating(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The floating-point ones of these tensors, of any shapes: those that have gradients."""
    return [each for each in tensors if each.dtype.is_floating]


def _trained(chunk: Any) -> list[tf.Variable]:
    """Trainable weights of a chunk, any shape."""
    return [native(variable) for variable in chunk.trainable_variables]


def _trace_boundary_specs(
    model: PipelineModel, inputs: Mapping[int, tf.Tensor]
) -> list[list[tf.TensorSpec]]:
    """Traces a forward pass for shape and dtype of the tensors that each chunk sends; computes nothing."""

    def forward(*tensors: tf.Tensor) -> list[list[tf.Tensor]]:
        computed: Mapping[int, Any] = dict(zip(inputs, tensors, strict=True))
        boundaries = []
        for chunk in model.chunks:
            computed = chunk(computed, training=True)
            boundaries.append(chunk.boundary_tensors(computed))
        return boundaries

    with keras.StatelessScope():
        traced = tf.function(forward, autograph=False).get_concrete_function(*inputs.values())
    return traced.structured_outputs
