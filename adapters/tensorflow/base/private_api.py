"""The parts of TensorFlow that it does not document and isotrain uses; nothing else touches such parts."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import tensorflow as tf

from isotrain.adapters.common.private_api import PrivateApiProbe, require
from isotrain.adapters.tensorflow.build_info import is_cuda_build


def copies(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """The copies of a variable on the replicas of this process."""
    return getattr(variable, "values", (variable,))


def _has_copies() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        mirrored = tf.Variable(1.0)
    (copy,) = copies(mirrored)
    require(copy is not mirrored, "a variable of its own on each replica")
    copy.assign(2.0)
    require(float(tf.identity(mirrored)) == 2.0, "a mirrored variable has the value of its copies")


def keras_layers_of(module: tf.Module) -> list[keras.Layer]:
    """The Keras layers that a module holds."""
    return list(module._flatten(predicate=lambda part: isinstance(part, keras.Layer)))


def _finds_layers() -> None:
    module: Any = tf.Module()
    module.held = {"some": [keras.layers.Dense(1)]}
    require(keras_layers_of(module) == module.held["some"], "the layers that a module holds")


def generators_of(model: Any) -> dict[str, tf.Variable]:
    """The states of TensorFlow's generators of random numbers that a tf.Module holds, numbered."""
    if isinstance(model, keras.Layer):
        return {}
    held = model._flatten(predicate=lambda part: isinstance(part, tf.random.Generator))
    return {f"tf-{number}": generator.state for number, generator in enumerate(held)}


def _finds_generators() -> None:
    module: Any = tf.Module()
    module.held = [tf.random.Generator.from_seed(1)]
    found = generators_of(module)
    require(found["tf-0"] is module.held[0].state, "the generators that a module holds")


def _knows_the_build() -> None:
    require(is_cuda_build() == tf.test.is_built_with_cuda(), "what build_info.py says of CUDA")


def is_of_function(graph: Any) -> bool:
    """Whether a graph is that of a `tf.function`, and not of a branch or a loop."""
    return type(graph) is tf.__internal__.FuncGraph


def _knows_graphs() -> None:
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
    require(seen == [True, False, False], "functions' graphs from those of branches and loops")


_SILENCE_MS = 30 * 24 * 3600 * 1000


def disable_silence_limit(workers: int) -> None:
    """Lets workers be silent for a month, before the strategy is made: isotrain watches them itself.

    TensorFlow's limit of 10 s goes by the wall clock: a step of it, or a pause of the whole machine, would
    end every run. A connection that breaks is noticed at once all the same.
    """
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.eager import context

    own = context.context()
    if own.coordination_service is None:  # else there was a strategy before: it is as it was then
        jobs = [coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=workers)]
        own.configure_coordination_service(
            service_type="standalone",
            service_leader="/job:worker/replica:0/task:0",
            heartbeat_timeout_in_ms=_SILENCE_MS,
            coordinated_jobs=jobs,
        )


def _has_a_limit_of_silence() -> None:
    from tensorflow.python.eager.context import Context

    parameters = inspect.signature(Context.configure_coordination_service).parameters
    known = {"service_type", "service_leader", "heartbeat_timeout_in_ms", "coordinated_jobs"}
    require(known <= parameters.keys(), "how long workers may be silent")
    require(hasattr(Context, "coordination_service"), "who has said how long that is")


PROBES = (
    PrivateApiProbe(
        "eager.context.Context.configure_coordination_service", _has_a_limit_of_silence
    ),
    PrivateApiProbe("DistributedVariable.values", _has_copies),
    PrivateApiProbe("Module._flatten", _finds_layers),
    PrivateApiProbe("Module._flatten of generators", _finds_generators),
    PrivateApiProbe("platform/build_info.py", _knows_the_build),
    PrivateApiProbe("__internal__.FuncGraph", _knows_graphs),
)
