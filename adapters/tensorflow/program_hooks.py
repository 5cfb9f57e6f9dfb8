"""Hooks in Keras that record a program on TensorFlow which is not isotrain's: passes, steps, clipping.

A hook may be called while a graph is made, whose tensors have no values. What it then reads is recorded each
time that the graph runs, so everything that it keeps until then is in `_Replica`, and what it knows while the
graph is made is in the function that receives the values. Each replica of a `tf.distribute` strategy has a
trace of its own.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections import defaultdict
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
from isotrain.adapters.tensorflow.program_graphs import GraphHooks, read, read_if

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
    graphs = GraphHooks(hooks.is_recording)

    def seen(hook: Callable[..., None]) -> Callable[..., None]:
        """The hook, which is not called where values never come, as while a model is built."""

        @tf.autograph.experimental.do_not_convert
        @functools.wraps(hook)
        def called(*args: Any, **kwargs: Any) -> None:
            if graphs.is_seen():
                hook(*args, **kwargs)

        return called

    call_before(keras.Layer, "__call__", seen(hooks.enter))
    _call_finally(keras.Layer, "__call__", seen(hooks.leave))
    call_before(tf.GradientTape, "__enter__", seen(lambda *_: hooks.count_tape(1)))
    call_before(tf.GradientTape, "__exit__", seen(lambda *_: hooks.count_tape(-1)))
    call_before(tf.GradientTape, "gradient", seen(hooks.backward))
    call_after(tf, "clip_by_global_norm", seen(hooks.clipped))
    optimizer = keras.optimizers.Optimizer
    call_before(optimizer, "build", hooks.build)
    call_before(optimizer, "apply", seen(hooks.before_step))
    call_after(optimizer, "apply", seen(hooks.after_step))
    call_before(optimizer, "_clip_gradients", seen(hooks.clips))
    call_after(optimizer, "_all_reduce_sum_gradients", seen(hooks.reduced))


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
    """Models, optimizers and open facts of a replica.

    Attributes:
        named: The weights of the step that is being recorded, or whose graph is being made.
        facts: What is known of the step that runs, by the optimizer's index.
    """

    def __init__(self, recorder: ProgramRecorder) -> None:
        self.recorder = recorder
        self.depth = 0
        self.tapes = 0
        self.models: list[keras.Layer] = []
        self.optimizers: list[keras.optimizers.Optimizer] = []
        self.named: dict[str, Any] = {}
        self.facts: dict[int, dict[str, Any]] = defaultdict(dict)
        self.with_initial: set[int] = set()
        self.host_random: dict[str, int] = {}

    def weights(self) -> dict[str, keras.Variable]:
        """Trainable weights of all models that were called, by path."""
        return {weight.path: weight for model in self.models for weight in model.trainable_weights}

    def state(self) -> dict[str, keras.Variable]:
        """Weights that are not trained of all models that were called, by path."""
        return {
            weight.path: weight for model in self.models for weight in model.non_trainable_weights
        }

    def event(self, kind: str, **facts: Any) -> None:
        """Notes an event, if steps are recorded while it happens."""
        if self.recorder.is_recording:
            self.recorder.event(kind, **facts)


class _Hooks:
    """The functions that Keras calls, in the thread of each replica."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder
        self._replicas: dict[int | None, _Replica] = {}
        self._variables: dict[int, list[Any]] = {}
        self._horovod: Any = None
        self._compresses = False

    def is_recording(self) -> bool:
        """Whether steps of a replica are recorded."""
        recorders = [replica.recorder for replica in self._replicas.values()] or [self._recorder]
        return any(recorder.is_recording for recorder in recorders)

    def _replica(self) -> _Replica:
        """The replica that computes; that of this process outside of replicas."""
        context = tf.distribute.get_replica_context()
        is_one_of_several = context is not None and context.num_replicas_in_sync > 1
        index = _index(context) if is_one_of_several else None
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
        facts = {
            "training": bool(kwargs.get("training")),
            "gradients": replica.tapes > 0,
            "dropout": any(map(keras_private.draws_random_numbers, layers)),
            "batch_norm": any(isinstance(e, keras.layers.BatchNormalization) for e in layers),
            "autocast": layer.compute_dtype != layer.variable_dtype,
            "wrapper": type(layer).__name__,
            "host_random": draws_since(replica.host_random),
        }
        channels_last = keras.config.image_data_format() == "channels_last"

        def record(values: Any) -> None:
            batch, states = values
            if replica.recorder.is_recording:
                rows = replica.recorder.rows(batch, channels_last=channels_last)
                replica.event("forward", rows=rows, random={"keras": _checksum(states)}, **facts)

        read((tensors, _random_states(layer)), record)

    def backward(self, tape: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        """Records the loss that is differentiated."""
        self._hook_horovod()
        replica, context = self._replica(), tf.distribute.get_replica_context()
        losses = [each for each in tf.nest.flatten(target) if _has_value(each)]
        if replica.recorder.is_recording and losses and losses[0].shape.rank == 0:
            replicas = 1 if context is None else context.num_replicas_in_sync  # losses are summed
            read(losses[0], lambda loss: replica.event("backward", loss=float(loss) * replicas))

    def clips(self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]) -> None:
        """Records the norm before an optimizer clips, and its limit."""
        options = optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue
        limits = [each for each in options if each]
        tensors = [each for each in gradients if each is not None]
        replica = self._replica()
        if limits and replica.recorder.is_recording and all(map(_has_value, tensors)):
            self._record_clip(replica, tf.linalg.global_norm(tensors), limits[0])

    def clipped(
        self, result: Any, t_list: Sequence[Any], clip_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Records the norm that `tf.clip_by_global_norm` has computed or was given, and its limit."""
        replica = self._replica()
        if replica.recorder.is_recording:
            self._record_clip(replica, result[1], clip_norm)

    def _record_clip(self, replica: _Replica, norm: Any, limit: Any) -> None:
        read(
            (norm, limit),
            lambda read: replica.event("clip", norm=float(read[0]), limit=float(read[1])),
        )

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
        if optimizer not in replica.optimizers:
            replica.optimizers.append(optimizer)
        index = replica.optimizers.index(optimizer)
        replica.named = {}
        if not replica.recorder.wants(index):
            return
        is_read_again = isinstance(trainable_variables, list | tuple)
        variables = trainable_variables if is_read_again else self._variables[id(optimizer)]
        named = replica.named = {_name(variable): variable for variable in variables}
        group = _group(optimizer, named)
        untrained = sorted(set(replica.weights()) - set(named))
        rank = _rank()

        def record_options(rate: np.ndarray) -> None:
            options = {**group["options"], "lr": float(rate)}
            replica.facts[index]["groups"] = [{**group, "options": options}]

        def is_first() -> bool:
            return index not in replica.with_initial

        def record_initial(values: Any) -> None:
            weights, state = values
            replica.with_initial.add(index)
            replica.recorder.set_rank(*rank)
            facts = replica.recorder.start(weights, state)
            replica.facts[index] |= {**facts, "untrained": untrained}

        read(optimizer.learning_rate, record_options)
        read_if(is_first, (named, replica.state()), record_initial)

    def reduced(
        self,
        pairs: Sequence[tuple[Any, Any]],
        optimizer: keras.optimizers.Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Reads the gradients that the optimizer gets, after the sum over replicas."""
        replica = self._replica()
        if not replica.named:
            return
        index = replica.optimizers.index(optimizer)
        names = {id(_native(variable)): name for name, variable in replica.named.items()}

        def record(values: Any) -> None:
            if replica.recorder.wants(index):
                replica.facts[index]["gradient"] = replica.recorder.fingerprints(values[0])

        read([{names[id(v)]: each for each, v in pairs if each is not None}], record)

    def after_step(
        self, result: Any, optimizer: keras.optimizers.Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        """Reads weights and state, and ends the record of the step."""
        replica = self._replica()
        named, replica.named = replica.named, {}
        if not named:
            return
        index = replica.optimizers.index(optimizer)
        slots = {
            _state_name(variable.path, optimizer.name, named): variable
            for variable in _variables(optimizer)
            if not variable.path.endswith("/learning_rate")
        }

        def record(values: Any) -> None:
            if "gradient" not in replica.facts[index]:  # it has accumulated gradients
                return
            facts = replica.facts.pop(index)
            if replica.recorder.wants(index):
                kinds = ("weight", "optimizer_state", "state")
                prints = map(replica.recorder.fingerprints, values)
                facts |= {"compressed": self._compresses, **dict(zip(kinds, prints, strict=True))}
                replica.recorder.step(index, facts)

        read([named, slots, replica.state()], record)


def _rank() -> tuple[int, int]:
    """This replica's index and the number of replicas, as Horovod or `tf.distribute` has them."""
    horovod = sys.modules.get("horovod.tensorflow")
    if horovod is not None and horovod.is_initialized():
        return horovod.rank(), horovod.size()
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0, 1
    return _index(context), context.num_replicas_in_sync


def _index(context: tf.distribute.ReplicaContext) -> int:
    index = tf.convert_to_tensor(context.replica_id_in_sync_group)
    return int(tf.get_static_value(index))


def _variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The optimizer's state; the property of one that Horovod has wrapped fails with Keras 3."""
    variables: list[Any] = keras.optimizers.Optimizer.variables.fget(optimizer)
    return variables


def _native(variable: Any) -> tf.Variable:
    """TensorFlow's variable of one of Keras, or itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _name(variable: Any) -> str:
    return getattr(variable, "path", variable.name)


def _group(optimizer: keras.optimizers.Optimizer, named: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's options but the learning rate, and the names of its weights."""
    with tf.init_scope():  # it reads a variable
        config = optimizer.get_config()
    options = {k: v for k, v in config.items() if isinstance(v, int | float)}
    options.pop("learning_rate", None)  # that of the first step
    dtype = next(tf.as_dtype(variable.dtype).name for variable in named.values())
    return {
        "optimizer": type(optimizer).__name__,
        "dtype": dtype,
        "names": list(named),
        "options": options,
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


def _random_states(layer: keras.Layer) -> list[keras.Variable]:
    """The states of a model's seed generators."""
    variables = layer.non_trainable_variables
    return [each for each in variables if each.path.endswith("seed_generator_state")]


def _checksum(states: Iterable[np.ndarray]) -> int:
    """CRC-32 of the states of seed generators."""
    return functools.reduce(lambda crc, state: zlib.crc32(state.tobytes(), crc), states, 0)


def _is_batch(value: Any) -> bool:
    """Whether it is an array, or a tensor that has or will have values, with an axis of samples."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return _has_value(value) and value.shape.rank != 0


def _has_value(value: Any) -> bool:
    """Whether it is a tensor with values, all or some rows, or of the graph that is being made."""
    rows = value.values if isinstance(value, tf.IndexedSlices) else value
    return tf.is_tensor(rows) and (not tf.executing_eagerly() or hasattr(rows, "numpy"))
