"""keras.io's "Timeseries forecasting" with an LSTM, on any backend, with a series that is made up.

isotrain run examples/familiar/forecaster.py:spec --backend horovod-tf --replicas 2
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

PAST = 12


def model() -> Any:
    """From the last values to the next one."""
    import keras
    from keras import layers

    inputs = keras.Input((PAST, 1))
    return keras.Model(inputs, layers.Dense(1)(layers.LSTM(16)(inputs)))


def data(samples: int = 128) -> isotrain.DataSet:
    """What `timeseries_dataset_from_array` cuts: windows of a series, and the value after each."""
    random = np.random.default_rng(0)
    times = np.arange(samples + PAST)
    series = (np.sin(times / 3) + 0.1 * random.normal(size=len(times))).astype("float32")
    windows = np.lib.stride_tricks.sliding_window_view(series, PAST + 1)
    return isotrain.DataSet((windows[:, :PAST, None], windows[:, PAST:]))


spec = isotrain.TrainingSpec(
    name="forecaster",
    model=model,
    data=data,
    validation_split=0.25,  # what comes later
    loss="mse",
    optimizer={"name": "adam", "lr": 0.01},
    metrics=["mae"],
    global_batch=32,
    epochs=4,
)
