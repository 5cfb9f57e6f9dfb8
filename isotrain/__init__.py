"""isotrain: one training spec, any data-parallel backend, the same result."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isotrain.core.api import launch, measured_plan, open_session, plan, run
    from isotrain.core.check.checking import check
    from isotrain.core.check.findings import CheckResult, Finding
    from isotrain.core.comparison.api import compare
    from isotrain.core.comparison.records import Comparison
    from isotrain.core.contracts.adapter import Adapter
    from isotrain.core.contracts.capabilities import Capability
    from isotrain.core.contracts.group import ReplicaGroup
    from isotrain.core.contracts.launcher import Launcher
    from isotrain.core.contracts.logger import Logger
    from isotrain.core.contracts.strategy import Conserved, Strategy
    from isotrain.core.data import sources
    from isotrain.core.data.batches import DataSet
    from isotrain.core.errors import (
        BackendUnavailableError,
        DataError,
        IsotrainError,
        PlanError,
        PluginError,
        RunFailedError,
        SpecError,
        UnsupportedError,
    )
    from isotrain.core.parity.engine import parity
    from isotrain.core.parity.records import Parity
    from isotrain.core.planning.make_plan import Plan
    from isotrain.core.plugins.hookspecs import API_VERSION, hookimpl
    from isotrain.core.plugins.host import register
    from isotrain.core.running.result import RunResult, read_result
    from isotrain.core.running.session import Session
    from isotrain.core.spec.files import load_spec
    from isotrain.core.spec.training_spec import TrainingSpec

__version__ = "0.1.0"

_ERRORS = (
    "BackendUnavailableError",
    "DataError",
    "IsotrainError",
    "PlanError",
    "PluginError",
    "RunFailedError",
    "SpecError",
    "UnsupportedError",
)
_HOMES = {
    "API_VERSION": "isotrain.core.plugins.hookspecs",
    "Adapter": "isotrain.core.contracts.adapter",
    "Capability": "isotrain.core.contracts.capabilities",
    "Comparison": "isotrain.core.comparison.records",
    "CheckResult": "isotrain.core.check.findings",
    "Conserved": "isotrain.core.contracts.strategy",
    "DataSet": "isotrain.core.data.batches",
    "Finding": "isotrain.core.check.findings",
    "Launcher": "isotrain.core.contracts.launcher",
    "Logger": "isotrain.core.contracts.logger",
    "Parity": "isotrain.core.parity.records",
    "Plan": "isotrain.core.planning.make_plan",
    "ReplicaGroup": "isotrain.core.contracts.group",
    "RunResult": "isotrain.core.running.result",
    "Session": "isotrain.core.running.session",
    "Strategy": "isotrain.core.contracts.strategy",
    "TrainingSpec": "isotrain.core.spec.training_spec",
    **dict.fromkeys(_ERRORS, "isotrain.core.errors"),
    "compare": "isotrain.core.comparison.api",
    "check": "isotrain.core.check.checking",
    "hookimpl": "isotrain.core.plugins.hookspecs",
    "launch": "isotrain.core.api",
    "load_spec": "isotrain.core.spec.files",
    "measured_plan": "isotrain.core.api",
    "open_session": "isotrain.core.api",
    "parity": "isotrain.core.parity.engine",
    "plan": "isotrain.core.api",
    "read_result": "isotrain.core.running.result",
    "register": "isotrain.core.plugins.host",
    "run": "isotrain.core.api",
}
"""Public name to the module it lives in, imported on first use."""
_MODULES = {"sources": "isotrain.core.data.sources"}

__all__ = [
    "API_VERSION",
    "Adapter",
    "BackendUnavailableError",
    "Capability",
    "Comparison",
    "CheckResult",
    "Conserved",
    "DataError",
    "DataSet",
    "Finding",
    "IsotrainError",
    "Launcher",
    "Logger",
    "Parity",
    "Plan",
    "PlanError",
    "PluginError",
    "ReplicaGroup",
    "RunFailedError",
    "RunResult",
    "Session",
    "SpecError",
    "Strategy",
    "TrainingSpec",
    "UnsupportedError",
    "compare",
    "check",
    "hookimpl",
    "launch",
    "load_spec",
    "measured_plan",
    "open_session",
    "parity",
    "plan",
    "read_result",
    "register",
    "run",
    "sources",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
