"""How torch's optimizers keep the slots of the spec's; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from isotrain.plugin import OptimizerStateNames

_ADAM = {"momentum": "exp_avg", "velocity": "exp_avg_sq"}
_SLOTS = {
    "sgd": {"momentum": "momentum_buffer"},
    "adam": {**_ADAM, "velocity_hat": "max_exp_avg_sq"},
    "adamw": {**_ADAM, "velocity_hat": "max_exp_avg_sq"},
    "lamb": _ADAM,
    "rmsprop": {
        "velocity": "square_avg",
        "momentum": "momentum_buffer",
        "average_gradient": "grad_avg",
    },
    "adagrad": {"accumulator": "sum"},
}
_WITHOUT_RATE = {("sgd", "momentum"): -1.0, ("rmsprop", "momentum"): 1.0}


class TorchOptimizerStateNames(OptimizerStateNames):
    """`WEIGHT/SLOT`; momenta have no rate in them."""

    def slot(self, optimizer: str, weight: str, slot: str) -> Sequence[str]:
        own = _SLOTS.get(optimizer, {}).get(slot)
        return [] if own is None else [f"{weight}/{own}"]

    def steps(self, optimizer: str, weight: str) -> str | None:
        return None if optimizer == "sgd" else f"{weight}/step"

    def rate_factor(self, optimizer: str, slot: str) -> float | None:
        return _WITHOUT_RATE.get((optimizer, slot))
