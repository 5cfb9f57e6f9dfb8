"""Context of a layer's call: training flag, autocast dtype, stateless scope."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope

from isotrain.adapters.common.private_api import PrivateApiProbe, require

_CALL, _AUTOCAST = "current_call_ctx", "autocast_scope"
_SURROUNDINGS = (_CALL, _AUTOCAST)


def is_training() -> bool:
    """Whether the layer being called was called with `training=True`."""
    context = global_state.get_global_attribute(_CALL)
    return context is not None and bool(context.get_value("training"))


def is_stateless() -> bool:
    """Whether a `StatelessScope` is active, which receives assignments instead of the variables."""
    return in_stateless_scope()


def _probe_stateless_scope() -> None:
    require(not is_stateless(), "no scope around all")
    with keras.StatelessScope():
        require(is_stateless(), "a scope")


def call_context() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Captures training flag and autocast dtype of the current call; returns a context that restores them."""
    around = {name: global_state.get_global_attribute(name) for name in _SURROUNDINGS}
    return lambda: _surrounded(around)


@contextlib.contextmanager
def _surrounded(around: Mapping[str, Any]) -> Iterator[None]:
    before = {name: global_state.get_global_attribute(name) for name in around}
    for name, value in around.items():
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def uncast() -> contextlib.AbstractContextManager[None]:
    """Context in which variables are read in their own dtype, also inside a layer in mixed precision."""
    return _surrounded({_AUTOCAST: None})


def autocast_value(variable: keras.Variable, value: Any) -> Any:
    """Casts a variable's value (its shape) as reads do here: to the compute dtype in mixed precision."""
    return variable._maybe_autocast(value)


def _probe_call_context() -> None:
    class Noting(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            with uncast():
                value = self.scale.value
            types = (value, self.scale.value, autocast_value(self.scale, value))
            dtype, cast, read = [keras.backend.standardize_dtype(each.dtype) for each in types]
            require(read == cast, "a value as it is read")
            seen.append((is_training(), dtype, cast))
            self.again = call_context()
            return inputs

    seen: list[tuple[bool, str, str]] = []
    layer = Noting(dtype="mixed_bfloat16")
    layer.scale = layer.add_weight(shape=(), dtype="float32")
    layer.built = True
    keras.Sequential([layer])(keras.ops.ones((1, 2)), training=True)
    around = layer.again
    seen.clear()
    layer.call(keras.ops.ones((1, 2)))
    with around():
        layer.call(keras.ops.ones((1, 2)))
    require(seen[0] == (False, "float32", "float32"), "nothing around a layer that is not called")
    require(seen[1] == (True, "float32", "bfloat16"), "what was around it when it was")


def layer_of_error(text: str) -> str | None:
    """Class name of the layer whose call raised, from the text Keras adds to the message; None without."""
    match = re.search(r"Exception encountered when calling (\w+)\.call\(\)", text)
    return match and match.group(1)


def _probe_layer_of_error() -> None:
    def fail(inputs: Any) -> Any:
        raise ValueError("as meant")

    try:
        keras.layers.Lambda(fail)(keras.ops.ones((1, 2)))
    except ValueError as error:
        require(layer_of_error(str(error)) == "Lambda", "the layer's class in the message")


PROBES = (
    PrivateApiProbe(
        "Layer._get_call_context, AutocastScope and _maybe_autocast", _probe_call_context
    ),
    PrivateApiProbe("backend.common.stateless_scope.in_stateless_scope", _probe_stateless_scope),
    PrivateApiProbe("messages of errors in layers", _probe_layer_of_error),
)
