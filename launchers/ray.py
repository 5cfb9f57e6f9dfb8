"""Ray: an actor for each rank, in the places of a placement group."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal, get_args

from isotrain.plugin import (
    Allocation,
    Availability,
    HostSlots,
    PlanError,
    RankCommand,
    SchedulerLauncher,
    Submission,
)

_PROGRAM = (sys.executable, "-m", "isotrain.launchers.ray_main")

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class RayLauncher(SchedulerLauncher):
    """Has actors of Ray start the ranks, and their output come here."""

    name = "ray"
    summary = "actors of a Ray cluster, or of a new one on this machine"

    def __init__(
        self,
        workers: int = 1,
        cpus: float = 1,
        gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        placement: Placement = "PACK",
        address: str = "",
    ) -> None:
        """Takes what to ask Ray for, as `ScalingConfig` of Ray Train has it.

        Args:
            workers: How many, each of which is a rank.
            cpus: Of each, as Ray counts them.
            gpus: Of each.
            resources: Further resources of each, by the names that the cluster gives them.
            placement: How they are spread over hosts: `PACK`, `SPREAD`, `STRICT_PACK` (all on one) or
                `STRICT_SPREAD` (each on another).
            address: Of the cluster, as `ray.init` takes it; left out: the one of `RAY_ADDRESS`, else the one
                that this machine is in, else a new one on this machine.
        """
        if workers < 1:
            raise PlanError(f"ray: workers: expected at least 1, received {workers}.")
        if placement not in get_args(Placement):
            known = ", ".join(get_args(Placement))
            raise PlanError(f"ray: placement: expected one of {known}, received {placement!r}.")
        asked = {"CPU": cpus, "GPU": gpus, **(resources or {})}
        self._bundle = {name: count for name, count in asked.items() if count}
        if not self._bundle:
            raise PlanError("ray: cpus: a worker has to ask Ray for something; received 0.")
        self._workers = workers
        self._gpus = int(gpus)
        self._placement = placement
        self._address = address

    def availability(self) -> Availability:
        if find_spec("ray") is None:
            return Availability(False, None, "ray is not installed", "pip install ray")
        return Availability(True)

    def allocation(self) -> Allocation:
        if self._placement == "STRICT_PACK":
            return Allocation((HostSlots(self._workers, devices=self._workers * self._gpus),))
        return Allocation((HostSlots(1, devices=self._gpus),) * self._workers)

    def without(self, host: str) -> Mapping[str, Any]:
        if self._placement != "STRICT_SPREAD" or self._workers == 1:
            raise PlanError(
                f"ray: workers: only with placement=STRICT_SPREAD, which puts each on its own host, is it"
                f" known how many are left without {host}; received {self._workers} with {self._placement}."
            )
        return {"workers": self._workers - 1}

    def submission(self, command: RankCommand) -> Submission:
        bundle = ("--bundle", json.dumps(self._bundle))
        where = ("--placement", self._placement, "--address", self._address)
        names = [
            part
            for name in (*command.variables, *command.secret_variables)
            for part in ("-x", name)
        ]
        size = ("--workers", str(self._workers), *bundle)
        return Submission(((*_PROGRAM, *size, *where, *names, "--", *command.arguments),))
