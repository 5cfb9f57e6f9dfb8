"""How do I profile some steps, with a trace of each rank?

A callback starts the framework's profiler after the first steps, which set up, and writes traces into the run
directory. Of torch that is `trace.json`, for chrome://tracing and Perfetto, and a table; of TensorFlow a
folder for TensorBoard.

    python examples/by_need/profiler.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


class Profiler(isotrain.Callback):
    """Profiles steps `first` to `last`, in every process."""

    def __init__(self, first: int = 2, last: int = 4) -> None:
        self.first, self.last = first, last

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        """Starts before the first of the steps, and stops after the last one."""
        folder = session.run_directory / "profile" / f"rank-{session.rank}"
        is_torch = session.plan.framework == "torch"
        if batch.step == self.first - 1:
            folder.mkdir(parents=True, exist_ok=True)
            self.profile = _torch_profile() if is_torch else _tensorflow_profile(str(folder))
            self.profile.start()
        elif batch.step == self.last:
            float(loss)  # waits until the steps are computed
            self.profile.stop()
            if is_torch:
                self.profile.export_chrome_trace(str(folder / "trace.json"))
                table = self.profile.key_averages().table("self_cpu_time_total", row_limit=10)
                (folder / "summary.txt").write_text(table)


def _torch_profile() -> Any:
    """torch's profiler of CPU and, if there are any, GPUs."""
    import torch

    return torch.profiler.profile()


def _tensorflow_profile(folder: str) -> Any:
    """TensorFlow's profiler, as an object with `start` and `stop`."""
    import types

    import tensorflow as tf

    profiler = tf.profiler.experimental
    return types.SimpleNamespace(start=lambda: profiler.start(folder), stop=profiler.stop)


def model() -> Any:
    """A small regression model of 8 features."""
    import keras

    hidden = keras.layers.Dense(16, activation="tanh")
    return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])


def data() -> isotrain.DataSet:
    """Points and their distances from the origin."""
    points = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
    return isotrain.DataSet((points, np.linalg.norm(points, axis=1, keepdims=True)))


spec = isotrain.TrainingSpec(
    name="profiler",
    model=model,
    data=data,
    loss="mean_squared_error",
    optimizer={"name": "sgd", "lr": 0.0625},
    global_batch_size=32,
    epochs=2,
    callbacks=[Profiler()],
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    print((result.run_directory / "profile" / "rank-0" / "summary.txt").read_text())
