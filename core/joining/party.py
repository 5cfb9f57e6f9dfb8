"""The processes of a joined run, once they have met and agreed."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.core.contracts.environment import Place
from isotrain.core.contracts.layout import Layout, Spot
from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.contracts.process import LOCALHOST, Peer, ProcessContext
from isotrain.core.errors import IsotrainError, PlanError
from isotrain.core.joining import address
from isotrain.core.joining.channel import Channel
from isotrain.core.joining.facts import Seating, own_facts, plugins_of, require_equal
from isotrain.core.joining.key import RunKey
from isotrain.core.joining.meeting import Chair, Facts, Meeting, Member
from isotrain.core.joining.welcome import Welcome, reached
from isotrain.core.launching.ports import PORTS, Ports
from isotrain.core.planning.places import COORDINATOR_VARIABLE
from isotrain.core.plugins.host import PluginHost
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.urls import is_url
from isotrain.core.system.version import VERSION
from isotrain.core.system.versions import versions

"""`HOST` or `HOST:PORT` where rank 0 lets the others in, where the engine does not tell it."""
_CANDIDATES = 8
_UNKNOWN_SECONDS = 60.0
"""To meet where no spec says how long: it cannot be read."""
_numbers = itertools.count()
"""Of the runs that this program joins, which it does in the same order on every rank."""
_own_doors: dict[str, Ports] = {}
_own_ports: dict[str, tuple[Ports, int]] = {}
"""Kept for this process by address: a framework's server, once started, keeps its port."""

Load = Callable[[], tuple[TrainingSpec, PluginHost]]


@dataclass(frozen=True)
class Party:
    """The processes of a joined run.

    Attributes:
        meeting: Of them.
        spec: What to train.
        host: Knows the backends, strategies and models.
        layout: Where they are.
        seats: Address and port of each, besides.
    """

    meeting: Meeting
    spec: TrainingSpec
    host: PluginHost
    layout: Layout
    seats: Sequence[Mapping[str, Any]]

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.meeting.place.rank

    def agree(self, plan: Plan, directory: Path | None, resume: str | None) -> Agreed:
        """Has all processes agree on the plan, and learn what rank 0 has decided. Called by all.

        Args:
            plan: As this process has made it.
            directory: Of the run; of rank 0.
            resume: What the run goes on from; of rank 0.

        Raises:
            PlanError: The plans differ, or a process cannot see what it needs.
        """
        require_equal(self.meeting, {"plan": plan.to_dict()})
        doors = [] if directory is None else self._doors(plan)
        decided = {"directory": str(directory), "resume": _absolute(resume), "doors": doors}
        decision = self.meeting.settle({}, lambda told: decided)
        folder = Path(decision["directory"])
        sees = (folder / "spec.json").is_file()
        self._require_shared(folder, sees, decision["resume"])
        own = folder if sees else Path(tempfile.mkdtemp(prefix="isotrain-joined-"))
        return Agreed(self._context(plan, own, decision["doors"]), folder, decision["resume"])

    def _require_shared(self, folder: Path, sees: bool, resume: str | None) -> None:
        """Refuses checkpoints that not all can reach; a folder of the spec's own is taken to be shared."""
        host = self.layout.spots[self.rank].host
        finds = resume is None or is_url(resume) or Path(resume).exists()
        blind = self.meeting.settle({"host": host, "sees": sees, "finds": finds}, _blind)
        policy = self.spec.checkpoint
        if policy is not None and policy.folder is None and blind["sees"]:
            raise PlanError(
                f"checkpoint: every process writes its share, and {', '.join(blind['sees'])} cannot see"
                f" {folder}. Choose a run directory (--run-dir) or `checkpoint.folder` that all hosts share,"
                " or a URL."
            )
        if blind["finds"]:
            raise PlanError(
                f"resume: every process reads the checkpoint, and {', '.join(blind['finds'])} cannot see"
                f" {resume}. Put it where all hosts find it, or behind a URL."
            )

    def _doors(self, plan: Plan) -> list[list[Any]]:
        own = self.seats[0]["address"]
        if not plan.doors:
            return []
        ports = _own_doors.setdefault(own, Ports(own))  # kept: a lease ends with its object
        return [[own, port] for port in ports.take(plan.doors)]

    def _context(self, plan: Plan, own: Path, doors: Sequence[Sequence[Any]]) -> ProcessContext:
        peers = tuple(
            Peer(
                each.rank,
                each.host,
                seat["address"],
                seat["port"],
                each.local_rank,
                each.replicas,
                each.role,
            )
            for each, seat in zip(plan.processes, self.seats, strict=True)
        )
        opened = tuple((host, port) for host, port in doors)
        return ProcessContext(self.rank, plan.replicas, str(own), peers, opened, plan.mesh)


@dataclass(frozen=True)
class Agreed:
    """What a process needs to begin.

    Attributes:
        context: Its place.
        directory: The run's, on rank 0's host.
        resume: The checkpoint that the run goes on from.
    """

    context: ProcessContext
    directory: Path
    resume: str | None


def _absolute(location: str | None) -> str | None:
    return location if location is None or is_url(location) else str(Path(location).absolute())


def _blind(told: Sequence[Facts]) -> dict[str, Any]:
    """The hosts that do not find something."""
    return {name: sorted({t["host"] for t in told if not t[name]}) for name in ("sees", "finds")}


def gather(
    place: Place, load: Load, *, backend: str, replicas: int | None, port: int | None
) -> Party:
    """Meets the other processes of this one's run, and sees that all were told the same.

    Args:
        place: Of this process.
        load: Reads the spec, and makes the plugin host.
        backend: As for `run`.
        replicas: As for `run`.
        port: As for `run`: where rank 0 lets the others in; those after it are for the backend.

    Raises:
        IsotrainError: On every process the same: one of them has failed, or did not come, or differs.
    """
    key = RunKey.of(place, os.environ, next(_numbers))
    try:
        spec, host = load()
    except IsotrainError as error:
        _open(place, key, _UNKNOWN_SECONDS, port).fail(error)
        raise
    meeting = _open(place, key, spec.timeouts.start, port)
    with meeting.telling():
        parts = {
            "asked": {"backend": backend, "replicas": replicas},
            "spec": spec.to_dict(),
            "plugins": plugins_of(host),
            "versions": {
                "isotrain": VERSION,
                **versions(host.backend(split_backend(backend)[0]).packages),
            },
        }
        require_equal(meeting, parts)
        own = _own_address(meeting)
        facts = own_facts(place, own, _own_port(place, own, port))
        found = meeting.settle(facts, Seating(_reached_at(meeting)))
    spots = tuple(Spot(seat["host"], seat["local_rank"]) for seat in found["seats"])
    layout = Layout(place.engine, spots, found["cores"], found["gpus"], key.is_secret)
    return Party(meeting, spec, host, layout, found["seats"])


def _open(place: Place, key: RunKey, seconds: float, port: int | None) -> Meeting:
    where, told = _coordinator(place)
    first = [each for each in (port, told) if each is not None][:1]
    ports = first or [PORTS[number] for number in key.numbers(_CANDIDATES, len(PORTS))]
    if place.rank == 0:
        return Chair(place, key, seconds, Welcome(_listening_on(place, where), ports, key.secret))
    source = address.chosen_address(os.environ) or ""
    return Member(
        place, key, seconds, Channel(reached(where, ports, key.secret, place.rank, seconds, source))
    )


def _coordinator(place: Place) -> tuple[str, int | None]:
    """Where rank 0 is, and its port if somebody has said it."""
    host, _, port = os.environ.get(COORDINATOR_VARIABLE, "").strip().partition(":")
    if host:
        return host, int(port) if port else None
    if _is_on_one_host(place):
        return LOCALHOST, None
    found = place.coordinator or next(iter(place.hosts), None)
    if found is None:
        raise PlanError(
            f"{place.engine} does not tell its processes where rank 0 is. Set {COORDINATOR_VARIABLE} to"
            " the name or address of its host for all of them."
        )
    return found, None


def _is_on_one_host(place: Place) -> bool:
    return place.local_world_size == place.world_size or len(place.hosts) == 1


def _listening_on(place: Place, coordinator: str) -> str:
    """The address that rank 0 listens on; empty: on all, where nobody can know which one is meant."""
    chosen = address.chosen_address(os.environ)
    if chosen is not None:
        return chosen
    if _is_on_one_host(place):
        return LOCALHOST
    return address.own_address_of(coordinator) or ""


def _own_address(meeting: Meeting) -> str:
    chosen = address.chosen_address(os.environ)
    if chosen is not None:
        return chosen
    return meeting.channel.here if isinstance(meeting, Member) else ""


def _reached_at(meeting: Meeting) -> Callable[[Sequence[Facts]], str]:
    """How rank 0 finds its own address out: by those who have called it."""

    def own(told: Sequence[Facts]) -> str:
        assert isinstance(meeting, Chair)
        return _own_address(meeting) or meeting.reached_at(told)

    return own


def _own_port(place: Place, own: str, port: int | None) -> int:
    if own not in _own_ports:
        ports = Ports(own)
        first = None if port is None else port + 1 + (place.local_rank or 0)
        _own_ports[own] = ports, ports.take(1, first)[0]
    return _own_ports[own][1]
