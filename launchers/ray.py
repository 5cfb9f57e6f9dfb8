"""Ray: one actor for each rank, in the bundles of a placement group."""

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
    """Starts the ranks by Ray actors, and prints their output."""

    name = "ray"
    summary = "actors of a Ray cluster, or of a new one on this machine"

    def __init__(
        self,
        workers: int | None = None,
        cpus: float = 1,
        gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        placement: Placement = "PACK",
        address: str = "",
    ) -> None:
        """Keeps the options; compare `ScalingConfig` of Ray Train.

        Args:
            workers: Number of workers, each of which is a rank; left out: as many as the requested replicas
                take, else 1.
            cpus: CPUs of each worker, as Ray counts them.
            gpus: GPUs of each worker.
            resources: Custom resources of each worker, by their names in the cluster.
            placement: Placement strategy: `PACK`, `SPREAD`, `STRICT_PACK` (all workers on one host) or
                `STRICT_SPREAD` (each worker on its own host).
            address: Address of the cluster, as for `ray.init`; left out: `RAY_ADDRESS`, else the cluster
                that this machine is in, else a new one on this machine.
        """
        if workers is not None and workers < 1:
            raise PlanError(f"ray: workers: expected at least 1, received {workers}.")
        if placement not in get_args(Placement):
            expected = ", ".join(get_args(Placement))
            raise PlanError(f"ray: placement: expected one of {expected}, received {placement!r}.")
        requested = {"CPU": cpus, "GPU": gpus, **(resources or {})}
        self._bundle = {name: count for name, count in requested.items() if count}
        if not self._bundle:
            raise PlanError("ray: cpus: a worker must request some resource; received 0.")
        self._requested_workers = workers
        self._workers = workers or 1
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

    def why_not_elastic(self) -> str | None:
        return None

    def options_for(self, processes: int) -> Mapping[str, Any]:
        return {} if self._requested_workers else {"workers": processes}

    def without(self, host: str) -> Mapping[str, Any]:
        if self._placement != "STRICT_SPREAD" or self._workers == 1:
            raise PlanError(
                f"ray: workers: the number of workers without {host} is known only with"
                " placement=STRICT_SPREAD, one worker on each host; received"
                f" {self._workers} with {self._placement}."
            )
        return {"workers": self._workers - 1}

    def submission(self, command: RankCommand) -> Submission:
        bundle = ("--bundle", json.dumps(self._bundle))
        placement = ("--placement", self._placement, "--address", self._address)
        names = [
            part
            for name in (*command.variables, *command.secret_variables)
            for part in ("-x", name)
        ]
        size = ("--workers", str(self._workers), *bundle)
        elastic: tuple[str, ...] = ()
        if command.is_elastic:
            # The actors of lost ranks keep their bundles, which only the program that has them can give on.
            joining = json.dumps(command.joining("").arguments)
            elastic = ("--elastic", joining, "--replacements", str(command.replacements))
        options = (*size, *placement, *elastic, *names)
        return Submission(((*_PROGRAM, *options, "--", *command.arguments),))
