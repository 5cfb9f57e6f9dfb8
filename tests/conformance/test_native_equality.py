"""Promise 5: against a loop written by hand in the same framework, the weights are equal to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import runs
from conformance.backends import param
from conformance.hands import by_hand

LOOPS = (
    ("torch_ddp_native", "torch-ddp", "torch"),
    ("torch_ddp_keras", "torch-ddp", "float32"),
    ("tf_strategy", "tf-mirrored", "float32"),
    ("tf_strategy", "tf-multiworker", "float32"),
    ("horovod_torch_native", "horovod-torch", "torch"),
    ("horovod_tf", "horovod-tf", "float32"),
)
"""The script, the backend that it is the counterpart of, and the kind of model."""
QUICK = ("torch_ddp_native", "torch-ddp", 2)
OPTIMIZERS = {2: "adam", 3: "sgd"}
"""By replicas: with 2 all slices are even, with 3 they are not, and a replica gets none at times."""


def cells() -> list[object]:
    """Every loop with 2 and with 3 replicas."""
    return [
        param(
            script,
            backend,
            f"{optimizer}-{model}",
            replicas,
            slow=(script, backend, replicas) != QUICK,
        )
        for script, backend, model in LOOPS
        for replicas, optimizer in OPTIMIZERS.items()
    ]


@pytest.mark.parametrize(("script", "backend", "case", "replicas"), cells())
def test_weights_are_bit_equal(script: str, backend: str, case: str, replicas: int) -> None:
    """All of them, after two epochs."""
    ours = runs.trained(backend, replicas, case)
    theirs = by_hand(script, backend, replicas, case, ours["start"])
    assert set(ours["weights"]) == set(theirs)
    differ = {
        name: float(np.abs(value - theirs[name]).max())
        for name, value in ours["weights"].items()
        if not np.array_equal(value, theirs[name])
    }
    assert not differ, f"largest differences: {differ}"
    moved = [n for n, v in ours["weights"].items() if not np.array_equal(v, ours["start"][n])]
    assert len(moved) == len(theirs)
