"""A native model goes on in another framework, by the person's map of names: its weights and their slots."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from integration.backend_pair_runs import EXACT

import isotrain
from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.errors import IsotrainError
from isotrain.core.session.weights import weight_readers
from isotrain.core.session.weights.state_conversion import LOST_OPTIMIZER_STATE, StateConverter
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

START = np.random.default_rng(4).standard_normal((3, 2))
NAMES = {"tensorflow": {"kernel": {"name": "weight", "axes": "IO->OI"}}}
WRONG: dict[str, tuple[Any, str]] = {
    "no map": (None, r"it lacks .*checkpoint\.map"),
    "another map": (
        {"tensorflow": {"kernel": "bias"}},
        r"step-000000005, by `checkpoint\.map`: 'kernel': expected shape",
    ),
}
"""What is told where torch's model goes on in TensorFlow by them."""
NOWHERE = {**EXACT, "epsilon": 2.0**-80}
"""Frameworks add the epsilon in other places."""
BOTH = {"momentum": 0.5, "epsilon": 2.0**-80}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.125},
    "momentum": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
    "groups": {
        "name": "sgd",
        "lr": 0.125,
        "momentum": 0.5,
        "groups": [{"weights": "bias", "lr_factor": 0.5, "momentum": 0.25}],
    },
    "group with momentum": {
        "name": "sgd",
        "lr": 0.125,
        "groups": [{"weights": "bias", "momentum": 0.5, "nesterov": True}],
    },
    "group without momentum": {
        "name": "sgd",
        "lr": 0.125,
        "momentum": 0.5,
        "groups": [{"weights": "bias", "momentum": 0}],
    },
    "group with amsgrad": {
        "name": "adam",
        "lr": 0.0625,
        "groups": [{"weights": "bias", "amsgrad": True}],
        **NOWHERE,
    },
    "centered group": {
        "name": "rmsprop",
        "lr": 0.0625,
        "rho": 0.875,
        "epsilon": 2.0**-80,
        "groups": [{"weights": "bias", "momentum": 0.5, "centered": True}],
    },
    "group with a start": {
        "name": "adagrad",
        "lr": 0.0625,
        "epsilon": 2.0**-80,
        "groups": [{"weights": "bias", "initial_accumulator_value": 0.5}],
    },
    "adam": {"name": "adam", "lr": 0.0625, "amsgrad": True, **NOWHERE},
    "adamw": {"name": "adamw", "lr": 0.0625, "weight_decay": 0.125, **NOWHERE},
    "rmsprop": {"name": "rmsprop", "lr": 0.0625, "rho": 0.875, **BOTH},
    "adagrad": {"name": "adagrad", "lr": 0.0625, "epsilon": 2.0**-80},
    "lamb": {"name": "lamb", "lr": 0.0625, **NOWHERE},
    "muon": {"name": "muon", "lr": 0.0625, "momentum": 0.5, "weight_decay": 0.125, **NOWHERE},
    "nadam": {"name": "nadam", "lr": 0.0625, "weight_decay": 0.125, **NOWHERE},
    "radam": {"name": "radam", "lr": 0.0625, "weight_decay": 0.125, **NOWHERE, "beta_2": 0.875},
    "lion": {"name": "lion", "lr": 0.0625, "beta_1": 0.5, "beta_2": 0.75, "weight_decay": 0.125},
}
MOST_BYTES = 4 * START.nbytes + 8
"""Of one weight, three slots, and the count of its updates: what is read at a time by small portions."""
STOP, STEPS = 5, 9
BACKENDS = {"torch-ddp": "tf-mirrored", "tf-mirrored": "torch-ddp"}
"""Each, and in which the other half of its runs is taken."""
REPLICAS = {"torch-ddp": 2, "tf-mirrored": 1}
"""The halves of a run have different numbers of them."""


def of_torch() -> Any:
    import torch

    layer = torch.nn.Linear(3, 2, bias=True, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(START.T))
        layer.bias.zero_()
    return layer


def of_tensorflow() -> Any:
    import tensorflow as tf

    class Linear(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = tf.Variable(START, name="kernel")
            self.bias = tf.Variable(np.zeros(2), name="bias")

        def __call__(self, inputs: Any) -> Any:
            return inputs @ self.kernel + self.bias

    return Linear()


def of_keras() -> Any:
    import keras

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="only")])


def data() -> tuple[np.ndarray, np.ndarray]:
    """Four global batches of one size, for which frameworks trace once."""
    inputs = np.random.default_rng(2).standard_normal((28, 3))
    return inputs, np.sin(inputs[:, :2])


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"torch": of_torch, "tensorflow": of_tensorflow},
        "data": data,
        "loss": "mean_squared_error",
        "optimizer": OPTIMIZERS["sgd"],
        "precision": "float64",
        "global_batch_size": 7,
        "steps": STEPS,
        "threads": 1,
        "device": "cpu",
        "checkpoint": {"map": NAMES},
        **changes,
    }


def specs() -> dict[str, dict[str, Any]]:
    natives = {name: spec(optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()}
    table = {"torch": of_keras, "tensorflow": of_keras}
    return natives | {"keras": spec(model=table, optimizer=OPTIMIZERS["momentum"])}


def wrong_specs() -> dict[str, dict[str, Any]]:
    return {name: spec(checkpoint={"map": names}) for name, (names, _) in WRONG.items()}


def test_one_model_for_all_frameworks_needs_no_name_map() -> None:
    there = "torch-ddp", "torch"
    plan = isotrain.plan(spec(), backend="tf-mirrored")

    def between(model: Any) -> StateConverter | None:
        return StateConverter.between(there, plan, TrainingSpec.model_validate(spec(model=model)))

    assert between(of_tensorflow) is None
    assert between({"torch": of_torch, "tensorflow": of_tensorflow}) is not None
    assert between("registered") is not None  # by a plugin, maybe as such a table


def first(session: isotrain.Session, name: str, *, folder: Path) -> Any:
    """Trains to the end, and saves on the way."""
    for batch in itertools.islice(session.batches(), STOP):
        session.step(batch)
    session.save(folder / name)
    return end(session)


def rest(session: isotrain.Session, name: str, *, folder: Path) -> Any:
    """Goes on from what the other framework has saved, unless the map is wrong."""
    if name in WRONG:
        with pytest.raises(IsotrainError, match=WRONG[name][1]):
            session.restore(folder / "sgd")
        return None
    read, sizes = Checkpoint.read, []

    def noting(*given: Any) -> Any:
        arrays = read(*given)
        sizes.append(sum(array.nbytes for array in arrays.values()))
        return arrays

    small = mock.patch.object(weight_readers, "PORTION_BYTES", 1)
    with small, mock.patch.object(Checkpoint, "read", noting):
        session.restore(folder / name)
    return end(session) | {"largest": max(sizes)}


def end(session: isotrain.Session) -> Any:
    losses = [float(session.step(batch)) for batch in session.batches()]
    return {"losses": losses, "weights": session.read_state(("trainable",))}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """By backend, how its runs ended; and how those ended that it went on with, with other replicas."""
    folder = tmp_path_factory.mktemp("by-map")
    whole, resumed = {}, {}
    for backend in BACKENDS:
        work = functools.partial(first, folder=folder / backend)
        whole[backend], *_ = launched_in_turn(specs(), work, backend, REPLICAS[backend])
    for other, backend in BACKENDS.items():
        work = functools.partial(rest, folder=folder / other)
        tried = specs() | (wrong_specs() if backend == "tf-mirrored" else {})
        resumed[backend], *_ = launched_in_turn(tried, work, backend, REPLICAS[backend])
    return whole, resumed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "keras"])
def test_a_native_model_resumes_in_another_framework(
    ends: tuple[dict[str, Any], dict[str, Any]], backend: str, name: str
) -> None:
    whole, resumed = ends
    expected, found = whole[backend][name], resumed[BACKENDS[backend]][name]
    bound = 1e-9 if name == "nadam" else 1e-12  # torch's own keeps a scalar in float32
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0, atol=bound)
    assert found["largest"] <= MOST_BYTES
    for one, other in zip(*map(in_one_order, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=bound)


def in_one_order(found: dict[str, Any]) -> list[Any]:
    """The matrix of torch's form, and then the vector."""
    values = sorted(found["weights"].values(), key=np.ndim, reverse=True)
    return [value.T if value.shape == START.shape else value for value in values]


def zero_at_stop(step: int) -> float:
    return float(step != STOP)


@pytest.mark.parametrize(("name", "is_lost"), [("momentum", True), ("adam", False)])
def test_momentum_at_a_rate_of_zero_is_told_as_lost(
    tmp_path: Path, name: str, is_lost: bool
) -> None:
    """Keras' momentum is in units of the rate, also that of a group; Adam's moments are not."""
    group = {"weights": "bias", "schedule": zero_at_stop}
    optimizer = {**OPTIMIZERS[name], "groups": [group]}
    before = spec(optimizer=optimizer, steps=STOP, checkpoint={"map": NAMES, "every_steps": STOP})
    isotrain.run(before, backend="torch-ddp", output=tmp_path / "run", quiet=True)
    events: list[Any] = []
    isotrain.run(
        before | {"steps": STEPS},
        backend="tf-mirrored",
        output=tmp_path / "rest",
        resume=tmp_path / "run",
        on_event=events.append,
    )
    (resumed,) = (event for event in events if event["event"] == "resumed")
    assert (LOST_OPTIMIZER_STATE in resumed["lost"]) is is_lost
