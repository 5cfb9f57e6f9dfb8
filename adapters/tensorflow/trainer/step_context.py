"""The step context of TensorFlow replicas: differentiable collectives, values, gradients; while traced."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.common.sample_draws import REFUSAL, REFUSAL_WITH_REPRODUCIBLE, DrawKeys
from isotrain.adapters.common.step_context import CommonStepContext, one_shape_expected
from isotrain.adapters.tensorflow.base.recompute import operations, operations_since
from isotrain.adapters.tensorflow.base.sample_draws import TensorFlowPassDraws
from isotrain.plugin import Batch, Phase, SpecError, TrainingSpec

_FIRST_EVALUATION = 1 << 31
"""Word of the first step of an evaluation: no step of the training has it."""
_SHOWN = 1000
"""Number of sizes that an error shows of the shapes of all replicas."""
_RANDOM = re.compile("Random|Rng|Multinomial|Normal")
"""Names of operations that draw random numbers."""


class TensorFlowStepContext(CommonStepContext):
    """Step context of the local replicas; each is traced in a thread of its own."""

    replicas = 1

    def __init__(self, spec: TrainingSpec, frozen: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(spec, frozen)
        self.dtype = tf.float64 if spec.precision == "float64" else tf.float32
        self._local = threading.local()
        self.positions: tf.Tensor | None = None
        self.varies = False  # whether widths may differ between replicas in what is traced

    def connect(
        self,
        local_index: Callable[[], int],
        replica_index: Callable[[], int],
        replicas: int,
        total: Callable[[tf.Tensor], tf.Tensor],
    ) -> None:
        """Connects the local replicas to the others.

        Args:
            local_index: Gives the index among the local replicas of the one that is being traced.
            replica_index: Gives the index of the replica that is being traced.
            replicas: Number of replicas in the run.
            total: Sum over all replicas, of which several may be under way.
        """
        self._local_index, self._replica_index, self._total = local_index, replica_index, total
        self.replicas = replicas

    def positions_of(self, batch: Batch, phase: Phase) -> list[tf.Tensor]:
        """Step and first sample of each slice: a list of one uint32 tensor, `[local replicas, slices, 2]`.

        The list is empty where replicas draw numbers of their own.
        """
        if self.draw_keys is None:
            return []
        word = batch.step | (_FIRST_EVALUATION if phase == "evaluation" else 0)
        firsts = [[(word, each.first) for each in slices] for slices in batch.slices]
        return [tf.constant(firsts, tf.uint32)]

    @property
    def index(self) -> int:  # type: ignore[override]
        """Index of the replica that is being traced."""
        return self._replica_index()

    def set_slice(
        self,
        index: int,
        size: tf.Tensor | None,
        may_be_placeholder: bool,
        phase: Phase = "train",
    ) -> None:
        """Sets the slice that the objective of the traced replica computes next.

        Args:
            index: Index among the micro-batches of the replica.
            size: Number of samples up to a factor, a float64 scalar; None where all replicas have as many.
            may_be_placeholder: Whether the size may be 0.
            phase: Whether it is a pass of the training or of an evaluation.
        """
        self._local.index, self._local.phase = index, phase
        self._local.size = size
        self._local.has_samples = tf.greater(size, 0) if may_be_placeholder else None

    def rows_of(self, inputs: Any) -> Any:
        first, *_ = tf.nest.flatten(inputs)
        return TensorFlowPassDraws.sizes_of(first)[0]

    def pass_draws(self, keys: DrawKeys, inputs: Any) -> TensorFlowPassDraws:
        assert self.positions is not None
        position, rows = (
            self.positions[self._local_index(), self._local.index],
            self.rows_of(inputs),
        )
        return TensorFlowPassDraws(keys, position, rows, self._local.phase == "train")

    @contextlib.contextmanager
    def refusing_other_draws(self, inputs: Any) -> Iterator[None]:
        before = operations()
        yield
        refusal = REFUSAL if self.draw_keys else REFUSAL_WITH_REPRODUCIBLE
        for operation in operations_since(before):
            is_seeded = operation.op_def.is_stateful or self.draw_keys is None
            if is_seeded and _RANDOM.search(operation.type):
                raise SpecError(refusal.format(f"the operation {operation.name}"))

    def all_gather(self, x: tf.Tensor) -> tuple[tf.Tensor, Any]:
        self.require_collective("all_gather")
        if self.replicas == 1:
            return x, 0
        has_samples = self._local.has_samples
        if has_samples is not None:
            x = x[: tf.where(has_samples, tf.shape(x)[0], 0)]
        one_hot = tf.one_hot(self.index, self.replicas, dtype=tf.int32)
        counts = self._total(tf.shape(x)[0] * one_hot)
        first = tf.reduce_sum(counts[: self.index])
        after = tf.reduce_sum(counts[self.index + 1 :])
        others = [[0, 0]] * (x.shape.rank - 1)
        padded = tf.pad(x, [[first, after], *others])
        gathered = (
            self._sum_of_one_shape("all_gather", padded, first_axis=1)
            if self.varies and others
            else self._sum(padded)
        )
        first = first if has_samples is None else tf.where(has_samples, first, 0)
        return gathered, tf.cast(first, keras.backend.result_type(int))  # as `keras.ops.arange` has

    def sum(self, x: tf.Tensor) -> tf.Tensor:
        self.require_collective("sum")
        if self.replicas == 1:
            return x
        return self._sum_of_one_shape("sum", self._of_samples(x))

    def mean(self, x: tf.Tensor) -> tf.Tensor:
        self.require_collective("mean")
        size = self._local.size
        if self.replicas == 1:
            return x
        if size is None:
            return self._sum_of_one_shape("mean", x) / self.replicas
        weight = size / self._total(size)
        return self._sum_of_one_shape("mean", self._of_samples(x) * tf.cast(weight, x.dtype))

    def _sum_of_one_shape(self, method: str, x: tf.Tensor, first_axis: int = 0) -> tf.Tensor:
        """Differentiable sum over all replicas, which fails where these have other shapes. Collective.

        Axes before the first that is compared are equal. Shapes that are known while an even batch of one
        width is traced are not compared. With varying widths they are, as one process may know a shape while
        it traces that another does not.
        """
        is_even = self._local.size is None and not self.varies
        is_known = is_even and x.shape.is_fully_defined()
        if is_known or not x.shape.rank:
            return self._sum(x)
        is_own = tf.one_hot(self.index, self.replicas, dtype=tf.int32)[:, tf.newaxis]
        shapes = self._total(is_own * tf.shape(x)[first_axis:])
        are_equal = tf.reduce_all(tf.equal(shapes, shapes[0]))
        check = tf.debugging.Assert(are_equal, [one_shape_expected(method), shapes], _SHOWN)
        with tf.control_dependencies([check]):
            return self._sum(tf.identity(x), is_known=False)

    def _of_samples(self, x: tf.Tensor) -> tf.Tensor:
        """A tensor, or zeros of its shape where this replica has no samples; differentiable."""
        has_samples = self._local.has_samples
        return x if has_samples is None else tf.where(has_samples, x, tf.zeros_like(x))

    def _sum(self, x: tf.Tensor, is_known: bool = True) -> tf.Tensor:
        """Differentiable sum over all replicas, any shape. Collective.

        MirroredStrategy refuses other shapes, while it is traced, unless `is_known` is False.
        """
        if x.dtype == tf.bool:
            return tf.cast(self._total(tf.cast(x, tf.int32)), tf.bool)

        @tf.custom_gradient
        def differentiable(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            shape = x.shape
            if not is_known:
                x = tf.compat.v1.placeholder_with_default(x, [None] * shape.rank)
            total = self._total(x)
            if not is_known:
                total = tf.ensure_shape(total, shape)
            return total, functools.partial(self._sum, is_known=is_known)

        return differentiable(x)

    def gradient(self, f: Callable[[Any], tf.Tensor], x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = f(x)
        return tape.gradient(result, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)
