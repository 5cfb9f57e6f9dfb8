"""Names that torch's optimizers give to the optimizer state; imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isotrain.plugin import OptimizerStateNames

_ADAM = {"momentum": "exp_avg", "velocity": "exp_avg_sq"}
_SLOTS = {
    "sgd": {"momentum": "momentum_buffer"},
    "adam": {**_ADAM, "velocity_hat": "max_exp_avg_sq"},
    "adamw": {**_ADAM, "velocity_hat": "max_exp_avg_sq"},
    "lamb": _ADAM,
    "lion": {"momentum": "exp_avg"},
    "muon": _ADAM,
    "nadam": _ADAM,
    "radam": _ADAM,
    "rmsprop": {
        "velocity": "square_avg",
        "momentum": "momentum_buffer",
        "average_gradient": "grad_avg",
    },
    "adagrad": {"accumulator": "sum"},
}
_RATE_FACTORS = {("sgd", "momentum"): -1.0, ("rmsprop", "momentum"): 1.0}
"""Factor that, times the learning rate, converts torch's momentum to the spec's (Keras')."""


def slot_names(optimizer: str, slots: Iterable[str]) -> list[str]:
    """Names that torch gives to slots, which are named as in the spec."""
    return [_SLOTS[optimizer][slot] for slot in slots]


class TorchOptimizerStateNames(OptimizerStateNames):
    """Optimizer state names of torch: `WEIGHT/STATE`; momenta do not include the learning rate."""

    def slot(self, optimizer: str, weight: str, slot: str) -> Sequence[str]:
        torch_name = _SLOTS.get(optimizer, {}).get(slot)
        return [] if torch_name is None else [f"{weight}/{torch_name}"]

    def steps(self, optimizer: str, weight: str) -> str | None:
        return None if optimizer in ("sgd", "lion") else f"{weight}/step"

    def rate_factor(self, optimizer: str, slot: str) -> float | None:
        return _RATE_FACTORS.get((optimizer, slot))
