"""The worker group: processes that were started from outside, after their rendezvous."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.core.contracts.cluster_environment import ClusterInfo, ClusterLayout
from isotrain.core.contracts.job import Job
from isotrain.core.contracts.plan import Plan, split_backend
from isotrain.core.contracts.process import Address, ProcessContext, ProcessInfo
from isotrain.core.errors import IsotrainError, PeerLostError, PlanError
from isotrain.core.launching.processes.ports import PORT_LEASES, PORTS, require_port
from isotrain.core.planning.backend_choice import resolve_backend
from isotrain.core.planning.cluster_environment import explain_rank
from isotrain.core.planning.cluster_resources import replicas_for
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.rendezvous import interfaces
from isotrain.core.rendezvous.consistency import (
    LocalRankAssignment,
    checkpoint_token,
    local_facts,
    marker_file,
    plugins_of,
    require_equal,
)
from isotrain.core.rendezvous.rendezvous import (
    Facts,
    Rendezvous,
    RendezvousClient,
    RendezvousHost,
    announce_wait,
)
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
"""Number of ports that rank 0 tries for its server."""
_UNKNOWN_SECONDS = 60.0
"""Timeout of the rendezvous if the spec, which has it, cannot be read."""
REFUSED_SECONDS = 2.0
"""Timeout of the rendezvous if this process refuses the run: the others, with the same arguments, do too."""
_run_numbers = itertools.count()
"""Numbers of the runs that this program joins, in the same order on every rank."""

_ENCRYPTED = (
    f"events, output and returned values travel encrypted ({TLS_VARIABLE}); the tensors that the backend"
    " exchanges do not"
)

Load = Callable[[], tuple[TrainingSpec, PluginManager]]


@dataclass(frozen=True)
class WorkerGroup:
    """The processes of a run that were started from outside, after their rendezvous.

    Attributes:
        rendezvous: Connection of this process to the others.
        resolved_spec: Training spec with its plugins.
        layout: Hosts and resources of the processes.
        addresses: Address of each process, by rank.
        port: Extra ports of rank 0 follow this one; None: any free ports.
        offer: Encryption offer of this process.
    """

    rendezvous: Rendezvous
    resolved_spec: ResolvedSpec
    layout: ClusterLayout
    addresses: Sequence[Address]
    port: int | None
    offer: EncryptionOffer

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.rendezvous.cluster_info.rank

    def exchange_plan(self, job: Job, folder: Path) -> RunAssignment:
        """Checks that all processes have the same plan, and distributes rank 0's decisions. Collective.

        Args:
            job: Job as this process has made it; of `resume` and `may_stop` only rank 0's count.
            folder: On rank 0 the run directory; elsewhere a local folder to use if that is not visible.

        Raises:
            PlanError: The plans differ, or a process cannot see a file that it needs.
        """
        plan = job.plan
        require_equal(self.rendezvous, {"plan": plan.to_dict()})
        with self._rank_zero_decision(job, folder) as local_decision:
            decision = self.rendezvous.agree({}, lambda facts: local_decision)
            run_directory = Path(decision["directory"])
            is_visible = Path(decision["marker"]).is_file()
            self._require_shared(decision["checkpoint_marker"], decision["resume"])
        context = self._context(
            plan, run_directory if is_visible else folder, decision["extra_ports"]
        )
        return RunAssignment(context, run_directory, decision["resume"], decision["may_stop"])

    @contextlib.contextmanager
    def _rank_zero_decision(self, job: Job, folder: Path) -> Iterator[dict[str, Any]]:
        """Rank 0's decision (empty on other ranks); in this context its marker files exist."""
        if self.rank:
            yield {}
            return
        host, _ = self.addresses[0]
        decision = {
            "directory": str(folder.absolute()),
            "resume": _absolute(job.resume),
            "may_stop": job.may_stop,
            "extra_ports": PORT_LEASES.extra_ports(host, job.plan.extra_ports, self.port),
        }
        with (
            marker_file(folder) as marker,
            self._checkpoint_marker(marker) as checkpoint_marker,
        ):
            yield {**decision, "marker": marker, "checkpoint_marker": checkpoint_marker}

    @contextlib.contextmanager
    def _checkpoint_marker(self, run_marker: str) -> Iterator[str | None]:
        """Path of a file in the checkpoint folder; None if there is none, or it is behind a URL."""
        policy = self.resolved_spec.spec.checkpoint
        if policy is None or (policy.folder is not None and is_url(policy.folder)):
            yield None
        elif policy.folder is None:
            yield run_marker
        else:
            folder = make_folder(Path(policy.folder).absolute(), "checkpoint.folder: it")
            with marker_file(folder) as marker:
                yield marker

    def _require_shared(self, checkpoint_marker: str | None, resume: str | None) -> None:
        """Refuses checkpoint folders that not all processes see."""
        host = self.layout.processes[self.rank].host
        sees_folder = checkpoint_marker is None or Path(checkpoint_marker).is_file()
        facts = {"host": host, "sees_folder": sees_folder, "checkpoint": checkpoint_token(resume)}
        differing = self.rendezvous.agree(facts, _differing_hosts)
        if checkpoint_marker is not None and differing["sees_folder"]:
            raise PlanError(
                f"checkpoint: every process writes its shard, and {', '.join(differing['sees_folder'])}"
                f" cannot see {Path(checkpoint_marker).parent}. Choose a run directory (--output) or"
                " `checkpoint.folder` that all hosts share, or a URL."
            )
        if differing["checkpoint"]:
            raise PlanError(
                f"resume: every process reads the checkpoint, and {', '.join(differing['checkpoint'])} cannot"
                f" see {resume}, or sees another one there. Put it where all hosts find it, or behind a URL."
            )

    def _context(
        self, plan: Plan, folder: Path, extra_ports: Sequence[Sequence[Any]]
    ) -> ProcessContext:
        extra = tuple((host, port) for host, port in extra_ports)
        return ProcessContext(
            self.rank,
            plan.replicas,
            str(folder),
            plan.processes,
            tuple(self.addresses),
            extra,
            plan.device_mesh,
        )


@dataclass(frozen=True)
class RunAssignment:
    """Rank 0's decisions, as one process gets them.

    Attributes:
        context: Process context of this process.
        directory: Run directory, on rank 0's host.
        resume: Checkpoint that the run resumes from.
        may_stop: Whether rank 0 may request that training ends early.
    """

    context: ProcessContext
    directory: Path
    resume: str | None
    may_stop: bool


def _absolute(location: str | None) -> str | None:
    return location if location is None or is_url(location) else str(Path(location).absolute())


def _differing_hosts(facts: Sequence[Facts]) -> dict[str, Any]:
    """The hosts that do not see the files that rank 0 sees."""
    return {
        name: sorted({each["host"] for each in facts if each[name] != facts[0][name]})
        for name in ("sees_folder", "checkpoint")
    }


def join_worker_group(
    cluster_info: ClusterInfo,
    load: Load,
    *,
    backend: str | None,
    replicas: int | None,
    port: int | None,
    interface: str | None = None,
) -> WorkerGroup:
    """Connects this process to the other ranks, and checks that all have the same configuration. Collective.

    Args:
        cluster_info: Cluster info of this process.
        load: Reads the spec, and makes the plugin manager.
        backend: Backend, as for `run`.
        replicas: Number of replicas, as for `run`.
        port: Port of rank 0's server, as for `run`; the ports after it are for the backend. None: any.
        interface: Network interface, as for `run`.

    Raises:
        IsotrainError: The same on every process: a process has failed, is missing, or differs.
    """
    if port is not None:
        require_port(port)
    offer = EncryptionOffer.from_folder(os.environ.get(TLS_VARIABLE, ""))
    scheduler_secret = plugin_manager().environment(cluster_info.environment).secret(os.environ)
    secret = shared_secret(
        cluster_info, os.environ, scheduler_secret, is_certified=bool(offer.folder)
    )
    key = RunKey.of(cluster_info, secret, next(_run_numbers))
    requested = interfaces.requested_interface(interface, os.environ)
    address = interfaces.RendezvousAddress.of(cluster_info, requested)
    try:
        spec, host = load()
        backend = resolve_backend(backend, ResolvedSpec(spec, host))
    except IsotrainError as error:
        _connect(cluster_info, key, offer, address, _UNKNOWN_SECONDS, port).fail(error)
        raise
    if replicas is not None:
        try:
            _require_replicas(cluster_info, ResolvedSpec(spec, host), backend, replicas)
        except IsotrainError as error:
            with contextlib.suppress(IsotrainError):  # no other process was reached
                _connect(cluster_info, key, offer, address, REFUSED_SECONDS, port).fail(error)
            raise
    rendezvous = _connect(cluster_info, key, offer, address, spec.timeouts.start, port)
    with rendezvous.broadcasting_errors():
        offer.require_available()
        arguments = {"backend": backend, "replicas": replicas}
        require_equal(rendezvous, {"arguments": arguments, **configuration(spec, host, backend)})
        local = _local_address(rendezvous, requested)
        backend_port = PORT_LEASES.backend(split_backend(backend)[0], local, port)
        facts = local_facts(cluster_info, local, backend_port)
        assignment = rendezvous.agree(
            facts, LocalRankAssignment(_rank_zero_address(rendezvous, requested))
        )
    processes = tuple(
        ProcessInfo(rank, process["host"], process["local_rank"])
        for rank, process in enumerate(assignment["processes"])
    )
    addresses = [(process["address"], process["port"]) for process in assignment["processes"]]
    notes = () if offer.tls is None else (_ENCRYPTED,)
    layout = ClusterLayout(
        cluster_info.environment, processes, assignment["cores"], assignment["gpus"], notes
    )
    resolved_spec = ResolvedSpec(spec, host)
    return WorkerGroup(rendezvous, resolved_spec, layout, addresses, port, offer)


def _require_replicas(
    cluster_info: ClusterInfo, resolved_spec: ResolvedSpec, backend: str, replicas: int
) -> None:
    """Refuses, before the rendezvous, a number of replicas that the processes cannot have."""
    adapter = resolved_spec.plugins.backend(split_backend(backend)[0])
    environment, world_size = cluster_info.environment, cluster_info.world_size
    try:
        replicas_for(environment, world_size, adapter, resolved_spec.strategy, replicas)
    except PlanError as error:
        raise PlanError(f"{error} {explain_rank(cluster_info)}") from error


def configuration(spec: TrainingSpec, host: PluginManager, backend: str) -> dict[str, Any]:
    """Configuration that must be the same on every process: JSON values by name."""
    packages = host.backend(split_backend(backend)[0]).packages
    return {
        "spec": spec.to_dict(),
        "plugins": plugins_of(host),
        "versions": {"isotrain": VERSION, **versions(packages)},
    }


def checkpoint_inode(spec: TrainingSpec) -> int | None:
    """Number of the spec's own checkpoint folder in its file system, by which hosts see that they share it.

    None if checkpoints are in the run directory or behind a URL; 0 if there is no such folder.
    """
    folder = None if spec.checkpoint is None else spec.checkpoint.folder
    if folder is None or is_url(folder):
        return None
    path = Path(folder)
    return path.stat().st_ino if path.is_dir() else 0


def _connect(
    cluster_info: ClusterInfo,
    key: RunKey,
    offer: EncryptionOffer,
    address: interfaces.RendezvousAddress,
    timeout: float,
    port: int | None,
) -> Rendezvous:
    RendezvousHost.close_previous()
    fixed_port = cluster_info.port if port is None else port
    candidates = [PORTS[number] for number in key.numbers(_CANDIDATES, len(PORTS))]
    ports = candidates if fixed_port is None else [fixed_port]
    if cluster_info.rank == 0:
        listen = address.listen_address
        ordered = PORT_LEASES.rendezvous(listen, ports) if fixed_port is None else ports
        server = RankZeroServer(listen, ordered, key.secret, offer)
        return RendezvousHost(cluster_info, key, timeout, server)
    awaited = f"rank 0 at {address.host}, ports {', '.join(map(str, ports))}"
    announce = functools.partial(announce_wait, cluster_info, awaited, timeout)
    try:
        connection = connect_to_rank_zero(
            address.host, ports, key.secret, cluster_info.rank, timeout, offer, announce
        )
    except PeerLostError as error:
        raise PeerLostError(f"{error} {explain_rank(cluster_info)}") from error
    return RendezvousClient(cluster_info, key, timeout, Channel(connection))


def _local_address(rendezvous: Rendezvous, interface: str) -> str:
    """Address of this process: its interface's, else the one that reaches rank 0; empty on rank 0."""
    chosen = interfaces.interface_address(interface)
    if chosen is not None:
        return chosen
    return rendezvous.channel.local_address if isinstance(rendezvous, RendezvousClient) else ""


def _rank_zero_address(rendezvous: Rendezvous, interface: str) -> Callable[[Sequence[Facts]], str]:
    """Function by which rank 0 finds its address: its interface's, else the one that others have used."""

    def address(facts: Sequence[Facts]) -> str:
        assert isinstance(rendezvous, RendezvousHost)
        return _local_address(rendezvous, interface) or rendezvous.reachable_address(facts)

    return address
