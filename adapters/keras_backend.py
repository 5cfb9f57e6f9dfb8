"""Which framework Keras runs on in this process; imports nothing heavy."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

from isotrain.plugin import PlanError

VARIABLE = "KERAS_BACKEND"


def claim(framework: str) -> None:
    """Makes this process's Keras run on `framework`; call before anything imports Keras.

    Raises:
        PlanError: Keras already runs on another framework here, which cannot be changed.
    """
    if "keras" in sys.modules:
        running = sys.modules["keras"].backend.backend()
        if running != framework:
            raise PlanError(
                f"Keras already runs on {running!r} in this process, and this backend needs"
                f" {framework!r}. Keras can run on one framework per process: use isotrain.run or"
                f" isotrain.launch, which start processes of their own, or set"
                f" {VARIABLE}={framework} before Keras is imported."
            )
        return
    os.environ[VARIABLE] = framework


def is_a(value: Any, kind: Literal["Layer", "Loss", "Metric"]) -> bool:
    """Whether a value is of a class of Keras; imports nothing: without Keras there is none."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(value, getattr(keras, kind))
