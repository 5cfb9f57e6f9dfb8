"""Clipping and LAMB on torch, against the formulas in NumPy: below and above each bound."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.isolated import run_isolated
from integration.session_specs import spec

import isotrain
from isotrain.adapters.common import adam_variants
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.optim import native
from isotrain.adapters.torch.optim.fused_sgd import native_update
from isotrain.adapters.torch.optim.lamb import Lamb
from isotrain.adapters.torch.optim.lion import Lion
from isotrain.adapters.torch.optim.muon import Muon
from isotrain.adapters.torch.optim.nadam import Nadam
from isotrain.adapters.torch.optim.state import NativeOptimizerState

GRADIENTS = [np.array([3.0, -4.0]), np.array([[0.5, -0.25], [0.125, 0.0]])]
TOTAL = np.sqrt(sum((g**2).sum() for g in GRADIENTS))


BOUNDS = {
    "global_clipnorm": (1.0, TOTAL - 0.01, TOTAL + 0.01, 100.0),
    "clipnorm": (0.1, 1.0, 100.0),
    "clipvalue": (0.2, 3.5, 100.0),
}


def clipped_by_each(session: isotrain.Session) -> dict[str, list[list[np.ndarray]]]:
    from isotrain.adapters.torch.optim import keras_foreach

    def clipped(**bound: float) -> list[np.ndarray]:
        options = SimpleNamespace(**{**dict.fromkeys(BOUNDS), **bound})
        gradients = [torch.tensor(gradient) for gradient in GRADIENTS]
        clipped = keras_foreach.clipped(gradients, options, private_api.foreach_norm)
        return [gradient.numpy() for gradient in clipped]

    return {name: [clipped(**{name: bound}) for bound in BOUNDS[name]] for name in BOUNDS}


@pytest.fixture(scope="module")
def clipped(tmp_path_factory):
    """Clipped gradients by the name of the option, one list for each bound."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    return run_isolated(clipped_by_each, spec(), "torch-ddp", folder)


@pytest.mark.slow
def test_the_norm_of_all_gradients_is_bounded(clipped):
    for bound, gradients in zip(BOUNDS["global_clipnorm"], clipped["global_clipnorm"], strict=True):
        for gradient, before in zip(gradients, GRADIENTS, strict=True):
            np.testing.assert_allclose(gradient, before * min(1.0, bound / TOTAL), rtol=1e-15)


@pytest.mark.slow
def test_the_norm_of_each_gradient_is_bounded(clipped):
    for bound, gradients in zip(BOUNDS["clipnorm"], clipped["clipnorm"], strict=True):
        for gradient, before in zip(gradients, GRADIENTS, strict=True):
            expected = before * min(1.0, bound / np.linalg.norm(before))
            np.testing.assert_allclose(gradient, expected, rtol=1e-15)


@pytest.mark.slow
def test_each_element_is_bounded_on_both_sides(clipped):
    for bound, gradients in zip(BOUNDS["clipvalue"], clipped["clipvalue"], strict=True):
        for gradient, before in zip(gradients, GRADIENTS, strict=True):
            np.testing.assert_array_equal(gradient, np.clip(before, -bound, bound))


OPTIMIZERS = {
    "adam": {},
    "amsgrad": {"name": "adam", "amsgrad": True},
    "adamw": {"weight_decay": 0.01},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "rmsprop": {"momentum": 0.9, "centered": True},
    **{name: {} for name in ("adagrad", "lion", "nadam", "radam")},
}
SIZES = (1003, 10, 128)
"""Lengths of weights: some elements are left over by vectors of any length."""


def updated_whole_and_in_shards(session: isotrain.Session) -> dict[str, list[np.ndarray]]:
    """Weights and slots after updates of whole weights, then of their first and their other elements."""
    return {
        name: [_updated({"name": name, "lr": 0.01, **options}, cut) for cut in (0, 1, 3, 500)]
        for name, options in OPTIMIZERS.items()
    }


def _updated(optimizer: dict[str, object], cut: int) -> np.ndarray:
    import keras

    from isotrain.adapters.keras import model as keras_model
    from isotrain.adapters.keras import private as keras_private
    from isotrain.adapters.torch.optim.keras_foreach import keras_update

    def shards(vectors: list[np.ndarray]) -> list[np.ndarray]:
        return [part for each in vectors for part in (each[:cut], each[cut:])]

    random = np.random.default_rng(0)
    fields = isotrain.TrainingSpec(**spec(optimizer=optimizer, reproducible="bits"))
    made, _ = keras_model.build_optimizer(fields, "torch")
    initial = [random.standard_normal(size).astype("float32") for size in SIZES]
    variables = [keras.Variable(each) for each in shards(initial)]
    made.build(variables)
    update = keras_update(fields, made, variables)
    for _ in range(4):
        gradients = [random.standard_normal(size).astype("float32") for size in SIZES]
        with torch.no_grad():
            update([torch.tensor(each) for each in shards(gradients)])
    kinds = [variables, *keras_private.slots_of(made).values()]
    return np.concatenate([each.value.detach().numpy() for kind in kinds for each in kind])


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_elements_of_a_shard_of_a_module_are_updated_as_those_of_the_whole_weight(name):
    """With `reproducible`, by the optimizers of torch; LAMB and Muon are refused there."""
    optimizer = {"name": name, "lr": 0.01, **OPTIMIZERS[name]}
    whole, *others = [_natively_updated(optimizer, cut) for cut in (0, 1, 3, 500)]
    assert [each.tobytes() == whole.tobytes() for each in others] == [True] * 3


def _natively_updated(optimizer: dict[str, object], cut: int) -> np.ndarray:
    random = np.random.default_rng(0)
    fields = isotrain.TrainingSpec(**spec(optimizer=optimizer, reproducible="bits"))

    def shards() -> list[torch.Tensor]:
        vectors = [random.standard_normal(size).astype("float32") for size in SIZES]
        return [torch.tensor(part) for each in vectors for part in (each[:cut], each[cut:])]

    weights = [torch.nn.Parameter(each) for each in shards()]
    made = native.build_optimizer(fields, weights)
    update = native_update(fields, made)
    for _ in range(4):
        for weight, gradient in zip(weights, shards(), strict=True):
            weight.grad = gradient
        update()
    kinds = sorted({name for weight in weights for name in made.state[weight]})
    slots = [made.state[weight][kind] for kind in kinds for weight in weights]
    tensors = [*weights, *(slot for slot in slots if slot.dim())]
    return np.concatenate([each.detach().numpy() for each in tensors])


@pytest.mark.slow
@pytest.mark.kernels
def test_elements_of_a_shard_are_updated_as_those_of_the_whole_weight(tmp_path):
    """With `reproducible`; LAMB and Muon are refused there."""
    results = run_isolated(updated_whole_and_in_shards, spec(), "torch-ddp", tmp_path / "run")
    for name, (whole, *others) in results.items():
        assert [each.tobytes() == whole.tobytes() for each in others] == [True] * 3, name


def test_missing_slots_are_created_as_zeros():
    """All else stays: weights, gradients, and slots that exist."""
    weights = {name: torch.nn.Parameter(torch.tensor([1.0, -2.0])) for name in ("a", "b")}
    optimizer = torch.optim.Adam(weights.values(), lr=0.125, weight_decay=0.25)
    weights["a"].grad = torch.tensor([0.5, 2.0])
    optimizer.step()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    state = NativeOptimizerState(optimizer, weights, weights, is_custom=False)
    slots = {name: slot.clone() for name, slot in state.read().items() if name.startswith("a/")}
    state.make()
    found = state.read()
    assert {name.replace("a/", "b/") for name in slots} == found.keys() - slots.keys()
    assert not any(found[name].any() for name in found.keys() - slots.keys())
    assert all(torch.equal(found[name], slot) for name, slot in slots.items())
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert weights["a"].grad.tolist() == [0.5, 2.0]
    assert weights["b"].grad is None


def test_lamb_is_algorithm_2_of_its_paper():
    """The trust ratio is |w| / |u|, where u has the corrected moments and the weight decay."""
    rate, first, second, epsilon, decay = 0.125, 0.75, 0.875, 2.0**-10, 0.25
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    expected = weight.detach().numpy().copy()
    optimizer = Lamb([weight], rate, (first, second), epsilon, decay)
    mean, square = np.zeros(3), np.zeros(3)
    for step, gradient in enumerate(np.array([[1.0, 0.5, -1.0], [0.25, -2.0, 0.125]]), 1):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
        corrected = mean / (1 - first**step), square / (1 - second**step)
        update = corrected[0] / (np.sqrt(corrected[1]) + epsilon) + decay * expected
        ratio = np.linalg.norm(expected) / np.linalg.norm(update)
        expected = expected - rate * ratio * update
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-14)


def test_lion_is_program_1_of_its_paper():
    """Steps have the sign of the interpolated momentum; the decay is decoupled."""
    rate, first, second, decay = 0.125, 0.75, 0.875, 0.25
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    expected, momentum = weight.detach().numpy().copy(), np.zeros(3)
    optimizer = Lion([weight], rate, (first, second), decay)
    for gradient in np.array([[1.0, 0.5, -1.0], [-4.0, -2.0, 0.125]]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        signs = np.sign(first * momentum + (1 - first) * gradient)
        expected = expected - rate * (signs + decay * expected)
        momentum = second * momentum + (1 - second) * gradient
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-14)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_muon_orthogonalizes_the_momentum_of_matrices(shape):
    """Singular values go through the polynomial of the iteration, as in the post that has it."""
    rate, momentum, decay = 0.125, 0.75, 0.25
    random = np.random.default_rng(0)
    expected, mean = random.normal(size=shape), np.zeros(shape)
    weight = torch.nn.Parameter(torch.tensor(expected))
    optimizer = Muon([weight], lr=rate, momentum=momentum, weight_decay=decay)
    for _ in range(3):
        gradient = random.normal(size=shape)
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        mean = momentum * mean + (1 - momentum) * gradient
        ahead = momentum * mean + (1 - momentum) * gradient
        left, values, right = np.linalg.svd(ahead, full_matrices=False)
        values = values / (np.linalg.norm(values) + 1e-7)
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        assert 0.3 < values.min() < values.max() < 1.3
        update = 0.2 * np.sqrt(5) * left @ np.diag(values) @ right
        expected = expected * (1 - rate * decay) - rate * update
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-10)


def test_muon_leaves_other_weights_to_adamw():
    """Vectors, kernels of convolutions, and the matrices of groups that do not orthogonalize."""
    options = {"lr": 0.125, "betas": (0.75, 0.875), "eps": 2.0**-10, "weight_decay": 0.25}
    random = np.random.default_rng(0)
    arrays = [random.normal(size=shape) for shape in ((3,), (2, 2, 3), (2, 3))]
    by_muon, by_adamw = ([torch.nn.Parameter(torch.tensor(a)) for a in arrays] for _ in "12")
    *others, matrix = by_muon
    groups = [{"params": others}, {"params": [matrix], "orthogonalize": False}]
    optimizers = Muon(groups, **options), torch.optim.AdamW(by_adamw, **options)
    for _ in range(3):
        for one, other in zip(by_muon, by_adamw, strict=True):
            one.grad = torch.tensor(random.normal(size=one.shape))
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(by_muon, by_adamw, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_nadam_is_algorithm_2_of_its_paper():
    """Also where `mu_product` is missing, as in the checkpoints of other frameworks."""
    rate, first, second, epsilon, decay = 0.125, 0.75, 0.875, 2.0**-10, 0.25
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    expected = weight.detach().numpy().copy()
    optimizer = Nadam([weight], lr=rate, betas=(first, second), eps=epsilon, weight_decay=decay)
    mean, square, product = np.zeros(3), np.zeros(3), 1.0

    def momentum(step: int) -> float:
        return first * (1 - 0.5 * 0.96 ** (0.004 * step))

    for step, gradient in enumerate(np.random.default_rng(0).normal(size=(5, 3)), 1):
        if step > 2:
            optimizer.state[weight]["mu_product"].zero_()
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
        product *= momentum(step)
        ahead = momentum(step + 1) * mean / (1 - product * momentum(step + 1))
        ahead = ahead + (1 - momentum(step)) * gradient / (1 - product)
        root = np.sqrt(square / (1 - second**step)) + epsilon
        expected = expected * (1 - rate * decay) - rate * ahead / root
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-7)
    assert adam_variants.nadam_momentum_product(0.999, adam_variants.PRODUCT_STEPS) < 1e-35


def test_radams_rectification_is_that_of_its_paper():
    second = 0.875
    end = 2 / (1 - second) - 1
    for step in range(1, 60):
        length = end - 2 * step * second**step / (1 - second**step)
        found = adam_variants.radam_rectification(second, step)
        if length <= 5:
            assert found is None
        else:
            ratio = (length - 4) * (length - 2) * end / ((end - 4) * (end - 2) * length)
            assert found == pytest.approx(np.sqrt(ratio), rel=1e-12)
    assert adam_variants.radam_rectification(0.5, 1000) is None
