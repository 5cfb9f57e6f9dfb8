"""All-reduce of many gradients by `tf-multiworker`, against TensorFlow's own.

    python -m benchmarks.exchange                        # 400 weights of 1 MiB: 105 M parameters
    python -m benchmarks.exchange --weights 100 --width 64

Both train the same chain of layers in the same processes with the same strategy: one by `session.step`, the
other by `strategy.run` and an optimizer that lets TensorFlow add up the gradients. Steps alternate in an
order drawn anew for every pair. Reported are medians with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import isotrain
from benchmarks import statistics

_RATE = 0.0078125
_LOCAL_BATCH = 8


def chain(weights: int, width: int) -> Any:
    """A module with so many square weights, one layer after the other."""
    import tensorflow as tf

    class Chain(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            start = tf.random.Generator.from_seed(0)
            self.weights = [
                tf.Variable(start.normal((width, width)) / width) for _ in range(weights)
            ]

        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            for weight in self.weights:
                x = x + tf.tanh(x @ weight)
            return x

    return Chain()


def arrays(width: int, replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """One global batch, float32 `[batch, width]`; every replica's slice is another."""
    generator = np.random.default_rng(0)
    shape = (_LOCAL_BATCH * replicas, width)
    inputs, targets = generator.standard_normal((2, *shape)).astype(np.float32)
    return inputs, targets


def measure(session: isotrain.Session, pairs: int) -> dict[str, list[float]]:
    """Times both steps on every process: seconds of each."""
    batches = session.batches()
    by_hand = _step_by_hand(session)
    steps: dict[str, Callable[[], Any]] = {
        "TensorFlow": by_hand,
        "isotrain": lambda: session.step(next(batches)),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = np.random.default_rng(0)
    for number in range(pairs + 1):
        for name in order.permutation(list(steps)):
            session.barrier()
            start = time.perf_counter()
            float(steps[name]())
            session.barrier()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def _step_by_hand(session: isotrain.Session) -> Callable[[], Any]:
    """A step whose gradients TensorFlow adds up, as it does by itself."""
    import keras
    import tensorflow as tf

    strategy = session.group.strategy  # type: ignore[attr-defined]
    given = session.spec.model_args
    with strategy.scope():
        module = chain(**given)
        optimizer = keras.optimizers.SGD(_RATE)
        optimizer.build(module.trainable_variables)
    rows = slice(session.rank * _LOCAL_BATCH, (session.rank + 1) * _LOCAL_BATCH)
    inputs, targets = (tf.constant(a[rows]) for a in arrays(given["width"], session.replicas))

    def replica() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(module(inputs) - targets)) / session.replicas
        optimizer.apply(tape.gradient(loss, module.trainable_variables), module.trainable_variables)
        return loss

    def step() -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(replica), axis=None)

    return tf.function(step)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=int, default=400)
    parser.add_argument("--width", type=int, default=512, help="512: 1 MiB each")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--bucket-bytes", type=int, help="as the backend's option")
    given = parser.parse_args()
    size = {"bucket_bytes": given.bucket_bytes} if given.bucket_bytes else {}
    spec = {
        "model": {"tensorflow": chain},
        "model_args": {"weights": given.weights, "width": given.width},
        "data": arrays,
        "data_args": {"width": given.width, "replicas": given.replicas},
        "loss": {"name": "mean_squared_error"},
        "optimizer": {"name": "sgd", "lr": _RATE},
        "global_batch_size": _LOCAL_BATCH * given.replicas,
        "steps": 10**6,
        "device": "cpu",
        "backend_options": {"tf-multiworker": size},
    }
    with TemporaryDirectory() as folder:
        times = isotrain.launch(
            functools.partial(measure, pairs=given.pairs),
            spec,
            backend="tf-multiworker",
            replicas=given.replicas,
            output=Path(folder) / "run",
            on_event=lambda event: None,
        )[0]
    theirs, ours = (np.array(times[name]) for name in ("TensorFlow", "isotrain"))
    print(
        f"{given.weights} weights of {given.width**2 * 4 / 2**20:.2f} MiB, {given.replicas} replicas:"
        f" TensorFlow's own {np.median(theirs) * 1e3:.1f} ms, isotrain {np.median(ours) * 1e3:.1f} ms;"
        f" TensorFlow's takes {statistics.median(theirs / ours).text(digits=2)} times as long"
    )


if __name__ == "__main__":
    main()
