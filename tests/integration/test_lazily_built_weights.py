"""Weights that torch does not learn of when a Keras layer is built are exchanged like all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.slow

RATE, BATCH = 0.125, 8


def dense() -> Any:
    import keras

    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(6, activation="tanh", name="first")(inputs)
    hidden = keras.layers.Dense(5, name="second")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(hidden))


def adapted() -> Any:
    model = dense()
    model.get_layer("first").enable_lora(2)
    return model


def quantized() -> Any:
    """A model whose layer no longer has the kernel that it was built with."""
    model = dense()
    model.get_layer("second").quantize("int8")
    model.get_layer("second").enable_lora(2)
    return model


def wholly_quantized() -> Any:
    """A sequential model, which keeps a functional one, with adapters of integer kernels (QLoRA)."""
    import keras

    hidden = keras.layers.Dense(6, activation="tanh", name="hidden")
    layers = [keras.Input((4,)), hidden, keras.layers.Dense(3, name="last")]
    model = keras.Sequential(layers, name="model")
    model.quantize("int8")
    for layer in model.layers:
        layer.enable_lora(2)
    return model


def twins() -> Any:
    """Two layers' weights have the same paths."""
    import keras

    class Two(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="two")
            self.one, self.other = (keras.layers.Dense(4, name="twin") for _ in range(2))

        def build(self, shape: Any) -> None:
            self.one.build(shape)
            self.other.build(shape)

        def call(self, inputs: Any) -> Any:
            return self.other(keras.ops.tanh(self.one(inputs)))

    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(Two()(inputs)))


def samples() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(2)
    return draw.standard_normal((24, 4)).astype("f4"), draw.integers(0, 3, 24)


CASES: dict[str, dict[str, Any]] = {
    **{model.__name__: {"model": model} for model in (adapted, quantized, wholly_quantized, twins)},
    "computed by Keras": {"model": adapted, "capture": False},
    "sharded": {"model": adapted, "strategy": {"name": "sharded", "options": {"stage": 1}}},
}
RUNS = {"torch-ddp": CASES, "horovod-torch": {"adapted": CASES["adapted"]}}


def spec(**fields: Any) -> dict[str, Any]:
    return {
        "data": samples,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": RATE},
        "global_batch_size": BATCH,
        "shuffle": False,
        "epochs": 2,
        "threads": 1,
        **fields,
    }


def trained(session: isotrain.Session, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights as the session and as a plain loop over whole global batches trains them."""
    import torch
    from torch.nn import functional

    from isotrain.adapters.keras.model import canonical_names

    first = session.read_state()
    for batch in session.batches():
        session.step(batch)
    found = session.read_state(("trainable",))
    model = CASES[name]["model"]()
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    for variable, path in zip(variables, canonical_names(variables), strict=True):
        variable.assign(first[path])
    inputs, targets = (torch.from_numpy(each) for each in samples())
    weights = [variable.value for variable in model.trainable_variables]
    for rows in torch.arange(len(inputs)).split(BATCH) * 2:
        loss = functional.cross_entropy(model(inputs[rows], training=True), targets[rows])
        with torch.no_grad():
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight -= RATE * gradient
    names = canonical_names(model.trainable_variables)
    return found, {n: w.detach().numpy() for n, w in zip(names, weights, strict=True)}


@pytest.mark.parametrize("backend", RUNS)
def test_all_weights_are_those_of_a_plain_loop_on_every_replica(backend: str) -> None:
    specs = {name: spec(**fields) for name, fields in RUNS[backend].items()}
    first, second = launched_in_turn(specs, trained, backend, 2)
    for name, (found, plain) in first.items():
        assert found.keys() == plain.keys()
        for weight, value in plain.items():
            message = f"{name}: {weight}"
            np.testing.assert_allclose(found[weight], value, rtol=0, atol=1e-6, err_msg=message)
            np.testing.assert_array_equal(second[name][0][weight], found[weight], err_msg=message)


def lazy() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.LazyLinear(3))


def late() -> Any:
    import torch

    class Late(torch.nn.Module):
        def forward(self, inputs: Any) -> Any:
            if not hasattr(self, "made"):
                self.made = torch.nn.Linear(4, 3)
            return self.made(inputs)

    model = Late()
    model.first = torch.nn.Linear(4, 4)
    return model


@pytest.mark.parametrize(
    ("model", "reason"), [(lazy, "0.weight.*lazy module"), (late, "made.weight.*in a forward pass")]
)
def test_weights_that_would_not_be_updated_are_refused(model: Any, reason: str) -> None:
    with pytest.raises(isotrain.RunFailedError, match=reason):
        isotrain.run(spec(model={"torch": model}), backend="torch-ddp", on_event=lambda event: None)


def float8() -> Any:
    import keras

    hidden = keras.layers.Dense(6, name="hidden", dtype="float8_from_float32")
    return keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(3)])


@pytest.mark.parametrize(
    "backend", ["torch-ddp", pytest.param("tf-mirrored", marks=pytest.mark.features)]
)
def test_scales_that_their_gradients_replace_are_refused(backend: str) -> None:
    with pytest.raises(isotrain.RunFailedError, match=r"float8: .*hidden/inputs_amax_history"):
        isotrain.run(spec(model=float8), backend=backend, on_event=lambda event: None)
