"""Every replica starts with the values of replica 0, whatever types and layouts these have."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.contracts.process import from_variables
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.slow

TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
TYPES += ("float64", "complex64", "complex128")
LAYOUTS = ("plain", "transposed", "expanded", "cut", "channels_last", "scalar", "empty", "sparse")
TRAINED = ("transposed", "channels_last")


def made(kind: str, layout: str, rank: int) -> Any:
    """A tensor whose numbers are of a rank."""
    import torch

    numbers = torch.arange(24).reshape(4, 6) + 7 * rank
    found = (numbers % 2 == 0) if kind == "bool" else numbers.to(getattr(torch, kind))
    if kind.startswith("complex"):
        found = found * (1 - 2j)
    return {
        "plain": found,
        "transposed": found.T,
        "expanded": found[:1, :1].expand(3, 2),
        "cut": found[::2, 1::2],
        "channels_last": found.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "scalar": found[0, 1],
        "empty": found[:0],
        "sparse": torch.eye(4).to(found.dtype).to_sparse() * (2 + rank),
    }[layout]


def network() -> Any:
    """A network with a frozen weight and a buffer of each dtype and layout; some weights are trained."""
    import torch
    from torch import nn

    context = from_variables(os.environ)
    rank = 0 if context is None else context.rank

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for kind in TYPES:
                for layout in LAYOUTS:
                    tensor = made(kind, layout, rank)
                    self.register_buffer(f"buffer_{kind}_{layout}", tensor)
                    weight = nn.Parameter(tensor.clone(), requires_grad=False)
                    setattr(self, f"frozen_{kind}_{layout}", weight)
            for layout in TRAINED:
                tensor = made("float32", layout, rank) / 100
                setattr(self, f"trained_{layout}", nn.Parameter(tensor))

        def forward(self, inputs: Any) -> Any:
            hidden = torch.tanh(inputs @ self.trained_transposed)
            return hidden * self.trained_channels_last.sum((0, 1, 2))

    return Net()


def recurrent() -> Any:
    import keras

    return keras.Sequential([keras.Input((5, 6)), keras.layers.SimpleRNN(4)])


def samples(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(2)
    return draw.standard_normal((7, *shape)).astype("f4"), draw.standard_normal((7, 4)).astype("f4")


def spec(**fields: Any) -> dict[str, Any]:
    return {
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 7,
        "epochs": 2,
        "threads": 1,
        **fields,
    }


NATIVE = {"model": {"torch": network}, "data": functools.partial(samples, 6)}
CASES: dict[str, dict[str, Any]] = {
    "native": spec(**NATIVE),
    "recurrent": spec(model=recurrent, data=functools.partial(samples, 5, 6)),
}
LARGE = {"backend_options": {"horovod-torch": {"groups": 1}}}
RUNS: dict[tuple[str, int], dict[str, dict[str, Any]]] = {
    ("torch-ddp", 1): CASES,
    ("torch-ddp", 2): CASES,
    ("horovod-torch", 2): {**CASES, "exchanged by hooks": spec(**NATIVE, **LARGE)},
}


def trained(session: isotrain.Session, name: str) -> dict[str, np.ndarray]:
    if name != "recurrent":
        model = session.group.model
        for kind in TYPES:
            for layout in LAYOUTS:
                for role in ("frozen", "buffer"):
                    _require_first(f"{role}_{kind}_{layout}", model, made(kind, layout, 0))
    for batch in session.batches():
        session.step(batch)
    return session.read_state(("trainable",))


def _require_first(name: str, model: Any, expected: Any) -> None:
    found = getattr(model, name)
    assert found.layout == expected.layout, name
    if "sparse" not in name:
        strides = expected.clone().stride() if name.startswith("frozen") else expected.stride()
        assert found.stride() == strides, name
    assert (found.detach().to_dense() == expected.to_dense()).all(), name


@functools.cache
def results(backend: str, replicas: int) -> dict[str, dict[str, np.ndarray]]:
    """By case, what every process of a run returns alike."""
    first, *others = launched_in_turn(RUNS[backend, replicas], trained, backend, replicas)
    for other in others:
        for name, weights in first.items():
            for weight, value in weights.items():
                np.testing.assert_array_equal(other[name][weight], value, err_msg=weight)
    return first


@pytest.mark.parametrize("backend", ["torch-ddp", "horovod-torch"])
def test_replicas_start_with_the_values_of_replica_0_and_train_as_one(backend: str) -> None:
    whole = results("torch-ddp", 1)
    for name, weights in results(backend, 2).items():
        for weight, value in weights.items():
            expected = whole["recurrent" if name == "recurrent" else "native"][weight]
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6, err_msg=weight)
