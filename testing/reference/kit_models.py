"""The models of the conformance kit as networks of this backend; see `isotrain.testing.reference_model`."""

from __future__ import annotations

from typing import Any

import numpy as np

from isotrain.testing import digits, reference_model
from isotrain.testing.reference.layers import (
    Array,
    BatchNormalization,
    Dense,
    Dropout,
    Embedding,
)
from isotrain.testing.reference.losses_and_metrics import mean_squared_error
from isotrain.testing.reference.network import Branch, Network


def probe_model() -> Network:
    """Network equal to `reference_model.build_model`."""
    hidden = Dense(4, 5, "tanh", name="hidden")
    normalization = BatchNormalization(4, reference_model.STATISTICS_MOMENTUM, name="statistics")
    return Network(
        {
            "prediction": Branch("features", [hidden, Dense(5, 3, name="head")]),
            "seen": Branch("index", [Embedding(reference_model.SAMPLES, 1, name="seen")]),
            "noisy": Branch(
                "noise", [Dropout(0.5), Dense(reference_model.NOISE, 1, bias=False, name="noisy")]
            ),
            "statistics": Branch("features", [normalization]),
        }
    )


def probe_objective(network: Network, batch: Any) -> tuple[Array, Array, dict[str, Array]]:
    """Objective equal to `reference_model.objective`: losses, shape [samples], predictions, derivatives."""
    inputs, targets = batch
    outputs = network(inputs)
    losses, slopes = mean_squared_error(targets, outputs["prediction"])
    ones = np.ones_like(outputs["seen"])
    return (
        losses + outputs["seen"][:, 0] + outputs["noisy"][:, 0],
        outputs["prediction"],
        {"prediction": slopes, "seen": ones, "noisy": ones},
    )


def digits_model() -> Network:
    """Network equal to `digits.build_model`."""
    hidden = Dense(64, digits.HIDDEN, "tanh", name="hidden")
    return Network([hidden, Dense(digits.HIDDEN, 10, name="head")])
