"""Updates by groups of weights, and those of one plain optimizer per group: the work of a process."""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain
from isotrain.core.spec.loading import load_spec

DECAYS = {"weight_decay": 0.25}
ADAM = {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 2.0**-10}
OPTIMIZERS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"name": "sgd", **DECAYS}, {"weight_decay": 0.0}),
    ({"name": "sgd", "momentum": 0.5, **DECAYS}, {"momentum": 0.75, "nesterov": True}),
    ({"name": "adam"}, {**DECAYS, **ADAM}),
    ({"name": "adam", "amsgrad": True}, ADAM),
    ({"name": "adam"}, {"amsgrad": True}),
    ({"name": "adamw", "amsgrad": True}, {"amsgrad": False}),
    ({"name": "sgd"}, {"momentum": 0.75, "nesterov": True}),
    ({"name": "sgd", "momentum": 0.5, **DECAYS}, {"momentum": 0}),
    ({"name": "adamw", **DECAYS}, {"weight_decay": 0.0}),
    ({"name": "rmsprop", "momentum": 0.5, "centered": True}, {"rho": 0.5, "momentum": 0.25}),
    ({"name": "rmsprop"}, {"centered": True, "momentum": 0.5}),
    ({"name": "rmsprop", "momentum": 0.5, "centered": True}, {"centered": False, "momentum": 0}),
    ({"name": "adagrad"}, {"initial_accumulator_value": 0.5}),
    ({"name": "adagrad", **DECAYS}, {"epsilon": 2.0**-10, "weight_decay": 0.5}),
    ({"name": "lamb", **DECAYS}, ADAM),
    ({"name": "lion", **DECAYS}, {"beta_1": 0.5, "beta_2": 0.75}),
    ({"name": "muon", **DECAYS}, {"momentum": 0.5, "nesterov": False}),
    ({"name": "muon", **DECAYS}, {"orthogonalize": False, **ADAM}),
    ({"name": "nadam", **DECAYS}, ADAM),
    ({"name": "radam", **DECAYS}, {**ADAM, "beta_2": 0.875}),
]
"""Options of the optimizer, and of the group of the weight `b`."""
FACTOR = 0.25
STEPS = 3
SPEC: dict[str, Any] = {
    "model": len,
    "data": (np.ones((1, 2)), np.ones((1, 1))),
    "loss": "mse",
    "global_batch_size": 1,
    "steps": 1,
}
INITIAL = [
    np.array([1.0, -2.0, 3.0]),
    np.array([[0.5, -0.25]]),
    np.array([4.0, 0.125]),
    np.zeros(2),
]
NAMES = ["a", "b", "c", "d"]
LATER = 7
"""Number of updates that is written to Keras' optimizers after their first one."""


def seen(session: isotrain.Session) -> list[dict[str, float]]:
    """Largest differences from weights of plain optimizers, by way of updating, for each optimizer."""
    session.close()
    return [_differences(common, options) for common, options in OPTIMIZERS]


def _differences(common: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    optimizer = {"lr": 0.125, **common}
    group = {"weights": "b", "lr_factor": FACTOR, **options}
    spec = load_spec({**SPEC, "optimizer": {**optimizer, "groups": [group]}})
    of_rest = load_spec({**SPEC, "optimizer": optimizer})
    of_group = load_spec({**SPEC, "optimizer": {**optimizer, **options, "lr": 0.125 * FACTOR}})
    keras_apart = _keras_alone(of_rest, of_group)
    torch_apart = _torch_alone(of_rest, of_group)
    return {
        "keras": _distance(_keras_grouped(spec, by_kernels=False), keras_apart),
        "kernels": _distance(_keras_grouped(spec, by_kernels=True), keras_apart),
        "torch": _distance(_torch_grouped(spec), torch_apart),
    }


def _distance(weights: list[np.ndarray], others: list[np.ndarray]) -> float:
    assert all(not np.array_equal(*pair) for pair in zip(weights, INITIAL, strict=True))
    return max(float(np.abs(a - b).max()) for a, b in zip(weights, others, strict=True))


def _gradients(step: int) -> list[np.ndarray]:
    random = np.random.default_rng(step)
    return [random.standard_normal(weight.shape).astype("float32") for weight in INITIAL]


def _keras_grouped(spec: Any, *, by_kernels: bool) -> list[np.ndarray]:
    import keras
    import torch

    from isotrain.adapters.keras import model as keras_model
    from isotrain.adapters.torch.optim.keras_foreach import keras_update
    from isotrain.core.spec.optimizer_groups import weight_groups

    variables = [
        keras.Variable(value, dtype="float32", name=n)
        for n, value in zip(NAMES, INITIAL, strict=True)
    ]
    optimizer, _ = keras_model.build_optimizer(spec, "torch")
    optimizer.build(variables)
    groups = keras_model.use_groups(spec, optimizer, weight_groups(spec.optimizer, NAMES))
    update = keras_update(spec, optimizer, variables, groups=groups)
    assert update is not None
    for step in range(STEPS):
        gradients = list(map(torch.from_numpy, _gradients(step)))
        with torch.no_grad():
            update(gradients) if by_kernels else optimizer.apply(gradients, variables)
        if step == 0:
            optimizer.iterations.assign(LATER)
            update.forget()
    return [variable.value.detach().numpy() for variable in variables]


def _keras_alone(of_rest: Any, of_group: Any) -> list[np.ndarray]:
    import keras
    import torch

    from isotrain.adapters.keras import model as keras_model

    variables = [
        keras.Variable(value, dtype="float32", name=n)
        for n, value in zip(NAMES, INITIAL, strict=True)
    ]
    for indices, spec in (([0, 2, 3], of_rest), ([1], of_group)):
        optimizer, _ = keras_model.build_optimizer(spec, "torch")
        members = [variables[index] for index in indices]
        for step in range(STEPS):
            gradients = [torch.from_numpy(_gradients(step)[index]) for index in indices]
            with torch.no_grad():
                optimizer.apply(gradients, members)
            if step == 0:
                optimizer.iterations.assign(LATER)
    return [variable.value.detach().numpy() for variable in variables]


def _torch_grouped(spec: Any) -> list[np.ndarray]:
    import torch

    from isotrain.adapters.torch.optim.fused_sgd import native_update
    from isotrain.adapters.torch.optim.native import build_optimizer
    from isotrain.core.spec.optimizer_groups import weight_groups

    weights = _parameters()
    optimizer = build_optimizer(spec, weights, weight_groups(spec.optimizer, NAMES))
    update = native_update(spec, optimizer)
    for step in range(STEPS):
        for weight, gradient in zip(weights, _gradients(step), strict=True):
            weight.grad = torch.from_numpy(gradient)
        update()
    return [weight.detach().numpy() for weight in weights]


def _torch_alone(of_rest: Any, of_group: Any) -> list[np.ndarray]:
    import torch

    from isotrain.adapters.torch.optim.native import build_optimizer

    weights = _parameters()
    for indices, spec in (([0, 2, 3], of_rest), ([1], of_group)):
        members = [weights[index] for index in indices]
        optimizer = build_optimizer(spec, members)
        for step in range(STEPS):
            for index in indices:
                weights[index].grad = torch.from_numpy(_gradients(step)[index])
            optimizer.step()
    return [weight.detach().numpy() for weight in weights]


def _parameters() -> list[Any]:
    import torch

    return [torch.nn.Parameter(torch.tensor(value, dtype=torch.float32)) for value in INITIAL]
