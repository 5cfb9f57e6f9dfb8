"""A process that joins an elastic run whose processes were started from outside, from any host."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.core.contracts.cluster_environment import ClusterLayout
from isotrain.core.contracts.job import Job
from isotrain.core.contracts.membership import newcomer_context
from isotrain.core.contracts.plan import Plan, plain_differences, split_backend
from isotrain.core.contracts.process import Address, ProcessContext, ProcessInfo
from isotrain.core.errors import IsotrainError, PeerLostError, PlanError
from isotrain.core.json_format import json_line
from isotrain.core.launching.processes.ports import PORT_LEASES
from isotrain.core.launching.run_directory.run_directory import JOIN_FILE, SPEC_FILE
from isotrain.core.planning.cluster_environment import cluster_info_of
from isotrain.core.planning.cluster_resources import ClusterResources
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.rendezvous import interfaces
from isotrain.core.rendezvous.join_server import JoinAddress
from isotrain.core.rendezvous.nonzero_rank import work_for_rank_zero
from isotrain.core.rendezvous.worker_group import checkpoint_inode, configuration
from isotrain.core.spec import import_strings
from isotrain.core.spec.loading import load_spec
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.encryption import TLS_VARIABLE, EncryptionOffer
from isotrain.core.transport.rank_zero_server import connect_to_rank_zero

_CONNECT_SECONDS = 5.0
_MAX_DIFFERENCES_SHOWN = 8

OnAnswer = Callable[[Mapping[str, Any]], None]


def join_run(run_directory: Path, on_answer: OnAnswer) -> None:
    """Joins a run as a further replica, and trains until its end.

    Args:
        run_directory: Run directory, as this host sees it.
        on_answer: Called with `starts`, the number of this process among all that have been in the run, and
            later with `joined`.

    Raises:
        PlanError: This process has another plan than the run, or other packages or plugins.
        IsotrainError: No run answers there, or it does not take this process, or it has failed.
    """
    try:
        address = JoinAddress.read(run_directory)
    except OSError as error:
        raise IsotrainError(
            f"{run_directory}: {JOIN_FILE}, which has the key to the run, cannot be read: {error.strerror}."
            " Only who has started the run can join it."
        ) from error
    spec = load_spec(run_directory / SPEC_FILE)
    offer = EncryptionOffer.from_folder(os.environ.get(TLS_VARIABLE, ""))
    try:
        connection = connect_to_rank_zero(
            address.host, [address.port], address.key, address.rank, _CONNECT_SECONDS, offer
        )
    except PeerLostError as error:
        raise PeerLostError(
            f"{run_directory}: rank 0 does not answer at port {address.port} of {address.host}. Either the"
            f" run has ended, or this host, {socket.gethostname()}, cannot reach it there: a run whose"
            " processes are on one host takes processes of that host alone."
        ) from error
    channel = Channel(connection)
    try:
        seconds = spec.timeouts.start  # processes join once those of the start train
        run = _JoinedRun.of(spec, _received(channel, "run", seconds))
        own = _own_address(channel, run.plan)
        host = _host_name()
        channel.send({"join": {"host": host, "address": own[0], "port": own[1]}})
        answer = _received(channel, "answer", seconds)
        if "refused" in answer:
            raise IsotrainError(f"{run_directory}: no replica joins: {answer['refused']}.")
    except BaseException:
        channel.close()
        raise

    def hear(answer: Mapping[str, Any]) -> None:
        if "failed" in answer:
            raise IsotrainError(f"{run_directory}: {answer['failed']}")
        on_answer(answer)

    hear(answer)
    context = run.context(answer["starts"], host, own, run_directory)
    work_for_rank_zero(run.job, run.resolved_spec, context, channel, hear)


def _received(channel: Channel, name: str, seconds: float) -> Mapping[str, Any]:
    """The field of the next message that has it; heartbeats of rank 0 may come before.

    Raises:
        PeerLostError: No such message comes in time.
    """
    deadline = time.monotonic() + seconds
    while message := channel.wait(max(0.0, deadline - time.monotonic())):
        header, _ = message
        if name in header:
            found: Mapping[str, Any] = header[name]
            return found
    raise PeerLostError("rank 0 of the run is gone, or sends nothing: the run may have ended.")


@dataclass(frozen=True)
class _JoinedRun:
    """The run, as this process has planned it.

    Attributes:
        resolved_spec: The run's spec with its plugins.
        job: The job.
        addresses: Address of each process of the start, by rank.
    """

    resolved_spec: ResolvedSpec
    job: Job
    addresses: tuple[Address, ...]

    @property
    def plan(self) -> Plan:
        """Plan of the run."""
        return self.job.plan

    @classmethod
    def of(cls, spec: TrainingSpec, description: Mapping[str, Any]) -> _JoinedRun:
        """Plans the run from its spec and what rank 0 says of it.

        Raises:
            PlanError: It does not come out as on rank 0, or its function or its checkpoints are not found.
        """
        host = plugin_manager(spec.plugins)
        resolved_spec = ResolvedSpec(spec, host)
        backend, layout = description["backend"], description["layout"]
        _require_equal(configuration(spec, host, backend), description["configuration"])
        processes = (
            ProcessInfo(**{**each, "replicas": tuple(each["replicas"])})
            for each in layout["processes"]
        )
        resources = ClusterResources(
            ClusterLayout(
                layout["launcher"],
                tuple(processes),
                layout["cores"],
                layout["gpus"],
                tuple(layout["notes"]),
            ),
            joins=True,
        )
        replicas = description["replicas"]
        plan = make_plan(resolved_spec, backend=backend, replicas=replicas, resources=resources)
        _require_equal({"plan": plan.to_dict()}, {"plan": description["plan"]})
        if checkpoint_inode(spec) != description["checkpoint_inode"]:
            assert spec.checkpoint is not None
            raise PlanError(
                "checkpoint.folder: every process writes its shard, and this host does not see"
                f" {spec.checkpoint.folder}, or sees another folder there. Choose one that all share, or"
                " a URL."
            )
        job = Job(
            _work(description["work"]),
            spec,
            plan,
            b"",
            selection.current(),
            may_stop=description["may_stop"],
        )
        addresses = tuple((str(host), int(port)) for host, port in description["addresses"])
        return cls(resolved_spec, job, addresses)

    def context(
        self, rank: int, host: str, address: Address, run_directory: Path
    ) -> ProcessContext:
        """Process context of this process, which has a number among all that have been in the run."""
        plan = self.plan
        start = ProcessContext(
            rank, plan.replicas, str(run_directory), plan.processes, self.addresses
        )
        return newcomer_context(start, rank, host, address)


def _require_equal(own: Mapping[str, Any], on_rank_zero: Mapping[str, Any]) -> None:
    """Requires the same values here as on rank 0.

    Raises:
        PlanError: They differ; names the fields.
    """
    found = plain_differences(on_rank_zero, json.loads(json_line(own)))
    if found:
        lines = [
            f"  {name} is {here!r:.120}, on rank 0 {there!r:.120}"
            for name, there, here in found[:_MAX_DIFFERENCES_SHOWN]
        ]
        more = "\n  ..." if len(found) > len(lines) else ""
        raise PlanError(
            "this process does not fit the run:\n"
            + "\n".join(lines)
            + f"{more}\nGive it the same files, packages and plugins."
        )


def _work(reference: str | None) -> Any:
    """The function that every process calls with its session.

    Raises:
        PlanError: This process cannot import it.
    """
    if reference is None:
        raise PlanError(
            "the run calls a function that no other program can import, as it is defined in the script that"
            " was started, or within a function. Put it into a module of its own."
        )
    return import_strings.resolve(reference)


def _host_name() -> str:
    """Name of this host, as its scheduler has it if there is one."""
    info = cluster_info_of(os.environ, plugin_manager())
    return (info and info.host) or socket.gethostname()


def _own_address(channel: Channel, plan: Plan) -> Address:
    """Address of this process, as the other hosts reach it, and the port of its backend."""
    requested = interfaces.requested_interface(None, os.environ)
    address = interfaces.interface_address(requested) or channel.local_address
    return address, PORT_LEASES.backend(split_backend(plan.backend)[0], address, None)
