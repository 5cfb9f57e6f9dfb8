"""How a TensorFlow replica updates its weights: its optimizer, the slots of this, and the rate.

What is called while a `tf.function` is traced concerns the replica that is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.private.optimizers import momentum_of
from isotrain.adapters.tensorflow.base.variables import assign_all, undo_where
from isotrain.adapters.tensorflow.trainer.state import native, slots
from isotrain.plugin import SpecError, TrainingSpec


def update_at_once(optimizer: keras.optimizers.Optimizer) -> None:
    """Has plain SGD with momentum read and write each weight and its slot once, with the same bits.

    On CPUs only: on a GPU one kernel may round a product and the sum that it goes into together.
    """
    if type(optimizer) is not keras.optimizers.SGD or not optimizer.momentum:
        return
    if tf.config.list_logical_devices("GPU"):
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


Gradients = list[tf.Tensor | None]
"""One per trainable weight; None where the loss does not depend on it."""


class WeightUpdate:
    """Turns reduced gradients into new weights.

    Attributes:
        optimizer_lr_schedule: The schedule that the optimizer came with; None where it has none.
        kept: Where `apply` leaves the gradients it was given; empty unless `keep_gradients` was called.
    """

    def __init__(
        self, spec: TrainingSpec, trainable: list[Any], slots_for: list[Any] | None = None
    ) -> None:
        """Makes the optimizer and its slots, in the scope of the `tf.distribute` strategy.

        Args:
            spec: Names the optimizer.
            trainable: The weights.
            slots_for: What stands for them until `shard_optimizer`; left out, nothing does.
        """
        self._spec = spec
        self._trainable = trainable
        self._values = [native(variable) for variable in trainable]
        self._rate: Any = None
        self._slots_elsewhere: set[str] = set()
        self._bound: float | None = None
        self.kept: list[tf.Variable] = []
        self._make_optimizer()
        self._prepare_optimizer(slots_for or trainable)

    def _make_optimizer(self, name: str | None = None) -> None:
        """Makes an optimizer without slots."""
        built = keras_model.build_optimizer(self._spec, "tensorflow", name)
        self._optimizer, self.optimizer_lr_schedule = built
        _require_unconditional(self._optimizer)
        self._rate_variable = self._optimizer.learning_rate
        self._shared_slots = set(self.slots())

    def _prepare_optimizer(self, updated: list[Any]) -> None:
        """Makes the slots, hands over the rate, and takes away the own reduction and the slow update."""
        self._updated = updated
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        self._optimizer.build(self._updated)
        inner.learning_rate = lambda: self._rate
        keras_private.disable_gradient_reduction(inner)
        update_at_once(inner)

    def slots(self) -> dict[str, Any]:
        """The optimizer's variables by name; not traced."""
        return slots(self._optimizer, self._rate_variable)

    def loss_scale(self) -> dict[str, Any]:
        """The variables of the loss scale by name; not traced."""
        return keras_model.loss_scale_variables(self._optimizer)

    @property
    def variables(self) -> list[tf.Variable]:
        """All that the optimizer has, in its order."""
        return [native(variable) for variable in self._optimizer.variables]

    def shard_optimizer(self, places: Sequence[int]) -> None:
        """Updates these of the trainable weights only from now on, and has slots for these; not traced.

        They are made out of the scope of the strategy, whose workers would make equal ones together.
        """
        before = self.slots().keys()
        self._make_optimizer(self._optimizer.name)
        self._prepare_optimizer([self._trainable[place] for place in places])
        self._slots_elsewhere = before - self.slots().keys()
        self._bound, self._optimizer.global_clipnorm = self._optimizer.global_clipnorm, None

    def is_local_slot(self, slot: str) -> bool:
        """Whether an optimizer slot is of a weight that this replica alone updates."""
        own = bool(self._slots_elsewhere) and slot in self.slots()
        return own and slot not in self._shared_slots

    def is_remote_slot(self, slot: str) -> bool:
        """Whether an optimizer slot is of a weight that only another replica updates."""
        return slot in self._slots_elsewhere

    def weight_finalizer(self) -> Callable[[], None] | None:
        """What the optimizer does with the weights when training ends; None: nothing. Not traced."""
        return keras_model.weight_finalizer(self._optimizer, self._updated)

    @contextlib.contextmanager
    def learning_rate(self, rate: tf.Tensor) -> Iterator[None]:
        """Makes the updates that are traced within it use `rate`."""
        self._rate = rate
        try:
            yield
        finally:
            self._rate = None

    def note_learning_rate(self, rate: float) -> None:
        """Shows the rate in the named state; not traced."""
        self._rate_variable.assign(rate)

    def apply(self, gradients: Gradients) -> None:
        """Clips and applies gradients that are already reduced over the replicas."""
        if self.kept:
            assign_all(self.kept, self.unscaled(gradients))
        self._optimizer.apply(gradients, self._updated)

    def apply_shard(self, gradients: Sequence[tf.Tensor], norm: tf.Tensor | None) -> None:
        """Applies reduced gradients of the weights that are updated here, clipped by the norm of all."""
        if norm is not None and self._bound is not None:
            factor = self._bound * tf.minimum(1 / norm, 1 / self._bound)  # as Keras has it
            gradients = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        self._optimizer.apply(gradients, self._updated)

    def apply_unless(self, empty: tf.Tensor, gradients: Gradients) -> None:
        """Applies gradients, and undoes it where `empty` is true."""
        with undo_where(empty, [*self._values, *self.variables]):
            self.apply(gradients)

    def keep_gradients(self, scope: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        """Makes the `apply` that is traced from now on leave its gradients in `kept`; not traced.

        Args:
            scope: The scope of the `tf.distribute` strategy.
        """
        with scope():
            self.kept = [
                tf.Variable(
                    tf.zeros(value.shape, value.dtype),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.NONE,
                )
                for value in self._values
            ]

    def scaled(self, value: tf.Tensor) -> tf.Tensor:
        """A loss or a gradient times the loss scale, where the precision needs one."""
        return self._optimizer.scale_loss(value)

    def unscaled(self, gradients: Gradients) -> list[tf.Tensor]:
        """Takes the loss scale out of gradients, and puts zeros for None."""
        dense = [
            tf.zeros_like(value) if gradient is None else gradient
            for gradient, value in zip(gradients, self._values, strict=True)
        ]
        scale = keras_model.loss_scale(self._optimizer)
        if scale is None:
            return dense
        return [gradient / tf.cast(scale, gradient.dtype) for gradient in dense]


def _require_unconditional(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses options by which an optimizer updates in some steps alone, where TensorFlow cannot.

    Raises:
        SpecError: It has one, in the scope of a strategy that updates weights by `merge_call`.
    """
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for option in ("ema_overwrite_frequency", "gradient_accumulation_steps"):
        if getattr(inner, option):
            raise SpecError(
                f"optimizer.custom: {option}: Keras then updates weights by a condition, in which"
                " TensorFlow's strategies (mirrored, multi-worker) allow no update. Leave it out"
                " (`gradient_accumulation_steps` accumulates gradients), or use another"
                " backend, such as horovod-tf."
            )
