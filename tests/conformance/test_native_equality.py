"""Promise 5: against a loop written by hand in the same framework, the weights are equal to the bit."""

from __future__ import annotations

import functools

import pytest
from conformance import trained_cases
from conformance.backends import param
from conformance.run_handwritten import by_hand

from isotrain.testing.native_equality import assert_native_equality

pytestmark = [pytest.mark.slow, pytest.mark.kernels]

LOOPS = (
    ("torch_ddp_native", "torch-ddp", "torch"),
    ("torch_ddp_keras", "torch-ddp", "keras"),
    ("tf_strategy", "tf-mirrored", "float32"),
    *(("tf_strategy", backend, "small") for backend in ("tf-mirrored", "tf-multiworker")),
    ("horovod_torch_native", "horovod-torch", "torch"),
)
"""The script, the backend that it is the counterpart of, and the kind of model; `keras` is one that is not
replayed from a record, whose update is by other kernels than Keras'. TensorFlow traces the `small`
one for the last step too, in which a replica has no samples; the other model is trained on full batches. For
Horovod with TensorFlow, and with three replicas, see `tests/integration/test_horovod_group.py`."""
OPTIMIZERS = {2: "adam", 3: "sgd"}
"""By replicas: with 2 slices are even, but in the last step one replica has none, where that is trained; with
3 they are uneven."""


def cells() -> list[object]:
    """Every loop with 2 replicas; those of `torch-ddp`, which trace nothing, also with 3."""
    return [
        param(
            *(script, backend, f"{optimizer}-{model}", replicas),
            features=model == "float32",
            exhaustive=model == "float32",
        )
        for script, backend, model in LOOPS
        for replicas, optimizer in OPTIMIZERS.items()
        if replicas == 2 or backend == "torch-ddp"
    ]


@pytest.mark.parametrize(("script", "backend", "case", "replicas"), cells())
def test_weights_are_bit_equal(script: str, backend: str, case: str, replicas: int) -> None:
    """Weights after two epochs have the bits of a loop written by hand."""
    loop = functools.partial(by_hand, script, backend, replicas, case)
    assert_native_equality(trained_cases.trained(backend, replicas, case), loop)
