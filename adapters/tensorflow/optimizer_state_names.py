"""Names of optimizer state on TensorFlow, as Keras' optimizers have it; imports no Keras."""

from __future__ import annotations

from collections.abc import Sequence

from isotrain.plugin import OptimizerStateNames

_NAMES = {"adamw": "adam_w", "rmsprop": "rm_sprop"}


class KerasOptimizerStateNames(OptimizerStateNames):
    """Names of the form `OPTIMIZER/WEIGHT_SLOT`, as Keras gives them to TensorFlow's variables."""

    def slot(self, optimizer: str, weight: str, slot: str) -> Sequence[str]:
        path, number, count = weight.replace("/", "_").partition("#")
        prefix = f"{_name(optimizer)}/{path}"
        # A tf.Variable's own name ends with `:0`; a Keras variable's does not.
        return [f"{prefix}{suffix}_{slot}{number}{count}" for suffix in ("_0", "")]

    def steps(self, optimizer: str, weight: str) -> str | None:
        return f"{_name(optimizer)}/iteration"


def _name(optimizer: str) -> str:
    return _NAMES.get(optimizer, optimizer)
