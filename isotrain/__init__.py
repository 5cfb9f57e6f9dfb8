"""isotrain: one training spec, any data-parallel backend, the same result."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isotrain.core import sources
    from isotrain.core.adapter import Adapter
    from isotrain.core.api import launch, measured_plan, open_session, plan, run
    from isotrain.core.capabilities import Capability
    from isotrain.core.check.checking import check
    from isotrain.core.check.findings import CheckResult, Finding
    from isotrain.core.comparison.api import compare
    from isotrain.core.comparison.records import Comparison
    from isotrain.core.data import DataSet
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
    from isotrain.core.group import ReplicaGroup
    from isotrain.core.hookspecs import API_VERSION, hookimpl
    from isotrain.core.launcher import Launcher
    from isotrain.core.logger import Logger
    from isotrain.core.parity.engine import parity
    from isotrain.core.parity.records import Parity
    from isotrain.core.plan import Plan
    from isotrain.core.registry import register
    from isotrain.core.result import RunResult, read_result
    from isotrain.core.session import Session
    from isotrain.core.spec import TrainingSpec
    from isotrain.core.spec_io import load_spec
    from isotrain.core.strategy import Conserved, Strategy

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
    "API_VERSION": "isotrain.core.hookspecs",
    "Adapter": "isotrain.core.adapter",
    "Capability": "isotrain.core.capabilities",
    "Comparison": "isotrain.core.comparison.records",
    "CheckResult": "isotrain.core.check.findings",
    "Conserved": "isotrain.core.strategy",
    "DataSet": "isotrain.core.data",
    "Finding": "isotrain.core.check.findings",
    "Launcher": "isotrain.core.launcher",
    "Logger": "isotrain.core.logger",
    "Parity": "isotrain.core.parity.records",
    "Plan": "isotrain.core.plan",
    "ReplicaGroup": "isotrain.core.group",
    "RunResult": "isotrain.core.result",
    "Session": "isotrain.core.session",
    "Strategy": "isotrain.core.strategy",
    "TrainingSpec": "isotrain.core.spec",
    **dict.fromkeys(_ERRORS, "isotrain.core.errors"),
    "compare": "isotrain.core.comparison.api",
    "check": "isotrain.core.check.checking",
    "hookimpl": "isotrain.core.hookspecs",
    "launch": "isotrain.core.api",
    "load_spec": "isotrain.core.spec_io",
    "measured_plan": "isotrain.core.api",
    "open_session": "isotrain.core.api",
    "parity": "isotrain.core.parity.engine",
    "plan": "isotrain.core.api",
    "read_result": "isotrain.core.result",
    "register": "isotrain.core.registry",
    "run": "isotrain.core.api",
}
"""Public name to the module it lives in, imported on first use."""
_MODULES = {"sources": "isotrain.core.sources"}

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
