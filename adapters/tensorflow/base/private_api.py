"""Private APIs of TensorFlow that isotrain uses, each with a probe; no other module uses any."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.common.private_api import PrivateApiProbe, require
from isotrain.adapters.tensorflow.build_info import is_cuda_build


def copies(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """The copies of a variable, any shape, on the replicas of this process."""
    return getattr(variable, "values", (variable,))


def _probe_copies() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        mirrored = tf.Variable(1.0)
    (copy,) = copies(mirrored)
    require(copy is not mirrored, "each replica has a variable of its own")
    copy.assign(2.0)
    require(float(tf.identity(mirrored)) == 2.0, "a mirrored variable has the value of its copies")


def keras_layers_of(module: tf.Module) -> list[keras.Layer]:
    """The Keras layers that a module holds."""
    return list(module._flatten(predicate=lambda part: isinstance(part, keras.Layer)))


def _probe_layers() -> None:
    module: Any = tf.Module()
    module.held = {"some": [keras.layers.Dense(1)]}
    require(
        keras_layers_of(module) == module.held["some"],
        "Module._flatten returns the layers of a module",
    )


def generators_of(model: Any) -> dict[str, tf.Variable]:
    """States, int64 vectors, of the `tf.random.Generator`s that a tf.Module holds, by name `tf-NUMBER`."""
    if isinstance(model, keras.Layer):
        return {}
    generators = model._flatten(predicate=lambda part: isinstance(part, tf.random.Generator))
    return {f"tf-{number}": generator.state for number, generator in enumerate(generators)}


def _probe_generators() -> None:
    module: Any = tf.Module()
    module.held = [tf.random.Generator.from_seed(1)]
    states = generators_of(module)
    require(
        states["tf-0"] is module.held[0].state, "Module._flatten returns the generators of a module"
    )


def _probe_build_info() -> None:
    require(
        is_cuda_build() == tf.test.is_built_with_cuda(),
        "build_info.py says whether it is a CUDA build",
    )


def is_of_function(graph: Any) -> bool:
    """Whether a graph is that of a `tf.function`, and not of a branch or a loop."""
    return type(graph) is tf.__internal__.FuncGraph


def _probe_graphs() -> None:
    seen = []

    def note(number: tf.Tensor) -> tf.Tensor:
        seen.append(is_of_function(tf.compat.v1.get_default_graph()))
        return number + 1

    def trace() -> None:
        note(tf.constant(0))
        number = tf.random.uniform((), maxval=2, dtype=tf.int32)
        tf.cond(number > 0, lambda: note(number), lambda: number)
        tf.while_loop(lambda each: each < 1, note, (number,))

    tf.function(trace, autograph=False).get_concrete_function()
    require(
        seen == [True, False, False],
        "FuncGraph is the graph of functions, not of branches and loops",
    )


def function_class() -> type[Any]:
    """The class of what `tf.function` returns."""
    return type(tf.function(lambda: None))


def without_xla(function: Any) -> Any:
    """Another `tf.function` with the Python function and the options of one, which XLA does not compile.

    It has graphs of its own.
    """
    other = function._clone(None)
    other._jit_compile = None
    return other


def _probe_without_xla() -> None:
    traced = []

    @tf.function(jit_compile=True)
    def count(number: tf.Tensor) -> tf.Tensor:
        traced.append(number)
        tf.numpy_function(lambda: None, [], [])  # XLA cannot compile it
        return number + 1

    other = without_xla(count)
    require(isinstance(other, function_class()), "a tf.function has a clone")
    require(int(other(tf.constant(1))) == 2, "the clone computes the same, without XLA")
    require(count.experimental_get_tracing_count() == 0, "the clone has graphs of its own")


UNINITIALIZED = "isotrain-without-value-"
"""Begin of the names in errors that say that a variable without a value is read."""
_numbers = itertools.count()


def uninitialized_variable(shape: tf.TensorShape, dtype: tf.DType, **options: Any) -> tf.Variable:
    """A variable that has no value, and takes no memory for one, until it is assigned one.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        options: Further arguments of `tf.Variable`, as variable creators get them.
    """
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

    variable = UninitializedVariable(shape=shape, dtype=dtype, **options)
    drop_value(variable)  # it would be read as an empty tensor, without an error
    return variable


def drop_value(variable: tf.Variable) -> None:
    """Takes the value of a variable away; what reads it raises an error that has `UNINITIALIZED`."""
    name = f"{UNINITIALIZED}{next(_numbers)}"
    before = variable.handle
    with tf.init_scope(), tf.device(before.device):
        handle = tf.raw_ops.VarHandleOp(
            shape=variable.shape, dtype=variable.dtype, shared_name=name
        )
    for attribute in ("_handle_data", "_parent_trackable", "_name", "_unique_id"):
        setattr(handle, attribute, getattr(before, attribute))
    variable._handle = handle


def _probe_uninitialized() -> None:
    variable = uninitialized_variable(tf.TensorShape([2, 3]), tf.float32, name="empty")
    dropped = tf.Variable(tf.zeros((2, 3)))
    drop_value(dropped)
    for each in (variable, dropped):
        graph = tf.function(lambda: each + 1.0, autograph=False).get_concrete_function().graph  # noqa: B023
        require(graph.structured_outputs.shape == (2, 3), "functions of variables can be traced")
        require(any(handle is each.handle for handle, _ in graph.captures), "captured handles")
        message = ""
        try:
            tf.identity(each)
        except tf.errors.FailedPreconditionError as error:
            message = str(error)
        require(UNINITIALIZED in message, "an error that names what has no value")


_HEARTBEAT_TIMEOUT_MS = 30 * 24 * 3600 * 1000


def disable_heartbeat_timeout(workers: int) -> None:
    """Lets workers be silent for a month, before the strategy is made: isotrain watches them itself.

    TensorFlow's limit of 10 s goes by the wall clock: a step of it, or a pause of the whole machine, would
    end every run. A connection that breaks is noticed at once all the same.
    """
    from tensorflow.python.eager import context

    eager_context = context.context()
    if eager_context.coordination_service is None:  # else an earlier strategy has configured it
        messages = context.coordination_config_pb2  # in another package from TensorFlow 2.19 on
        jobs = [messages.CoordinatedJob(name="worker", num_tasks=workers)]
        eager_context.configure_coordination_service(
            service_type="standalone",
            service_leader="/job:worker/replica:0/task:0",
            heartbeat_timeout_in_ms=_HEARTBEAT_TIMEOUT_MS,
            coordinated_jobs=jobs,
        )


def _probe_heartbeat_timeout() -> None:
    from tensorflow.python.eager.context import Context

    parameters = inspect.signature(Context.configure_coordination_service).parameters
    needed = {"service_type", "service_leader", "heartbeat_timeout_in_ms", "coordinated_jobs"}
    require(needed <= parameters.keys(), "the heartbeat timeout of workers can be set")
    require(
        hasattr(Context, "coordination_service"), "the context tells whether the timeout is set"
    )


PROBES = (
    PrivateApiProbe(
        "eager.context.Context.configure_coordination_service", _probe_heartbeat_timeout
    ),
    PrivateApiProbe("DistributedVariable.values", _probe_copies),
    PrivateApiProbe("Module._flatten", _probe_layers),
    PrivateApiProbe("Module._flatten of generators", _probe_generators),
    PrivateApiProbe("platform/build_info.py", _probe_build_info),
    PrivateApiProbe("__internal__.FuncGraph", _probe_graphs),
    PrivateApiProbe("Function._clone", _probe_without_xla),
    PrivateApiProbe("ops.resource_variable_ops.UninitializedVariable", _probe_uninitialized),
)
