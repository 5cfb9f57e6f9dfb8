"""The processes of a joined run, once they have met and agreed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.core.contracts.environment import Place
from isotrain.core.contracts.layout import Layout, Spot
from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.contracts.process import Peer, ProcessContext
from isotrain.core.errors import IsotrainError, PeerLostError, PlanError
from isotrain.core.joining import address
from isotrain.core.joining.channel import Channel
from isotrain.core.joining.doorstep import Doorstep
from isotrain.core.joining.facts import Seating, own_facts, plugins_of, require_equal
from isotrain.core.joining.key import RunKey, secret_of
from isotrain.core.joining.meeting import Chair, Facts, Meeting, Member
from isotrain.core.joining.own_ports import OWN_PORTS
from isotrain.core.joining.sight import marked, token_of
from isotrain.core.joining.welcome import Welcome, reached, say_awaited
from isotrain.core.launching.ports import PORTS, require_port
from isotrain.core.planning.on_layout import replicas_for
from isotrain.core.planning.places import claim
from isotrain.core.plugins.cast import Cast
from isotrain.core.plugins.host import PluginHost, plugin_host
from isotrain.core.served.terms import TLS_VARIABLE, Terms
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.folders import made_folder
from isotrain.core.system.urls import is_url
from isotrain.core.system.version import VERSION
from isotrain.core.system.versions import versions

_CANDIDATES = 8
"""Ports that rank 0 tries for its door."""
_UNKNOWN_SECONDS = 60.0
"""To meet where no spec says how long: it cannot be read."""
REFUSED_SECONDS = 2.0
"""To meet where this process takes part in no run: the others see that by themselves, told the same."""
_numbers = itertools.count()
"""Of the runs that this program joins, which it does in the same order on every rank."""

_ENCRYPTED = (
    f"events, output and returned values travel encrypted ({TLS_VARIABLE}); the tensors that the backend"
    " exchanges do not"
)

Load = Callable[[], tuple[TrainingSpec, PluginHost]]


@dataclass(frozen=True)
class Party:
    """The processes of a joined run.

    Attributes:
        meeting: Of them.
        cast: What to train, and by what.
        layout: Where they are.
        seats: Address and port of each, besides.
        port: After which rank 0 takes those of its other doors; None: any.
    """

    meeting: Meeting
    cast: Cast
    layout: Layout
    seats: Sequence[Mapping[str, Any]]
    port: int | None

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.meeting.place.rank

    def agree(self, plan: Plan, own: Path, resume: str | None) -> Agreed:
        """Has all processes agree on the plan, and learn what rank 0 has decided. Called by all.

        Args:
            plan: As this process has made it.
            own: On rank 0 the run's directory; elsewhere the folder to use where that cannot be seen.
            resume: What the run goes on from; of rank 0.

        Raises:
            PlanError: The plans differ, or a process cannot see what it needs.
        """
        require_equal(self.meeting, {"plan": plan.to_dict()})
        with self._decided(plan, own, resume) as decided:
            decision = self.meeting.settle({}, lambda told: decided)
            folder = Path(decision["directory"])
            sees = Path(decision["mark"]).is_file()
            self._require_shared(decision["kept"], decision["resume"])
        context = self._context(plan, folder if sees else own, decision["doors"])
        return Agreed(context, folder, decision["resume"])

    @contextlib.contextmanager
    def _decided(self, plan: Plan, own: Path, resume: str | None) -> Iterator[dict[str, Any]]:
        """What rank 0 tells the others; within it they can see whether they see its folder."""
        if self.rank:
            yield {}
            return
        doors = OWN_PORTS.doors(self.seats[0]["address"], plan.doors, self.port)
        told = {"directory": str(own.absolute()), "resume": _absolute(resume), "doors": doors}
        with marked(own) as mark, self._checkpoints_marked(own, mark) as kept:
            yield {**told, "mark": mark, "kept": kept}

    @contextlib.contextmanager
    def _checkpoints_marked(self, own: Path, mark: str) -> Iterator[str | None]:
        """Within it, who sees the file that it gives sees where checkpoints are written; None: all do."""
        policy = self.cast.spec.checkpoint
        if policy is None or (policy.folder is not None and is_url(policy.folder)):
            yield None
        elif policy.folder is None:
            yield mark
        else:
            folder = made_folder(Path(policy.folder).absolute(), "checkpoint.folder: it")
            with marked(folder) as kept:
                yield kept

    def _require_shared(self, kept: str | None, resume: str | None) -> None:
        """Refuses checkpoints that not all can reach."""
        host = self.layout.spots[self.rank].host
        sees = kept is None or Path(kept).is_file()
        blind = self.meeting.settle({"host": host, "sees": sees, "finds": token_of(resume)}, _blind)
        if kept is not None and blind["sees"]:
            raise PlanError(
                f"checkpoint: every process writes its share, and {', '.join(blind['sees'])} cannot see"
                f" {Path(kept).parent}. Choose a run directory (--run-dir) or `checkpoint.folder` that all"
                " hosts share, or a URL."
            )
        if blind["finds"]:
            raise PlanError(
                f"resume: every process reads the checkpoint, and {', '.join(blind['finds'])} cannot see"
                f" {resume}, or finds another one there. Put it where all hosts find it, or behind a URL."
            )

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
    """The hosts that do not find what rank 0 finds."""
    names = ("sees", "finds")
    return {n: sorted({t["host"] for t in told if t[n] != told[0][n]}) for n in names}


def gather(
    place: Place,
    load: Load,
    *,
    backend: str,
    replicas: int | None,
    port: int | None,
    interface: str | None = None,
) -> Party:
    """Meets the other processes of this one's run, and sees that all were told the same.

    Args:
        place: Of this process.
        load: Reads the spec, and makes the plugin host.
        backend: As for `run`.
        replicas: As for `run`.
        port: As for `run`: where rank 0 lets the others in; those after it are for the backend.
        interface: As for `run`.

    Raises:
        IsotrainError: On every process the same: one of them has failed, or did not come, or differs.
    """
    if port is not None:
        require_port(port)
    terms = Terms.of(os.environ.get(TLS_VARIABLE, ""))
    given = plugin_host().environment(place.engine).secret(os.environ)
    own = secret_of(place, os.environ, given, is_certified=bool(terms.folder))
    key = RunKey.of(place, own, next(_numbers))
    over = address.asked_interface(interface, os.environ)
    doorstep = Doorstep.of(place, over)
    try:
        spec, host = load()
    except IsotrainError as error:
        _open(place, key, terms, doorstep, _UNKNOWN_SECONDS, port).fail(error)
        raise
    if replicas is not None:
        try:
            _require_as_many(place, Cast(spec, host), backend, replicas)
        except IsotrainError as error:
            with contextlib.suppress(IsotrainError):  # it found nobody to tell
                _open(place, key, terms, doorstep, REFUSED_SECONDS, port).fail(error)
            raise
    meeting = _open(place, key, terms, doorstep, spec.timeouts.start, port)
    with meeting.telling():
        terms.require_usable()
        asked = {"backend": backend, "replicas": replicas}
        require_equal(meeting, {"asked": asked, **_parts(spec, host, backend)})
        at = _own_address(meeting, over)
        facts = own_facts(place, at, OWN_PORTS.backend(split_backend(backend)[0], at, port))
        found = meeting.settle(facts, Seating(_reached_at(meeting, over)))
    spots = tuple(Spot(seat["host"], seat["local_rank"]) for seat in found["seats"])
    remarks = () if terms.tls is None else (_ENCRYPTED,)
    layout = Layout(place.engine, spots, found["cores"], found["gpus"], remarks)
    return Party(meeting, Cast(spec, host), layout, found["seats"], port)


def _require_as_many(place: Place, cast: Cast, backend: str, replicas: int) -> None:
    """Refuses, before anybody is waited for, replicas that are not those of the processes."""
    adapter = cast.host.backend(split_backend(backend)[0])
    try:
        replicas_for(place.engine, place.world_size, adapter, cast.strategy, replicas)
    except PlanError as error:
        raise PlanError(f"{error} {claim(place)}") from error


def _parts(spec: TrainingSpec, host: PluginHost, backend: str) -> dict[str, Any]:
    """What every process must have the same of."""
    packages = host.backend(split_backend(backend)[0]).packages
    return {
        "spec": spec.to_dict(),
        "plugins": plugins_of(host),
        "versions": {"isotrain": VERSION, **versions(packages)},
    }


def _open(
    place: Place, key: RunKey, terms: Terms, doorstep: Doorstep, seconds: float, port: int | None
) -> Meeting:
    Chair.close_earlier()
    told = place.port if port is None else port
    drawn = [PORTS[number] for number in key.numbers(_CANDIDATES, len(PORTS))]
    ports = drawn if told is None else [told]
    if place.rank == 0:
        at = doorstep.listening
        opened = OWN_PORTS.meeting(at, ports) if told is None else ports
        return Chair(place, key, seconds, Welcome(at, opened, key.secret, terms))
    at = f"rank 0 at {doorstep.called}, ports {', '.join(map(str, ports))}"
    say = functools.partial(say_awaited, place, at, seconds)
    try:
        wire = reached(doorstep.called, ports, key.secret, place.rank, seconds, terms, say)
    except PeerLostError as error:
        raise PeerLostError(f"{error} {claim(place)}") from error
    return Member(place, key, seconds, Channel(wire))


def _own_address(meeting: Meeting, interface: str) -> str:
    chosen = address.chosen_address(interface)
    if chosen is not None:
        return chosen
    return meeting.channel.here if isinstance(meeting, Member) else ""


def _reached_at(meeting: Meeting, interface: str) -> Callable[[Sequence[Facts]], str]:
    """How rank 0 finds its own address out: by those who have called it."""

    def own(told: Sequence[Facts]) -> str:
        assert isinstance(meeting, Chair)
        return _own_address(meeting, interface) or meeting.reached_at(told)

    return own
