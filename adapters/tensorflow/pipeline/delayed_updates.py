"""Versions of a TensorFlow stage's weights, and its passes where they go on in the next step.

Each pass is a traced function of its own: a backward pass in a later step than its forward pass cannot be in
the same function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from isotrain.adapters.common.pipeline.background_sends import BackgroundSends
from isotrain.adapters.common.pipeline.delayed_updates import ContinuedPasses, WeightVersions
from isotrain.adapters.tensorflow.base.without_values import (
    AbstractTensor,
    MissingValueError,
    lacks_value,
)
from isotrain.adapters.tensorflow.pipeline.stage import PipelineContext, SavedForward, floating
from isotrain.adapters.tensorflow.replica.tracing import MicroBatches, TracedFunctions, Weights
from isotrain.adapters.tensorflow.trainer.state import native
from isotrain.plugin import Batch, Pass, Slice, Transfer


class TensorFlowWeightVersions(WeightVersions):
    """Versions of TensorFlow weights.

    The earlier versions are tensors, and the current one is in the variables unless another one is used.
    Tensor and variable share memory until the variable is updated.
    """

    def __init__(self, weights: Mapping[str, tf.Variable], delay: int, layout: str) -> None:
        """Begins with equal versions.

        Args:
            weights: Trainable weights of the stage by name, any shapes.
            delay: Number of versions besides the current one.
            layout: Name of what the versions of all stages are, in the names of the state.

        Raises:
            MissingValueError: A weight has no value.
        """
        self._weights = list(weights.values())
        if any(map(lacks_value, self._weights)):
            raise MissingValueError("weights have several versions")
        self._used = 0
        super().__init__(list(weights), [self._values() for _ in range(delay + 1)], layout)

    def _values(self) -> list[tf.Tensor]:
        return [weight.value() for weight in self._weights]

    def use(self, age: int) -> None:
        if age == self._used:
            return
        if not self._used:
            self._versions[0] = self._values()
        self._used = age
        for weight, value in zip(self._weights, self._versions[age], strict=True):
            weight.assign(value, read_value=False)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        self.use(0)
        earlier = self._versions = [self._values(), *self._versions[1:]][:-1]
        yield
        self._versions = [self._values(), *earlier]
        self.are_equal = False

    def _current(self, index: int) -> tf.Tensor:
        return self._weights[index].value()

    def _set(self, age: int, index: int, value: Any) -> None:
        self._versions[age][index] = tf.cast(value, self._weights[index].dtype)


class ContinuedStageWork(ContinuedPasses):
    """Passes of a TensorFlow stage, the last of which are done in the next step.

    Attributes:
        share: Sum of the weighted losses of the step's passes so far, a float64 scalar.
        sends: Transfers to other stages that may be under way.
    """

    def __init__(
        self,
        context: PipelineContext,
        functions: TracedFunctions,
        on_batch: Callable[..., Any],
        weights: Sequence[tf.Variable],
    ) -> None:
        """Begins with an empty pipeline.

        Args:
            context: Objects that stay the same from step to step.
            functions: Traced functions of the group.
            on_batch: Calls such a function on a batch, as `TracedFunctions.on_batch`.
            weights: Trainable weights of the stage, any shapes.
        """
        self._context = context
        self._functions = functions
        self._on_batch = on_batch
        self._weights = weights
        self._batch: Batch | None = None
        self._first = 0  # micro-batches of the steps before, whose passes may be left
        self._saved: dict[int, SavedForward] = {}
        self._sums: list[tf.Tensor | None] = [None] * len(weights)
        self._sums_apart: list[tf.Tensor | None] = [None] * len(weights)
        self._seed_starts: list[tf.Tensor] = []
        self._draws: list[tf.Tensor] = []
        self.share: tf.Tensor = tf.zeros((), tf.float64)
        self.sends = BackgroundSends()

    @property
    def _micro_batches(self) -> Sequence[Slice]:
        return () if self._batch is None else self._batch.slices[0]

    def begin_step(self, batch: Batch | None) -> None:
        self._first += len(self._micro_batches)
        self._batch = batch
        self.share = tf.zeros((), tf.float64)
        self._seed_starts = [tf.identity(native(seed)) for seed in self._context.seeds]

    def gradients(self) -> list[tf.Tensor]:
        """Accumulated gradients of the stage's weights, of their shapes and dtypes. Local."""
        return [
            tf.zeros(weight.shape, weight.dtype) if total is None else total
            for weight, total in zip(self._weights, self._sums, strict=True)
        ]

    def exchange_gradients(self) -> None:
        self._sums, self._sums_apart = self._sums_apart, self._sums

    def clear_gradients(self) -> None:
        self._sums = [None] * len(self._weights)

    def forward(self, work: Pass, received: list[tf.Tensor]) -> list[tf.Tensor]:
        assert self._batch is not None
        micro_batch = self._micro_batches[work.micro_batch]
        part = replace(self._batch, slices=((micro_batch,),), even=False)  # so that it has a weight
        if self._seed_starts and not self._draws:
            self._draws = self._on_batch("draws of a pass", self._trace_draws, part, *received)
        self.move_seeds(work.micro_batch)
        with tf.GradientTape() as tape:
            tape.watch(floating(received))
            sent, loss = self._on_batch("forward pass", self._trace_forward, part, *received)
        if isinstance(loss, AbstractTensor):
            raise MissingValueError("the backward pass of a micro-batch is in a later step")
        self.share = self.share + tf.cast(loss, tf.float64)
        self._saved[self._first + work.micro_batch] = SavedForward(tape, received, sent, loss)
        return sent

    def _trace_forward(
        self,
        has_placeholders: bool,
        micro_batches: MicroBatches,
        weights: Weights,
        *received: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Traces the forward pass of a micro-batch: returns what is sent, and the weighted loss, a scalar."""

        def replica(position: int) -> tuple[list[tf.Tensor], tf.Tensor]:
            (micro_batch,) = micro_batches[position]
            assert weights is not None
            return self._context.forward(
                self._context.chunk, micro_batch, weights[position][0], has_placeholders, received
            )

        return self._functions.on_replicas(replica, trains=True)[0]

    def _trace_draws(
        self,
        has_placeholders: bool,
        micro_batches: MicroBatches,
        weights: Weights,
        *received: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Traces how far a micro-batch moves the seed generators, shape `[2]` each."""

        def replica(position: int) -> list[tf.Tensor]:
            ((inputs, _),) = micro_batches[position]
            starts = [tf.identity(native(seed)) for seed in self._context.seeds]
            return self._context.draws(self._context.chunk, inputs, received, starts)

        return self._functions.on_replicas(replica, trains=True)[0]

    def move_seeds(self, micro_batch: int) -> None:
        for seed, start, draws in zip(
            self._context.seeds, self._seed_starts, self._draws, strict=False
        ):
            native(seed).assign(start + micro_batch * draws)

    def backward(self, work: Pass, received: list[tf.Tensor]) -> list[tf.Tensor]:
        saved = self._saved.pop(self._first + work.micro_batch)
        sources = floating(saved.received)
        gradients = saved.tape.gradient(
            [*floating(saved.sent), saved.loss],
            [*sources, *self._weights],
            [*received, tf.ones_like(saved.loss)],
        )
        for index, gradient in enumerate(gradients[len(sources) :]):
            if gradient is not None:  # dense: of rows that occur twice, Adam would make two updates
                dense, total = tf.convert_to_tensor(gradient), self._sums[index]
                self._sums[index] = dense if total is None else total + dense
        return [
            tf.zeros_like(source) if gradient is None else gradient
            for source, gradient in zip(sources, gradients, strict=False)
        ]

    def end_step(self) -> None:
        self.sends.check()

    def wait_sent(self) -> None:
        self.sends.wait()

    def send(self, transfer: Transfer, tensors: list[tf.Tensor]) -> None:
        communicator, destination = self._context.communicator, transfer.destination

        def trace(sent: list[tf.Tensor]) -> list[tf.Tensor]:
            return [communicator.send(each, destination) for each in sent]

        function: Any = self._functions.function(("send", destination), trace)
        if communicator.sends_wait:
            traced = function.get_concrete_function(tensors)  # here: threads trace nothing
            self.sends.start(destination, lambda: traced(tensors))
        else:
            function(tensors)

    def receive(self, transfer: Transfer) -> list[tf.Tensor]:
        communicator, source = self._context.communicator, transfer.source
        specs = self._expected(transfer)

        def trace() -> list[tf.Tensor]:
            likes = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
            return [communicator.receive(like, source) for like in likes]

        received: list[tf.Tensor] = self._functions.function(("receive", source, *specs), trace)()
        return received

    def _expected(self, transfer: Transfer) -> list[tf.TensorSpec]:
        """Shapes and dtypes of the tensors to receive."""
        if transfer.direction == "backward":
            sent = self._saved[self._first + transfer.micro_batch].sent
            return [tf.TensorSpec(each.shape, each.dtype) for each in floating(sent)]
        inputs = self._micro_batches[transfer.micro_batch].inputs
        specs = self._context.boundary_specs(inputs)[transfer.chunk - 1]
        return [tf.TensorSpec(spec.shape, spec.dtype) for spec in specs]  # without names
