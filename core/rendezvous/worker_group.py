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

from isotrain.core.contracts.cluster_environment import ClusterInfo, ClusterLayout, ProcessSlot
from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.contracts.process import Peer, ProcessContext
from isotrain.core.errors import IsotrainError, PeerLostError, PlanError
from isotrain.core.launching.processes.ports import PORTS, require_port
from isotrain.core.planning.cluster_environment import claim
from isotrain.core.planning.cluster_resources import replicas_for
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.rendezvous import interfaces
from isotrain.core.rendezvous.consistency import (
    LocalRankAssignment,
    local_facts,
    plugins_of,
    require_equal,
)
from isotrain.core.rendezvous.port_leases import PORT_LEASES
from isotrain.core.rendezvous.rendezvous import (
    Facts,
    Rendezvous,
    RendezvousClient,
    RendezvousHost,
    announce_wait,
)
from isotrain.core.rendezvous.rendezvous_address import RendezvousAddress
from isotrain.core.rendezvous.shared_filesystem import checkpoint_token, marker_file
from isotrain.core.rendezvous.shared_secret import RunKey, shared_secret
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.files import is_url, make_folder
from isotrain.core.system.version import VERSION, versions
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.encryption import TLS_VARIABLE, EncryptionOffer
from isotrain.core.transport.rank_zero_server import (
    RankZeroServer,
    connect_to_rank_zero,
)

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

Load = Callable[[], tuple[TrainingSpec, PluginManager]]


@dataclass(frozen=True)
class WorkerGroup:
    """The processes of a joined run.

    Attributes:
        rendezvous: Of them.
        cast: What to train, and by what.
        layout: Where they are.
        addresses: Address and port of each, besides.
        port: After which rank 0 takes those of its other doors; None: any.
    """

    rendezvous: Rendezvous
    cast: ResolvedSpec
    layout: ClusterLayout
    addresses: Sequence[Mapping[str, Any]]
    port: int | None

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.rendezvous.place.rank

    def exchange_plan(self, plan: Plan, own: Path, resume: str | None) -> RunAssignment:
        """Has all processes agree on the plan, and learn what rank 0 has decided. Called by all.

        Args:
            plan: As this process has made it.
            own: On rank 0 the run's directory; elsewhere the folder to use where that cannot be seen.
            resume: What the run goes on from; of rank 0.

        Raises:
            PlanError: The plans differ, or a process cannot see what it needs.
        """
        require_equal(self.rendezvous, {"plan": plan.to_dict()})
        with self._decided(plan, own, resume) as decided:
            decision = self.rendezvous.agree({}, lambda told: decided)
            folder = Path(decision["directory"])
            sees = Path(decision["mark"]).is_file()
            self._require_shared(decision["kept"], decision["resume"])
        context = self._context(plan, folder if sees else own, decision["extra_ports"])
        return RunAssignment(context, folder, decision["resume"])

    @contextlib.contextmanager
    def _decided(self, plan: Plan, own: Path, resume: str | None) -> Iterator[dict[str, Any]]:
        """What rank 0 tells the others; within it they can see whether they see its folder."""
        if self.rank:
            yield {}
            return
        doors = PORT_LEASES.extra_ports(self.addresses[0]["address"], plan.extra_ports, self.port)
        told = {"directory": str(own.absolute()), "resume": _absolute(resume), "extra_ports": doors}
        with marker_file(own) as mark, self._checkpoints_marked(own, mark) as kept:
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
            folder = make_folder(Path(policy.folder).absolute(), "checkpoint.folder: it")
            with marker_file(folder) as kept:
                yield kept

    def _require_shared(self, kept: str | None, resume: str | None) -> None:
        """Refuses checkpoints that not all can reach."""
        host = self.layout.process_slots[self.rank].host
        sees = kept is None or Path(kept).is_file()
        blind = self.rendezvous.agree(
            {"host": host, "sees": sees, "finds": checkpoint_token(resume)}, _blind
        )
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
            for each, seat in zip(plan.processes, self.addresses, strict=True)
        )
        opened = tuple((host, port) for host, port in doors)
        return ProcessContext(self.rank, plan.replicas, str(own), peers, opened, plan.device_mesh)


@dataclass(frozen=True)
class RunAssignment:
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


def rendezvous(
    place: ClusterInfo,
    load: Load,
    *,
    backend: str,
    replicas: int | None,
    port: int | None,
    interface: str | None = None,
) -> WorkerGroup:
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
    terms = EncryptionOffer.from_folder(os.environ.get(TLS_VARIABLE, ""))
    given = plugin_manager().environment(place.environment).secret(os.environ)
    own = shared_secret(place, os.environ, given, is_certified=bool(terms.folder))
    key = RunKey.of(place, own, next(_numbers))
    over = interfaces.requested_interface(interface, os.environ)
    doorstep = RendezvousAddress.of(place, over)
    try:
        spec, host = load()
    except IsotrainError as error:
        _open(place, key, terms, doorstep, _UNKNOWN_SECONDS, port).fail(error)
        raise
    if replicas is not None:
        try:
            _require_as_many(place, ResolvedSpec(spec, host), backend, replicas)
        except IsotrainError as error:
            with contextlib.suppress(IsotrainError):  # it found nobody to tell
                _open(place, key, terms, doorstep, REFUSED_SECONDS, port).fail(error)
            raise
    meeting = _open(place, key, terms, doorstep, spec.timeouts.start, port)
    with meeting.broadcasting_errors():
        terms.require_available()
        asked = {"backend": backend, "replicas": replicas}
        require_equal(meeting, {"asked": asked, **_parts(spec, host, backend)})
        at = _own_address(meeting, over)
        facts = local_facts(place, at, PORT_LEASES.backend(split_backend(backend)[0], at, port))
        found = meeting.agree(facts, LocalRankAssignment(_reached_at(meeting, over)))
    process_slots = tuple(
        ProcessSlot(seat["host"], seat["local_rank"]) for seat in found["processes"]
    )
    notes = () if terms.tls is None else (_ENCRYPTED,)
    layout = ClusterLayout(place.environment, process_slots, found["cores"], found["gpus"], notes)
    return WorkerGroup(meeting, ResolvedSpec(spec, host), layout, found["processes"], port)


def _require_as_many(place: ClusterInfo, cast: ResolvedSpec, backend: str, replicas: int) -> None:
    """Refuses, before anybody is waited for, replicas that are not those of the processes."""
    adapter = cast.host.backend(split_backend(backend)[0])
    try:
        replicas_for(place.environment, place.world_size, adapter, cast.strategy, replicas)
    except PlanError as error:
        raise PlanError(f"{error} {claim(place)}") from error


def _parts(spec: TrainingSpec, host: PluginManager, backend: str) -> dict[str, Any]:
    """What every process must have the same of."""
    packages = host.backend(split_backend(backend)[0]).packages
    return {
        "spec": spec.to_dict(),
        "plugins": plugins_of(host),
        "versions": {"isotrain": VERSION, **versions(packages)},
    }


def _open(
    place: ClusterInfo,
    key: RunKey,
    terms: EncryptionOffer,
    doorstep: RendezvousAddress,
    seconds: float,
    port: int | None,
) -> Rendezvous:
    RendezvousHost.close_previous()
    told = place.port if port is None else port
    drawn = [PORTS[number] for number in key.numbers(_CANDIDATES, len(PORTS))]
    ports = drawn if told is None else [told]
    if place.rank == 0:
        at = doorstep.listen_address
        opened = PORT_LEASES.rendezvous(at, ports) if told is None else ports
        return RendezvousHost(place, key, seconds, RankZeroServer(at, opened, key.secret, terms))
    at = f"rank 0 at {doorstep.host}, ports {', '.join(map(str, ports))}"
    say = functools.partial(announce_wait, place, at, seconds)
    try:
        wire = connect_to_rank_zero(
            doorstep.host, ports, key.secret, place.rank, seconds, terms, say
        )
    except PeerLostError as error:
        raise PeerLostError(f"{error} {claim(place)}") from error
    return RendezvousClient(place, key, seconds, Channel(wire))


def _own_address(meeting: Rendezvous, interface: str) -> str:
    chosen = interfaces.interface_address(interface)
    if chosen is not None:
        return chosen
    return meeting.channel.local_address if isinstance(meeting, RendezvousClient) else ""


def _reached_at(meeting: Rendezvous, interface: str) -> Callable[[Sequence[Facts]], str]:
    """How rank 0 finds its own address out: by those who have called it."""

    def own(told: Sequence[Facts]) -> str:
        assert isinstance(meeting, RendezvousHost)
        return _own_address(meeting, interface) or meeting.reachable_address(told)

    return own
