"""Optimizer of a TensorFlow replica: its state (slot variables), learning rate and updates.

Methods called while a `tf.function` is traced concern the replica that is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.private.optimizers import momentum_of
from isotrain.adapters.tensorflow.base import gpu
from isotrain.adapters.tensorflow.base.variables import assign_all, undo_where
from isotrain.adapters.tensorflow.trainer.state import canonical_names, native, slots
from isotrain.plugin import SpecError, TrainingSpec, weight_groups


def use_fused_sgd(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes plain SGD with momentum update each weight by one fused kernel, with the same bits.

    On CPUs only: on a GPU one kernel may fuse a multiplication and an addition, with one rounding.
    """
    if type(optimizer) is not keras.optimizers.SGD or not optimizer.momentum:
        return
    if gpu.are_used():
        return

    def update(gradient: Any, variable: Any, rate: Any) -> None:
        dtype = variable.dtype
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=native(momentum_of(optimizer, variable)).handle,
            lr=ops.cast(rate, dtype),
            grad=ops.cast(gradient, dtype),
            momentum=ops.cast(optimizer.momentum, dtype),
            use_nesterov=optimizer.nesterov,
        )

    optimizer.update_step = update


class _Momentum:
    """Momentum of a Keras optimizer that is a scalar variable: traced updates read its value.

    Keras compares it with 0 while it traces, and subtracts it from 1.
    """

    def __init__(self, variable: tf.Variable) -> None:
        self._variable = variable

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._variable.read_value(), dtype)

    def __ne__(self, other: object) -> bool:
        return True

    def __gt__(self, other: float) -> bool:
        return True

    def __rsub__(self, other: float) -> tf.Tensor:
        return other - self._variable.read_value()

    __hash__ = None  # type: ignore[assignment]


Gradients = list[tf.Tensor | None]
"""One per trainable weight; None where the loss does not depend on it."""


class WeightUpdate:
    """Turns reduced gradients into new weights.

    Attributes:
        optimizer_lr_schedule: The optimizer's own learning rate schedule; None where it has none.
        gradient_norms: Norms of the gradients of the last `apply`, and of parts of them, shape [1 + parts];
            None without `keep_gradient_norms`.
        frozen: Indices of the trainable weights that `apply`, as traced from now on, leaves as they are.
        kept_gradients: Gradients of the last `apply`, as variables; empty unless `keep_gradients` was called.
    """

    def __init__(
        self, spec: TrainingSpec, trainable: list[Any], slots_for: list[Any] | None = None
    ) -> None:
        """Builds the optimizer and its slots, in the scope of the `tf.distribute` strategy.

        Args:
            spec: Training spec, which names the optimizer.
            trainable: Trainable weights.
            slots_for: Stand-ins that slots are made for until `shard_optimizer`; None: the weights.
        """
        self._spec = spec
        self._trainable = trainable
        self.frozen: frozenset[int] = frozenset()
        self._values = [native(variable) for variable in trainable]
        self._rate: Any = None
        self._remote_slots: set[str] = set()
        self._shard: Sequence[int] | None = None
        self._global_clipnorm: float | None = None
        self.kept_gradients: list[tf.Variable] = []
        self.gradient_norms: tf.Variable | None = None
        self._norm_parts: Sequence[Sequence[int]] = ()
        self._group_rates = {
            group: tf.Variable(
                tf.zeros(
                    (), self._values[0].dtype
                ),  # exact, where Keras' variables round to float32
                trainable=False,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
            for group in spec.optimizer.group_schedules
        }
        self._make_optimizer()
        self._prepare_optimizer(slots_for or trainable, canonical_names(trainable))

    def _make_optimizer(self, name: str | None = None) -> None:
        """Builds an optimizer without slots."""
        names = canonical_names(self._trainable)
        built = keras_model.build_optimizer(self._spec, "tensorflow", name, names)
        self._optimizer, self.optimizer_lr_schedule = built
        _require_unconditional(self._optimizer)
        self._rate_variable = self._optimizer.learning_rate
        self._shared_slots = set(self.slots())

    def _prepare_optimizer(self, updated: list[Any], names: Sequence[str]) -> None:
        """Creates the slots, binds the learning rate, disables Keras' all-reduce, and fuses plain SGD.

        Args:
            updated: Variables to update.
            names: Their names in the named state.
        """
        self._updated = updated
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        self._optimizer.build(self._updated)
        inner.learning_rate = lambda: self._rate
        keras_private.disable_gradient_reduction(inner)
        use_fused_sgd(inner)
        groups = weight_groups(self._spec.optimizer, canonical_names(self._trainable), names)
        keras_model.use_groups(self._spec, self._optimizer, groups, self._group_rates)

    def slots(self) -> dict[str, Any]:
        """The optimizer's variables by name; not traced."""
        return slots(self._optimizer, self._rate_variable)

    def loss_scale(self) -> dict[str, Any]:
        """Variables of the loss scale by name; not traced."""
        return keras_model.loss_scale_variables(self._optimizer)

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables of the optimizer, of any shape, in its order."""
        return [native(variable) for variable in self._optimizer.variables]

    def shard_optimizer(self, indices: Sequence[int]) -> None:
        """Updates, and has slots for, only some of the trainable weights from now on; not traced.

        The slots are created outside of the strategy's scope, whose workers would create equal ones together.

        Args:
            indices: Indices of the trainable weights that this replica updates.
        """
        previous = self.slots().keys()
        self._make_optimizer(self._optimizer.name)
        names = canonical_names(self._trainable)
        self._shard = indices
        self._prepare_optimizer(
            [self._trainable[index] for index in indices], [names[index] for index in indices]
        )
        self._remote_slots = previous - self.slots().keys()
        self._global_clipnorm = self._optimizer.global_clipnorm
        self._optimizer.global_clipnorm = None

    def is_local_slot(self, slot: str) -> bool:
        """Whether a slot belongs to a weight that this replica alone updates."""
        is_sharded = bool(self._remote_slots) and slot in self.slots()
        return is_sharded and slot not in self._shared_slots

    def is_remote_slot(self, slot: str) -> bool:
        """Whether a slot belongs to a weight that only another replica updates."""
        return slot in self._remote_slots

    def weight_finalizer(self) -> Callable[[], None] | None:
        """The optimizer's final change of the weights when training ends (such as EMA), or None.

        Not traced.
        """
        return keras_model.weight_finalizer(self._optimizer, self._updated)

    @contextlib.contextmanager
    def learning_rate(self, rate: tf.Tensor) -> Iterator[None]:
        """Context in which traced updates use `rate`, a scalar."""
        self._rate = rate
        try:
            yield
        finally:
            self._rate = None

    def note_learning_rate(self, rate: float) -> None:
        """Writes the rate to the named state; not traced."""
        self._rate_variable.assign(rate)

    def set_group_rates(self, rates: Mapping[int, float]) -> None:
        """Sets the rates of later updates by the schedules of optimizer groups, by index; not traced."""
        for group, rate in rates.items():
            self._group_rates[group].assign(rate)

    def momentum_setter(self) -> Callable[[float], None] | None:
        """Function that sets the momentum of updates that are traced from now on; not traced."""
        option = keras_model.momentum_option(self._optimizer)
        if option is None:
            return None
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        number = np.float32(getattr(inner, option))  # as Keras' optimizers get it in float64 too
        dtype = tf.float64 if self._spec.precision == "float64" else tf.float32
        value = tf.Variable(number, dtype=dtype, trainable=False)
        setattr(inner, option, _Momentum(value))
        return lambda momentum: value.assign(np.float32(momentum))

    def apply(self, gradients: Gradients) -> None:
        """Clips and applies reduced gradients, of the weights' shapes and dtypes."""
        if self.kept_gradients:
            assign_all(self.kept_gradients, self.unscaled(gradients))
        self._keep_norms(self.unscaled(gradients))
        if self._shard is not None:
            norm = None
            if self._global_clipnorm is not None:
                norm = keras_model.global_norm(self.unscaled(gradients))
            self.apply_shard([gradients[index] for index in self._shard], norm)
            return
        trained = [index for index in range(len(self._updated)) if index not in self.frozen]
        self._optimizer.apply(
            [gradients[index] for index in trained], [self._updated[index] for index in trained]
        )

    def _keep_norms(self, dense: Sequence[tf.Tensor]) -> None:
        """Stores the norms of gradients of the full weights' shapes, if `keep_gradient_norms` was called."""
        if self.gradient_norms is None:
            return
        parts = [[dense[index] for index in part] for part in self._norm_parts]
        norms = map(
            keras_model.global_norm, (dense, *parts)
        )  # as clipping: TensorFlow computes it once
        self.gradient_norms.assign(tf.stack([*norms]))

    def apply_shard(self, gradients: Sequence[tf.Tensor], norm: tf.Tensor | None) -> None:
        """Clips and applies reduced gradients of the weights that are updated here.

        Args:
            gradients: Gradient of each of these weights, of its shape and dtype.
            norm: Global norm over all weights, a scalar; None where it does not clip.
        """
        if norm is not None and self._global_clipnorm is not None:
            clipnorm = self._global_clipnorm
            factor = clipnorm * tf.minimum(1 / norm, 1 / clipnorm)  # as Keras computes it
            gradients = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        self._optimizer.apply(gradients, self._updated)

    def apply_unless(self, empty: tf.Tensor, gradients: Gradients) -> None:
        """Applies gradients, and undoes it where `empty` (a scalar) is true."""
        with undo_where(empty, [*self._values, *self.variables]):
            self.apply(gradients)

    def keep_gradients(self, scope: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """Makes `apply`, as traced from now on, store its gradients in `kept_gradients`; not traced.

        Args:
            scope: Scope of the `tf.distribute` strategy.
        """
        with scope():
            self.kept_gradients = [
                _replica_variable(value.shape, value.dtype) for value in self._values
            ]

    def keep_gradient_norms(
        self,
        scope: Callable[[], contextlib.AbstractContextManager[Any]],
        parts: Sequence[Sequence[int]],
    ) -> None:
        """Makes `apply`, as traced from now on, store norms of gradients in `gradient_norms`; not traced.

        Args:
            scope: Scope of the `tf.distribute` strategy.
            parts: Indices of the weights of each norm after that of all.
        """
        self._norm_parts = parts
        with scope():
            self.gradient_norms = _replica_variable((1 + len(parts),), self._values[0].dtype)

    def scaled(self, value: tf.Tensor) -> tf.Tensor:
        """A loss or a gradient, any shape, times the loss scale, where the precision needs one."""
        return self._optimizer.scale_loss(value)

    def unscaled(self, gradients: Gradients) -> list[tf.Tensor]:
        """Gradients divided by the loss scale, of the weights' shapes and dtypes, with zeros for None."""
        dense = [
            tf.zeros_like(value) if gradient is None else gradient
            for gradient, value in zip(gradients, self._values, strict=True)
        ]
        scale = keras_model.loss_scale(self._optimizer)
        if scale is None:
            return dense
        return [gradient / tf.cast(scale, gradient.dtype) for gradient in dense]


def _replica_variable(shape: Any, dtype: tf.DType) -> tf.Variable:
    """A variable of zeros that each replica assigns for itself."""
    return tf.Variable(
        tf.zeros(shape, dtype),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.NONE,
    )


def _require_unconditional(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses optimizer options that update in some steps only, where TensorFlow cannot.

    Raises:
        SpecError: The optimizer has one, in the scope of a strategy that updates weights by `merge_call`.
    """
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for option in ("ema_overwrite_frequency", "gradient_accumulation_steps"):
        if getattr(inner, option):
            raise SpecError(
                f"optimizer.custom: {option}: Keras then updates weights within a condition, where"
                " TensorFlow's strategies (mirrored, multi-worker) allow no update. Leave it out"
                " (`gradient_accumulation_steps` accumulates gradients), or use another"
                " backend, such as horovod-tf."
            )
