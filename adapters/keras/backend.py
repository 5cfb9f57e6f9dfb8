"""Selects Keras' backend framework for this process; imports nothing heavy."""

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
"""Module to import before Keras, and before TensorFlow, which imports Keras: both then import faster."""


def is_installed() -> bool:
    """Whether Keras is installed; does not import it."""
    return importlib.util.find_spec("keras") is not None


def version() -> dict[str, str]:
    """`{"keras": version}`; empty if Keras is not installed."""
    return {"keras": metadata.version("keras")} if is_installed() else {}


def private_api_changes() -> Availability | None:
    """Private parts of Keras that differ from what isotrain expects; None without any, or without Keras.

    Imports Keras, on the framework of `set_backend`.
    """
    if not is_installed():
        return None
    from isotrain.adapters.common import private_api
    from isotrain.adapters.keras import private as keras_private

    return private_api.private_api_changes("Keras", metadata.version("keras"), keras_private.PROBES)


def set_backend(framework: str) -> None:
    """Selects Keras' backend and defers its slow imports; call before anything imports Keras.

    Raises:
        PlanError: Keras is already imported with another backend, which cannot be changed.
    """
    if "keras" in sys.modules:
        active = sys.modules["keras"].backend.backend()
        if active != framework:
            raise PlanError(
                f"Keras already runs on {active!r} in this process, and this backend needs"
                f" {framework!r}. Keras can run on one framework per process: use isotrain.run or"
                f" isotrain.launch, which start processes of their own, or set"
                f" {ENVIRONMENT_VARIABLE}={framework} before Keras is imported."
            )
        return
    os.environ[ENVIRONMENT_VARIABLE] = framework
    importlib.import_module(LAZY_IMPORT)


def is_keras_instance(value: Any, kind: Literal["Layer", "Loss", "Metric"]) -> bool:
    """Whether a value is an instance of a Keras class; False if Keras has not been imported."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(value, getattr(keras, kind))
