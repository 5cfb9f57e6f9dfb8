"""A part of a model that is frozen, or left in evaluation mode, stays in it while the rest trains."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from integration import submodule_modes as own

from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

DROPS = {"drops": own.RATE, "drops nothing": own.NONE}


@functools.cache
def natively() -> dict[str, Any]:
    specs = {
        f"{name}, {kind}": own.spec(name, drop)
        for name in own.NATIVE
        for kind, drop in DROPS.items()
    }
    return launched_in_turn(specs, own.trained, "torch-ddp", 2)[1]


@functools.cache
def portably(backend: str) -> dict[str, Any]:
    specs = {kind: own.portable(drop) for kind, drop in DROPS.items()}
    if backend == "torch-ddp":
        specs |= {f"{k}, eager": own.portable(d, capture=False) for k, d in DROPS.items()}
    return launched_in_turn(specs, own.trained, backend, 2)[0]


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(np.abs(np.subtract(one[name], other[name], dtype="float64")).max())
        for name in one
        if np.issubdtype(one[name].dtype, np.number) and "seed" not in name
    }


@pytest.mark.parametrize("name", ["left in evaluation", "frozen"])
def test_a_frozen_torch_teacher_stays_in_evaluation_mode(name: str) -> None:
    found, without = (natively()[f"{name}, {kind}"] for kind in DROPS)
    assert max(differences(found["after"], without["after"]).values()) < 1e-5
    moved = differences(found["before"], found["after"])
    assert all((change == 0) == key.startswith("teacher") for key, change in moved.items()), moved
    told = [text for text in found["told"] if "teacher: left in evaluation mode" in text]
    assert len(told) == (name == "left in evaluation")


def test_a_normalisation_in_evaluation_mode_stays() -> None:
    """Dropout beside it drops, and the weights beside it are trained."""
    found, without = (natively()[f"norm left in evaluation, {kind}"] for kind in DROPS)
    assert max(differences(found["after"], without["after"]).values()) > 1e-3
    moved = differences(found["before"], found["after"])
    still = {name for name, change in moved.items() if change == 0}
    assert still == {name for name in moved if name.startswith("teacher.1.")}
    assert any("teacher.1: left in evaluation mode" in text for text in found["told"])


@pytest.mark.parametrize(
    ("name", "part"),
    [("to be trained, in evaluation", "teacher"), ("all in evaluation", "all of it")],
)
def test_models_are_put_in_training_mode(name: str, part: str) -> None:
    """A model of `from_pretrained` is in evaluation mode, and loops by hand call `train`."""
    found, without = (natively()[f"{name}, {kind}"] for kind in DROPS)
    assert max(differences(found["after"], without["after"]).values()) > 1e-3
    assert found["after"]["teacher.1.num_batches_tracked"] == 6
    assert any(f"model: {part}: built in evaluation mode, but" in text for text in found["told"])


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored", "horovod-tf"])
def test_a_frozen_keras_teacher_stays_in_evaluation_mode(backend: str) -> None:
    found = portably(backend)
    for kinds in (
        tuple(DROPS),
        *([[f"{k}, eager" for k in DROPS]] if backend == "torch-ddp" else []),
    ):
        dropping, without = (found[kind] for kind in kinds)
        assert max(differences(dropping["after"], without["after"]).values()) < 1e-5
        moved = differences(dropping["before"], dropping["after"])
        assert all((change == 0) == key.startswith("teacher") for key, change in moved.items()), (
            moved
        )
