"""What GPUs round otherwise is called rounding by `parity`, and faults are found all the same."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from integration import parity_cases
from plugins.gpu_backends import FAULTY, IN_16_BITS, RIGHT, Scatters

import isotrain
from isotrain.analysis.parity.records import RunRecord
from isotrain.core.plugins import selection

pytestmark = pytest.mark.features
REPLICAS = 4
"""Sums of two terms would have no order."""
CAUSES = {
    "gpu-kernels-and-epsilon": "epsilon-elsewhere",
    "gpu-kernels-and-clipping": "clipping-before-reduction",
    "gpu-tree-and-epsilon": "epsilon-elsewhere",
    "gpu-ring-and-statistics": "batch-norm-not-synced",
    **dict.fromkeys((each.name for each in IN_16_BITS), "reduced-in-fewer-bits"),
}


@functools.cache
def runs() -> dict[str, RunRecord]:
    spec = {**parity_cases.faulty_spec("float32"), "model_args": {"statistics": True}}
    backends = ["torch-ddp", *(each.name for each in (*RIGHT, *IN_16_BITS, *FAULTY))]
    with selection.using(["plugins.gpu_backends"], []):
        found = isotrain.parity(spec, backends=backends, replicas=[REPLICAS], steps=2, quiet=True)
    return {run.backend: run for run in found.runs}


@pytest.mark.parametrize("name", [each.name for each in RIGHT])
def test_rounding_of_gpus_is_called_rounding(name: str) -> None:
    run = runs()[name]
    assert run.status == "rounding", run.reason


def test_products_of_tf32_are_beyond_the_noise_of_a_cpu() -> None:
    """So a run in float64 is needed to call them rounding."""
    run = runs()["gpu-kernels"]
    assert run.steps[0].excess["gradient"] > 1
    assert 2.0**-14 < run.steps[0].stages["gradient"] < 2.0**-8
    assert run.confirmed is not None


def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Rows of a small vocabulary, so that many gradients are added to each row of the table."""
    generator = np.random.default_rng(3)
    return generator.integers(5, size=(28, 12)), generator.integers(3, size=28)


def embedded() -> Any:
    """A table of tokens, and one layer."""
    import keras

    inputs = keras.Input((12,), dtype="int32")
    flat = keras.layers.Flatten()(keras.layers.Embedding(5, 8, name="table")(inputs))
    return keras.Model(inputs, {"logits": keras.layers.Dense(3, name="head")(flat)})


def test_gradients_of_a_table_in_another_order_are_rounding() -> None:
    spec = parity_cases.spec(model=embedded, data=tokens, precision="float32")
    with selection.using(["plugins.gpu_backends"], []):
        backends = ["torch-ddp", Scatters.name]
        found = isotrain.parity(spec, backends=backends, replicas=[REPLICAS], steps=2, quiet=True)
    (run,) = [run for run in found.runs if run.backend == Scatters.name]
    assert run.status == "rounding", run.reason


@pytest.mark.parametrize("name", CAUSES)
def test_a_fault_is_found_among_the_rounding_of_gpus(name: str) -> None:
    run = runs()[name]
    assert run.status == "difference"
    assert [cause.code for cause in run.causes] == [CAUSES[name]], run.causes
    assert run.confirmed is not None
    assert run.first is not None
    assert run.confirmed == run.first.difference
