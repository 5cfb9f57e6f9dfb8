"""Chooses the start method of a run's processes: forked from a fork server, or fresh interpreters."""

from __future__ import annotations

import os

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.contracts.plan import DeviceKind, StartMethod
from isotrain.core.errors import PlanError, unknown_name
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import process

START_VARIABLE = "ISOTRAIN_START"
_START_METHODS = ("forked", "fresh")


def resolve_start_method(
    adapter: Adapter, launcher: str, spec: TrainingSpec, device: DeviceKind
) -> StartMethod:
    """Chooses `forked` if launcher, system and backend support it, and `ISOTRAIN_START` is not `fresh`.

    Args:
        adapter: Adapter of the backend.
        launcher: Name of the launcher.
        spec: Training spec.
        device: Device of the replicas.

    Raises:
        PlanError: `ISOTRAIN_START` has another value than `forked` and `fresh`.
    """
    requested = os.environ.get(START_VARIABLE) or "forked"
    if requested not in _START_METHODS:
        raise PlanError(
            f"{START_VARIABLE}: {unknown_name('way to start processes', requested, _START_METHODS)}"
        )
    if requested == "fresh":
        return StartMethod(why_fresh=f"{START_VARIABLE}=fresh")
    if launcher != LOCAL:
        return StartMethod(why_fresh=f"{launcher} starts each process itself")
    obstacle = process.fork_obstacle()
    return (
        adapter.preload(spec, device=device)
        if obstacle is None
        else StartMethod(why_fresh=obstacle)
    )
