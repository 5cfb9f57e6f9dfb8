"""Decides how the processes of a run come to be."""

from __future__ import annotations

import os

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.contracts.plan import DeviceKind, StartMethod
from isotrain.core.errors import PlanError, unknown_name
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import process

START_VARIABLE = "ISOTRAIN_START"
_WAYS = ("forked", "fresh")


def resolve_start_method(
    adapter: Adapter, engine: str, spec: TrainingSpec, device: DeviceKind
) -> StartMethod:
    """Has processes forked where what starts them, system and backend can, unless the person said no.

    Raises:
        PlanError: The variable by which a person says so has another value.
    """
    asked = os.environ.get(START_VARIABLE) or "forked"
    if asked not in _WAYS:
        raise PlanError(f"{START_VARIABLE}: {unknown_name('way to start processes', asked, _WAYS)}")
    if asked == "fresh":
        return StartMethod(why_fresh=f"{START_VARIABLE}=fresh")
    if engine != LOCAL:
        return StartMethod(why_fresh=f"{engine} starts each process by itself")
    obstacle = process.fork_obstacle()
    return (
        adapter.preload(spec, device=device)
        if obstacle is None
        else StartMethod(why_fresh=obstacle)
    )
