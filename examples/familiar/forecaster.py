"""keras.io's "Timeseries forecasting" with an LSTM, on any backend: is a peak next? Rare peaks weigh more.

isotrain run examples/familiar/forecaster.py:spec --backend horovod-tf --replicas 2
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

PAST = 12
PEAK = 0.9


def model() -> Any:
    """LSTM from the last values, [samples, PAST, 1], to the probability that the next one is a peak."""
    import keras
    from keras import layers

    inputs = keras.Input((PAST, 1))
    return keras.Model(inputs, layers.Dense(1, activation="sigmoid")(layers.LSTM(16)(inputs)))


def data(samples: int = 128) -> isotrain.DataSet:
    """Windows of a series, as `timeseries_dataset_from_array` cuts them, and whether a peak follows."""
    random = np.random.default_rng(0)
    times = np.arange(samples + PAST)
    series = (np.sin(times / 3) + 0.1 * random.normal(size=len(times))).astype("float32")
    windows = np.lib.stride_tricks.sliding_window_view(series, PAST + 1)
    peaks = (windows[:, PAST:] > PEAK).astype("float32")
    return isotrain.DataSet((windows[:, :PAST, None], peaks))


spec = isotrain.TrainingSpec(
    name="forecaster",
    model=model,
    data=data,
    validation_split=0.25,  # what comes later
    loss="binary_crossentropy",
    class_weight={0: 1.0, 1: 4.0},
    optimizer={"name": "adam", "lr": 0.01},
    metrics=["binary_accuracy", "recall"],
    global_batch_size=32,
    epochs=4,
)
