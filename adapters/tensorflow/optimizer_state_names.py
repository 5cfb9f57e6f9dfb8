"""How Keras' optimizers keep the slots of the spec's for TensorFlow's variables; imports no Keras."""

from __future__ import annotations

from collections.abc import Sequence

from isotrain.plugin import OptimizerStateNames

_NAMES = {"adamw": "adam_w", "rmsprop": "rm_sprop"}


class KerasOptimizerStateNames(OptimizerStateNames):
    """`OPTIMIZER/WEIGHT_SLOT`, as the spec means them."""

    def slot(self, optimizer: str, weight: str, slot: str) -> Sequence[str]:
        path, number, count = weight.replace("/", "_").partition("#")
        start = f"{_name(optimizer)}/{path}"
        # A tf.Variable's own name ends with `:0`; a Keras variable's does not.
        return [f"{start}{end}_{slot}{number}{count}" for end in ("_0", "")]

    def steps(self, optimizer: str, weight: str) -> str | None:
        return f"{_name(optimizer)}/iteration"


def _name(optimizer: str) -> str:
    return _NAMES.get(optimizer, optimizer)
