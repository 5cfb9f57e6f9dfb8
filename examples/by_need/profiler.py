"""How do I profile some steps, with a trace of each rank?

The framework's profiler starts after the first steps, which set up, and writes traces into the run directory.
Of torch that is `trace.json`, for chrome://tracing and Perfetto, and a table; of TensorFlow a folder for
TensorBoard. `profile: true` profiles steps 10 to 19 of rank 0.

    python examples/by_need/profiler.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain


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
    profile={"first_step": 2, "steps": 3, "all_processes": True},
)

if __name__ == "__main__":
    result = isotrain.run(spec, backend="torch-ddp", replicas=2)
    print((result.run_directory / "profile" / "rank-0" / "summary.txt").read_text())
