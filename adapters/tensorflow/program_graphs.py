"""Values of tensors of a program that is not isotrain's: at once, or out of the graphs of its functions."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from isotrain.adapters.common.program_hooks import safe
from isotrain.adapters.tensorflow.base import private_api

Receive = Callable[[Any], None]


class GraphHooks:
    """Lets each function of TensorFlow have graphs with hooks, as long as steps are recorded.

    A function then runs graphs of another one, which XLA does not compile: it cannot call Python. So a
    function's own graphs are those that it has without hooks, and made after the last recorded step.
    """

    def __init__(self, is_recording: Callable[[], bool]) -> None:
        """Hooks calls of all functions of this process.

        Args:
            is_recording: Whether steps are recorded.
        """
        self._is_recording = is_recording
        self._calls = 0
        self._hooked: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._hook(private_api.function_class())

    def is_seen(self) -> bool:
        """Whether values are there, or come when the graph runs that is being made."""
        return tf.executing_eagerly() or self._calls > 0

    def _hook(self, functions: type[Any]) -> None:
        call = functions.__call__

        @functools.wraps(call)
        def called(function: Any, *args: Any, **kwargs: Any) -> Any:
            # graphs that the program makes itself may be saved, or run by other threads: they get no hooks
            is_hooked = type(function) is functions and self.is_seen() and self._is_recording()
            if not is_hooked:
                return call(function, *args, **kwargs)
            if function not in self._hooked:
                self._hooked[function] = private_api.without_xla(function)
            self._calls += 1
            try:
                return call(self._hooked[function], *args, **kwargs)
            finally:
                self._calls -= 1

        functions.__call__ = called


def read(tensors: Any, receive: Receive) -> None:
    """Gives arrays of tensors to a function: now, or each time that the graph runs which is being made.

    Calls in a graph are in the order in which they were made, also in its branches and nested functions.

    Args:
        tensors: Nested tensors, variables and arrays; 16-bit floats arrive as float32.
        receive: Takes them. Its errors are printed, and do not reach the program.
    """
    flat = [*map(_plain, tf.nest.flatten(tensors))]
    shape = tf.nest.map_structure(lambda _: 0, tensors)  # the graph would keep tensors

    def received(*arrays: np.ndarray) -> None:
        safe(receive)(tf.nest.pack_sequence_as(shape, [*map(np.asarray, arrays)]))

    if tf.executing_eagerly():
        received(*flat)
    else:
        _call_in_order(received, flat, [])


def _call_in_order(function: Callable[..., Any], tensors: Sequence[tf.Tensor], types: Any) -> Any:
    """Adds a call of Python to the graph that is being made, after all calls that were added before.

    TensorFlow orders operations on one resource, and lets branches and nested functions take part in that.
    Other stateful operations, as calls of Python are, it orders only among themselves in each graph.
    """
    with tf.control_dependencies([_count(0)]):
        result = tf.numpy_function(function, tensors, types)
    with tf.control_dependencies([result]):
        _count(1)
    return result


def _count(calls: int) -> Any:
    calls = tf.constant(calls, tf.int64)
    return tf.raw_ops.AssignAddVariableOp(resource=_counter(), value=calls)


@functools.cache
def _counter() -> tf.Tensor:
    """The resource that orders calls; a `tf.Variable` would be one of the program's strategy."""
    with tf.init_scope(), tf.device("CPU:0"):
        counter = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=(), shared_name="isotrain_trace")
        tf.raw_ops.AssignVariableOp(resource=counter, value=tf.constant(0, tf.int64))
    return counter


def read_if(condition: Callable[[], bool], tensors: Any, receive: Receive) -> None:
    """Does as `read` if a condition holds, which is asked whenever the graph runs; else reads no tensors."""
    if tf.executing_eagerly():
        if condition():
            read(tensors, receive)
        return

    def branch() -> tf.Tensor:
        read(tensors, receive)
        return tf.constant(0)

    holds = _call_in_order(lambda: np.bool_(condition()), [], tf.bool)
    holds.set_shape(())
    tf.cond(holds, branch, lambda: tf.constant(0))


def _plain(value: Any) -> tf.Tensor:
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor
