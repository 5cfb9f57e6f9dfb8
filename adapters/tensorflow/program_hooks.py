"""Hooks in Keras that record a program on TensorFlow which is not isotrain's: passes, steps, clipping.

Functions of TensorFlow run eagerly until the steps are recorded: tensors of a graph have no values. Each
replica of a `tf.distribute` strategy has a trace of its own.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from isotrain.adapters.common.program_hooks import (
    call_after,
    call_before,
    draws_since,
    host_random_states,
    safe,
)
from isotrain.adapters.keras import private as keras_private

if TYPE_CHECKING:
    from isotrain.plugin import ProgramRecorder

_BACKEND = "tensorflow"


def install(recorder: ProgramRecorder) -> None:
    """Hooks layers, gradient tapes, optimizers and clipping of this process."""
    if keras.backend.backend() != _BACKEND:
        backend = keras.backend.backend()
        print(f"isotrain trace: Keras on {backend} is not recorded.", file=sys.stderr, flush=True)
        return
    hooks = _Hooks(recorder)
    tf.config.run_functions_eagerly(True)
    tf.config.run_functions_eagerly = hooks.choose
    call_before(keras.Layer, "__call__", _eagerly(hooks.enter))
    _call_finally(keras.Layer, "__call__", _eagerly(hooks.leave))
    call_before(tf.GradientTape, "__enter__", _eagerly(lambda *_: hooks.count_tape(1)))
    call_before(tf.GradientTape, "__exit__", _eagerly(lambda *_: hooks.count_tape(-1)))
    call_before(tf.GradientTape, "gradient", _eagerly(hooks.backward))
    call_after(tf, "clip_by_global_norm", _eagerly(hooks.clipped))
    optimizer = keras.optimizers.Optimizer
    call_before(optimizer, "build", hooks.build)
    call_before(optimizer, "apply", _eagerly(hooks.before_step))
    call_after(optimizer, "apply", _eagerly(hooks.after_step))
    call_before(optimizer, "_clip_gradients", _eagerly(hooks.clips))
    call_after(optimizer, "_all_reduce_sum_gradients", _eagerly(hooks.reduced))


def _eagerly(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, which is not called while a graph is made."""

    @functools.wraps(hook)
    def called_eagerly(*args: Any, **kwargs: Any) -> None:
        if tf.executing_eagerly():
            hook(*args, **kwargs)

    return called_eagerly


def _call_finally(owner: type, name: str, hook: Callable[..., None]) -> None:
    """Lets a method tell a hook how it ends: its result, or None for an error."""
    method, leave = getattr(owner, name), safe(hook)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = None
        try:
            result = method(*args, **kwargs)
            return result
        finally:
            leave(result, *args, **kwargs)

    setattr(owner, name, wrapped)


class _Replica:
    """Models, optimizers and open facts of a replica."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self.recorder = recorder
        self.depth = 0
        self.tapes = 0
        self.models: list[keras.Layer] = []
        self.optimizers: list[keras.optimizers.Optimizer] = []
        self.facts: dict[str, Any] = {}
        self.host_random: dict[str, int] = {}

    def weights(self) -> dict[str, keras.Variable]:
        """Trainable weights of all models that were called, by path."""
        return {weight.path: weight for model in self.models for weight in model.trainable_weights}

    def state(self) -> dict[str, keras.Variable]:
        """Weights that are not trained of all models that were called, by path."""
        return {
            weight.path: weight for model in self.models for weight in model.non_trainable_weights
        }

    def fingerprints(self, values: Mapping[str, Any]) -> dict[str, list[Any]]:
        return self.recorder.fingerprints(_arrays(values))


class _Hooks:
    """The functions that Keras calls, in the thread of each replica."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder
        self._replicas: dict[int | None, _Replica] = {}
        self._variables: dict[int, list[Any]] = {}
        self._runs_eagerly = tf.config.functions_run_eagerly()
        self._run_eagerly = tf.config.run_functions_eagerly
        self._horovod: Any = None
        self._compresses = False

    def choose(self, run_eagerly: bool) -> None:
        """Replaces `tf.config.run_functions_eagerly`: the choice waits for the last recorded step."""
        self._runs_eagerly = run_eagerly
        if not self._is_recording():
            self._run_eagerly(run_eagerly)

    def _is_recording(self) -> bool:
        recorders = [replica.recorder for replica in self._replicas.values()] or [self._recorder]
        return any(recorder.is_recording for recorder in recorders)

    def _replica(self) -> _Replica:
        """The replica that computes; that of this process outside of replicas."""
        context = tf.distribute.get_replica_context()
        is_one_of_several = context is not None and context.num_replicas_in_sync > 1
        index = int(context.replica_id_in_sync_group) if is_one_of_several else None
        if index in self._replicas:
            return self._replicas[index]
        if not self._replicas:
            self._replicas[index] = _Replica(self._recorder)
        elif index is None:
            return next(iter(self._replicas.values()))
        elif None in self._replicas:
            self._replicas[index] = self._replicas.pop(None)
        else:
            self._replicas[index] = _Replica(self._recorder.of_another_replica())
        return self._replicas[index]

    def enter(self, layer: keras.Layer, *args: Any, **kwargs: Any) -> None:
        """Counts how deep the calls of layers are."""
        replica = self._replica()
        replica.depth += 1
        if replica.depth == 1 and replica.recorder.is_recording:
            replica.host_random = host_random_states()

    def count_tape(self, change: int) -> None:
        """Counts the gradient tapes that record."""
        self._replica().tapes += change

    def leave(self, result: Any, layer: keras.Layer, *args: Any, **kwargs: Any) -> None:
        """Records a forward pass of an outermost layer: its samples and its mode."""
        replica = self._replica()
        replica.depth -= 1
        if replica.depth or not replica.recorder.is_recording or not layer.trainable_weights:
            return
        tensors = [each for each in tf.nest.flatten((args, kwargs)) if _is_batch(each)]
        if not tensors or not all(map(_has_value, tf.nest.flatten(result))):
            return  # the pass has raised, or builds a model
        known = replica.weights()
        if not any(weight.path in known for weight in layer.trainable_weights):
            replica.models.append(layer)
        layers = keras_private.layers_of(layer)
        replica.recorder.event(
            "forward",
            rows=replica.recorder.rows(
                [_array(each) for each in tensors],
                channels_last=keras.config.image_data_format() == "channels_last",
            ),
            training=bool(kwargs.get("training")),
            gradients=replica.tapes > 0,
            dropout=any(map(keras_private.draws_random_numbers, layers)),
            batch_norm=any(isinstance(e, keras.layers.BatchNormalization) for e in layers),
            autocast=layer.compute_dtype != layer.variable_dtype,
            wrapper=type(layer).__name__,
            random={"keras": _random_state(layer)},
            host_random=draws_since(replica.host_random),
        )

    def backward(self, tape: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        """Records the loss that is differentiated."""
        self._hook_horovod()
        recorder, context = self._replica().recorder, tf.distribute.get_replica_context()
        losses = [each for each in tf.nest.flatten(target) if _has_value(each)]
        if recorder.is_recording and losses and not losses[0].shape.rank:
            replicas = 1 if context is None else context.num_replicas_in_sync
            recorder.event("backward", loss=float(losses[0]) * replicas)  # losses are summed

    def clips(self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]) -> None:
        """Records the norm before an optimizer clips, and its limit."""
        options = optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue
        limits = [each for each in options if each]
        tensors = [each for each in gradients if each is not None]
        recorder = self._replica().recorder
        if limits and recorder.is_recording and all(map(_has_value, tensors)):
            norm = float(np.sqrt(sum(np.sum(np.square(_array(each))) for each in tensors)))
            recorder.event("clip", norm=norm, limit=float(limits[0]))

    def clipped(
        self, result: Any, t_list: Sequence[Any], clip_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Records the norm that `tf.clip_by_global_norm` has computed or was given, and its limit."""
        recorder = self._replica().recorder
        if recorder.is_recording:
            recorder.event("clip", norm=float(result[1]), limit=float(clip_norm))

    def _hook_horovod(self) -> None:
        """Hooks the 16-bit compression of Horovod, which a program may import after Keras."""
        horovod = sys.modules.get("horovod.tensorflow")
        if horovod is not None and horovod is not self._horovod:
            self._horovod = horovod
            call_before(horovod.Compression.fp16, "compress", self.compress)

    def compress(self, tensor: Any) -> None:
        """Keeps that gradients are exchanged in 16 bits."""
        self._compresses = True

    def build(self, optimizer: keras.optimizers.Optimizer, variables: Iterable[Any]) -> None:
        """Keeps the variables of an optimizer, which steps need not name again."""
        self._variables[id(optimizer)] = list(variables)

    def before_step(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: Any,
        trainable_variables: Any = None,
    ) -> None:
        """Reads options and, before the first step, weights."""
        replica = self._replica()
        is_first = optimizer not in replica.optimizers
        if is_first:
            replica.optimizers.append(optimizer)
        replica.facts = {}
        if not replica.recorder.wants(replica.optimizers.index(optimizer)):
            return
        is_read_again = isinstance(trainable_variables, list | tuple)
        variables = trainable_variables if is_read_again else self._variables[id(optimizer)]
        named = {_name(variable): variable for variable in variables}
        replica.facts = {"groups": [_group(optimizer, named)], "variables": named}
        if is_first:
            replica.recorder.set_rank(*_rank())
            replica.facts |= replica.recorder.start(_arrays(named), _arrays(replica.state()))
            replica.facts["untrained"] = sorted(set(replica.weights()) - set(named))

    def reduced(
        self,
        pairs: Sequence[tuple[Any, Any]],
        optimizer: keras.optimizers.Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Reads the gradients that the optimizer gets, after the sum over replicas."""
        replica = self._replica()
        if not replica.facts:
            return
        names = {id(getattr(v, "value", v)): name for name, v in replica.facts["variables"].items()}
        replica.facts["gradient"] = replica.fingerprints(
            {names[id(variable)]: grad for grad, variable in pairs if grad is not None}
        )

    def after_step(
        self, result: Any, optimizer: keras.optimizers.Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        """Reads weights and state, and ends the record of the step."""
        replica = self._replica()
        facts, replica.facts = replica.facts, {}
        if "gradient" not in facts:  # it has accumulated gradients
            return
        named = facts.pop("variables")
        slots = {
            _state_name(variable.path, optimizer.name, named): variable
            for variable in _variables(optimizer)
            if not variable.path.endswith("/learning_rate")
        }
        replica.recorder.step(
            replica.optimizers.index(optimizer),
            {
                **facts,
                "compressed": self._compresses,
                "weight": replica.fingerprints(named),
                "optimizer_state": replica.fingerprints(slots),
                "state": replica.fingerprints(replica.state()),
            },
        )
        if not self._is_recording():
            self._run_eagerly(self._runs_eagerly)


def _rank() -> tuple[int, int]:
    """This replica's index and the number of replicas, as Horovod or `tf.distribute` has them."""
    horovod = sys.modules.get("horovod.tensorflow")
    if horovod is not None and horovod.is_initialized():
        return horovod.rank(), horovod.size()
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0, 1
    return int(context.replica_id_in_sync_group), context.num_replicas_in_sync


def _variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The optimizer's state; the property of one that Horovod has wrapped fails with Keras 3."""
    variables: list[Any] = keras.optimizers.Optimizer.variables.fget(optimizer)
    return variables


def _name(variable: Any) -> str:
    return getattr(variable, "path", variable.name)


def _group(optimizer: keras.optimizers.Optimizer, named: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's options, and the names of its weights."""
    options = {k: v for k, v in optimizer.get_config().items() if isinstance(v, int | float)}
    options.pop("learning_rate", None)  # that of the first step
    dtype = next(tf.as_dtype(variable.dtype).name for variable in named.values())
    return {
        "optimizer": type(optimizer).__name__,
        "dtype": dtype,
        "names": list(named),
        "options": {**options, "lr": float(_array(optimizer.learning_rate))},
    }


def _state_name(path: str, optimizer: str, named: Mapping[str, Any]) -> str:
    """The name of optimizer state: `WEIGHT/SLOT`, or `OPTIMIZER/step` for the number of steps."""
    slot = path.removeprefix(f"{optimizer}/")
    if slot == "iteration":
        return f"{optimizer}/step"
    for name in sorted(named, key=len, reverse=True):
        flat = name.replace("/", "_") + "_"
        if slot.startswith(flat):
            return f"{name}/{slot.removeprefix(flat)}"
    return path


def _random_state(layer: keras.Layer) -> int:
    """CRC-32 of the states of a model's seed generators."""
    crc = 0
    for variable in layer.non_trainable_variables:
        if variable.path.endswith("seed_generator_state"):
            crc = zlib.crc32(_array(variable).tobytes(), crc)
    return crc


def _is_batch(value: Any) -> bool:
    """Whether it is an array or a tensor with values and an axis of samples."""
    return (isinstance(value, np.ndarray) or _has_value(value)) and len(value.shape) > 0


def _has_value(value: Any) -> bool:
    return tf.is_tensor(value) and hasattr(value, "numpy")


def _arrays(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: _array(value) for name, value in values.items()}


def _array(value: Any) -> np.ndarray:
    """The values of a tensor or variable; 16-bit floats as float32."""
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype in (tf.float16, tf.bfloat16):
        tensor = tf.cast(tensor, tf.float32)
    return np.asarray(tensor)
