"""Which framework Keras runs on in this process; imports nothing heavy."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib import metadata
from typing import Any, Literal

from isotrain.plugin import Availability, PlanError

ENVIRONMENT_VARIABLE = "KERAS_BACKEND"
LAZY_IMPORT = "isotrain.adapters.keras.lazy_import"
"""To be imported before Keras, and before TensorFlow, which imports it: they then start sooner."""


def is_installed() -> bool:
    """Whether there is a Keras here; imports nothing."""
    return importlib.util.find_spec("keras") is not None


def version() -> dict[str, str]:
    """That of Keras, under its name; nothing where it is not installed."""
    return {"keras": metadata.version("keras")} if is_installed() else {}


def private_api_changes() -> Availability | None:
    """Which private parts of Keras are no longer as they were; None where all are, or it is not installed.

    Imports Keras, on the framework that was claimed.
    """
    if not is_installed():
        return None
    from isotrain.adapters.common import private_api
    from isotrain.adapters.keras import private as keras_private

    return private_api.private_api_changes("Keras", metadata.version("keras"), keras_private.PROBES)


def set_backend(framework: str) -> None:
    """Makes this process's Keras run on `framework`, and start soon; call before anything imports Keras.

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
                f" {ENVIRONMENT_VARIABLE}={framework} before Keras is imported."
            )
        return
    os.environ[ENVIRONMENT_VARIABLE] = framework
    importlib.import_module(LAZY_IMPORT)


def is_keras_instance(value: Any, kind: Literal["Layer", "Loss", "Metric"]) -> bool:
    """Whether a value is of a class of Keras; imports nothing: without Keras there is none."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(value, getattr(keras, kind))
