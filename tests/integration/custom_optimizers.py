"""Optimizers of one's own, one for each of their options, and the plain program of each."""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

LR = 2.0**-6
SAMPLES = np.random.default_rng(5).normal(size=(24, 3)).astype("float32")
TARGETS = SAMPLES @ np.array([[1.0], [-2.0], [0.5]], "float32") * 4


def data() -> isotrain.DataSet:
    """Three global batches of 8, whose gradients are large at first and far from those of one half."""
    return isotrain.DataSet((SAMPLES, TARGETS))


def model() -> Any:
    import keras

    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])


def optimizer(lr: float, kind: str, excluded: Any = None, **options: Any) -> Any:
    """An optimizer of Keras, by its name."""
    import keras

    made = getattr(keras.optimizers, kind)(lr, **options)
    if excluded:
        made.exclude_from_weight_decay(var_names=excluded)
    return made


AVERAGED = {"kind": "SGD", "use_ema": True, "ema_momentum": 0.5}
OPTIONS: dict[str, dict[str, Any]] = {
    "clipnorm": {"kind": "SGD", "clipnorm": 0.5},
    "clipvalue": {"kind": "Adam", "clipvalue": 0.25, "epsilon": 1.0},
    "global_clipnorm": {"kind": "SGD", "global_clipnorm": 0.5, "momentum": 0.5},
    "weight_decay": {"kind": "SGD", "weight_decay": 0.25, "momentum": 0.5, "nesterov": True},
    "excluded from decay": {"kind": "AdamW", "weight_decay": 0.25, "excluded": ["bias"]},
    "amsgrad": {"kind": "Adam", "amsgrad": True, "beta_1": 0.5, "beta_2": 0.5},
    "centered": {"kind": "RMSprop", "centered": True, "momentum": 0.5},
    "use_ema": AVERAGED,
    "ema_overwrite_frequency": {**AVERAGED, "ema_overwrite_frequency": 2},
    "loss_scale_factor": {"kind": "SGD", "loss_scale_factor": 8.0},
    "gradient_accumulation_steps": {"kind": "SGD", "gradient_accumulation_steps": 2},
    "Lion": {"kind": "Lion"},
    "Muon": {"kind": "Muon"},
    "ScheduleFreeAdamW": {"kind": "ScheduleFreeAdamW"},
    "Adafactor": {"kind": "Adafactor", "weight_decay": 0.25},
}


def spec(name: str, **changes: Any) -> dict[str, Any]:
    chosen = {"custom": optimizer, "args": OPTIONS[name], "lr": LR}
    return {
        "model": model,
        "data": data,
        "loss": "mse",
        "optimizer": chosen,
        "global_batch_size": 8,
        "shuffle": False,
        "epochs": 2,
        "threads": 1,
        **changes,
    }


def trained(session: isotrain.Session, name: str) -> dict[str, Any]:
    """The weights before and after."""
    before = session.read_state(["trainable"])
    for batch in session.batches():
        session.step(batch)
    return {"before": before, "after": session.read_state(["trainable"])}


def beside_runs(session: isotrain.Session) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What Keras' `fit` gives, and what is refused, in a process that has both frameworks' optimizers."""
    given = session.read_state(["trainable"])
    session.close()
    return by_fit(given), refusals(session)


def by_fit(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The weights that Keras' own `fit` gives from a start."""
    found = {}
    for name, options in OPTIONS.items():
        plain = model()
        for variable, value in zip(plain.trainable_variables, given.values(), strict=True):
            variable.assign(value)
        plain.compile(optimizer(LR, **options), loss="mse")
        plain.fit(SAMPLES, TARGETS, batch_size=8, shuffle=False, epochs=2, verbose=0)
        values = [variable.numpy() for variable in plain.trainable_variables]
        found[name] = dict(zip(given, values, strict=True))
    return found


def net() -> Any:
    """A model whose weights depend on the seed that was set before."""
    from torch import nn

    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def sgd(parameters: Any, lr: float, **options: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr, **options)


def adam(parameters: Any, lr: float, **options: Any) -> Any:
    import torch

    return torch.optim.Adam(parameters, lr, **options)


def adafactor(parameters: Any, lr: float, **options: Any) -> Any:
    import torch

    return torch.optim.Adafactor(parameters, lr, **options)


def in_groups(parameters: Any, lr: float, names: list[str]) -> Any:
    import torch

    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    first, *others = parameters
    return torch.optim.SGD(
        [{"params": [first], "lr": lr / 4, "weight_decay": 0.25}, {"params": others}], lr
    )


def hooked(parameters: Any, lr: float) -> Any:
    """Halves gradients before an update, and the weights after it."""
    import torch

    optimizer = torch.optim.SGD(parameters, lr, momentum=0.5)

    def halve_gradients(*update: Any) -> None:
        for parameter in parameters:
            parameter.grad.mul_(0.5)

    def halve_weights(*update: Any) -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.5)

    optimizer.register_step_pre_hook(halve_gradients)
    optimizer.register_step_post_hook(halve_weights)
    return optimizer


def scheduled(parameters: Any, lr: float) -> Any:
    """Moves its scheduler on after each update; the first rate is a part of `lr`."""
    import torch

    optimizer = torch.optim.SGD(parameters, lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (2 + step))
    optimizer.register_step_post_hook(lambda *update: scheduler.step())
    return optimizer


def falling(parameters: Any, lr: float) -> Any:
    """Writes the rate of its group before each update, from the second on."""
    import torch

    optimizer, updates = torch.optim.SGD(parameters, lr), []

    def lower(*update: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5 if updates else 1.0
        updates.append(None)

    optimizer.register_step_pre_hook(lower)
    return optimizer


TORCH: dict[str, dict[str, Any]] = {
    "maximize": {"custom": sgd, "args": {"maximize": True, "momentum": 0.5, "dampening": 0.25}},
    "foreach": {"custom": adam, "args": {"foreach": True, "amsgrad": True, "weight_decay": 0.25}},
    "fused": {"custom": adam, "args": {"fused": True}},
    "decoupled": {"custom": adam, "args": {"decoupled_weight_decay": True, "weight_decay": 0.25}},
    "adafactor": {"custom": adafactor, "args": {"weight_decay": 0.25}},
    "groups": {"custom": in_groups},
    "hooks": {"custom": hooked},
    "scheduler": {"custom": scheduled},
    "rate by a hook": {"custom": falling},
}


def torch_spec(name: str, **changes: Any) -> dict[str, Any]:
    chosen = {"optimizer": {**TORCH[name], "lr": LR}, "model": {"torch": net}}
    return spec("clipnorm", **chosen, **changes)


def natively(session: isotrain.Session, name: str) -> dict[str, Any]:
    """The weights and rates of a session, and those of a plain loop from the same start."""
    import torch

    plain = net()
    given = session.read_state(["trainable"])
    plain.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in given.items()})
    chosen = TORCH[name]
    names = {"names": list(given)} if chosen["custom"] is in_groups else {}
    optimizer = chosen["custom"](list(plain.parameters()), LR, **names, **chosen.get("args", {}))
    rates: list[float] = []
    last = optimizer.param_groups[-1]
    optimizer.register_step_pre_hook(lambda *update: rates.append(float(last["lr"])))
    inputs, targets = torch.from_numpy(SAMPLES), torch.from_numpy(TARGETS)
    for start in (0, 8, 16) * 2:
        optimizer.zero_grad()
        rows = slice(start, start + 8)
        torch.nn.functional.mse_loss(plain(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    shown = []
    for batch in session.batches():
        session.step(batch)
        shown.append(session.learning_rate(batch.step))
    return {
        "after": session.read_state(["trainable"]),
        "plain": {key: value.numpy() for key, value in plain.state_dict().items()},
        "plain rates": rates,
        "shown": shown,
    }


def lbfgs(parameters: Any, lr: float) -> Any:
    import torch

    return torch.optim.LBFGS(parameters, lr)


def multi(lr: float) -> Any:
    import keras

    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(lr), {"dense.*": keras.optimizers.Adam(lr)}
        )
    )


def scaling(lr: float) -> Any:
    import keras

    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(lr))


REFUSED = {
    "closure": "LBFGS computes the loss several times in a step",
    "several": "MultiOptimizer",
    "loss scale": "LossScaleOptimizer",
    "two clippings": "clip: the optimizer that optimizer.custom returned has clipnorm too",
    "two scales": "loss_scale_factor",
    "two schedules": "so do schedule and scaling",
    "averages of local weights": "use_ema: under strategy local-sgd",
}


def refusals(session: isotrain.Session) -> dict[str, str]:
    """What is said of each, after a session that is closed."""
    native = {"model": {"torch": net}}
    cases: dict[str, dict[str, Any]] = {
        "closure": {**native, "optimizer": {"custom": lbfgs, "lr": LR}, "precision": "float16"},
        "several": {"optimizer": {"custom": multi, "lr": LR}},
        "loss scale": {"optimizer": {"custom": scaling, "lr": LR}},
        "two clippings": {"clip": {"value": 1.0}},
        "two scales": {
            "precision": "float16",
            "optimizer": {"custom": optimizer, "args": OPTIONS["loss_scale_factor"], "lr": LR},
        },
        "two schedules": {
            **native,
            "optimizer": {"custom": scheduled, "lr": LR},
            "scaling": {"rule": "linear", "base_batch_size": 4},
        },
        "averages of local weights": {
            "optimizer": {"custom": optimizer, "args": AVERAGED, "lr": LR},
            "strategy": "local-sgd",
        },
    }
    return {name: refusal(session, name, spec("clipnorm", **own)) for name, own in cases.items()}


def refusal(session: isotrain.Session, name: str, fields: dict[str, Any]) -> str:
    from isotrain.testing.consecutive_sessions import next_session

    try:
        with next_session(session, name, fields):
            return "nothing"
    except isotrain.SpecError as error:
        return str(error)
