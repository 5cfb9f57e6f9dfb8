"""Starting and stopping Horovod inside a process, without `horovodrun`."""

from __future__ import annotations

import contextlib
import errno
import http.client
import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import psutil

from isotrain.adapters.horovod import mpi
from isotrain.adapters.horovod.private_api import ARRIVALS, GATE, RendezvousServer
from isotrain.plugin import (
    DATA,
    SHARD,
    STAGE,
    BackendConfig,
    DeviceMesh,
    IsotrainError,
    PeerLostError,
    PlanError,
    ProcessContext,
    Subgroups,
    environ_set,
    local_subgroup,
)

_POLL_S = 0.02
_REQUEST_TIMEOUT_S = 5.0
_MEBIBYTE = 1 << 20


def start(
    hvd: Any,
    context: ProcessContext,
    backend_config: BackendConfig,
    process_sets: Sequence[Any] = (),
) -> None:
    """Joins all processes of the run in one Horovod world. Called by every process.

    Args:
        hvd: The framework's Horovod module, `horovod.torch` or `horovod.tensorflow`.
        context: This process's place in the run; rank 0 opens the server at its rendezvous for the time
            of the start only.
        backend_config: Collective, timeout and the options that Horovod reads when it starts.
        process_sets: Horovod's, the same on every process; Horovod gives each its number.

    Raises:
        PlanError: The port of the rendezvous is taken.
        UnsupportedError: MPI was asked for, and did not start this process; or it was used here before, and
            is not asked for now.
        IsotrainError: A process did not come, or Horovod could not start.
    """
    if backend_config.collective == "mpi":
        mpi.begin(hvd.__name__.removeprefix("horovod."))
        _initialise(
            hvd, _common_variables(backend_config) | _mpi_variables(), context, process_sets
        )
    else:
        mpi.require_unused()
        with _rendezvous(context, backend_config.timeout):
            variables = _common_variables(backend_config) | _gloo_variables(context, backend_config)
            _initialise(hvd, variables, context, process_sets)
            _meet(hvd)


@contextlib.contextmanager
def single_process(hvd: Any) -> Iterator[None]:
    """Starts Horovod with this process alone, exchanges once, and stops in the end."""
    alone = {
        "HOROVOD_RANK": "0",
        "HOROVOD_SIZE": "1",
        "HOROVOD_GLOO_IFACE": _interface("127.0.0.1"),
    }
    with environ_set(alone | {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}):
        hvd.init()
    _meet(hvd)
    try:
        yield
    finally:
        hvd.shutdown()


def stop(hvd: Any) -> None:
    """Leaves the Horovod world. The caller sees to it that every process has got here."""
    hvd.shutdown()


class ProcessSets:
    """Horovod's process sets: the parts of a run in which collectives are made.

    Horovod can add sets while it runs only if all processes compare theirs in every one of its cycles.
    Instead it is started anew, once for every new division into parts that it was not started with.
    """

    def __init__(
        self,
        hvd: Any,
        context: ProcessContext,
        backend_config: BackendConfig,
        subgroups: Subgroups = (),
    ) -> None:
        """Starts Horovod.

        Args:
            hvd: As for `start`, as are context and setting.
            context: This process's place in the run.
            backend_config: What the plan resolved.
            subgroups: For which there are to be sets from the start; on every process the same.
        """
        self._hvd = hvd
        self._context = context
        self._backend_config = backend_config
        everyone = tuple(range(context.world_size))
        shared = dict.fromkeys(
            tuple(sorted(subgroup)) for subgroup in subgroups if len(subgroup) > 1
        )
        self._sets = {
            subgroup: hvd.ProcessSet(list(subgroup)) for subgroup in shared if subgroup != everyone
        }
        start(hvd, context, backend_config, list(self._sets.values()))

    def own(self, subgroups: Subgroups) -> Any:
        """The set of the part that this process is in; None where it is in none, or alone.

        Called by every process with the same parts, while it waits for no exchange.
        """
        shared = [tuple(sorted(subgroup)) for subgroup in subgroups if len(subgroup) > 1]
        everyone = tuple(range(self._hvd.size()))
        new = [
            subgroup for subgroup in shared if subgroup != everyone and subgroup not in self._sets
        ]
        if new:
            self._restart_with(new)
        own = local_subgroup(self._hvd.rank(), shared)
        return self._sets.get(own, self._hvd.global_process_set) if own else None

    def _restart_with(self, new: Sequence[tuple[int, ...]]) -> None:
        """Keeps the order of the sets, and so their numbers, which traced functions know."""
        self._sets = {part: self._hvd.ProcessSet(list(part)) for part in (*self._sets, *new)}
        _meet(self._hvd)
        stop(self._hvd)
        start(self._hvd, self._context, self._backend_config, list(self._sets.values()))


def sharding_process_sets(mesh: DeviceMesh) -> Subgroups:
    """Within which replicas exchange: all; those with the same part of the state; those with all parts."""
    return (*mesh.groups(DATA), *mesh.groups(SHARD))


def pipeline_process_sets(mesh: DeviceMesh) -> Subgroups:
    """Within which processes those of a pipeline run exchange: of a stage, of a replica, and two by two."""
    replicas = mesh.groups(STAGE)
    pairs = [
        (stages[number - 1], stages[number])
        for stages in replicas
        for number in range(len(stages))
        if len(stages) > 1
    ]
    return (*mesh.groups(DATA), *replicas, *pairs)


def _meet(hvd: Any) -> None:
    """Exchanges a number among all processes, also while a TensorFlow function is traced."""
    if hvd.__name__.endswith("torch"):
        import torch

        hvd.allreduce(torch.ones(1), op=hvd.Sum, name="isotrain.met")
        return
    import tensorflow as tf

    with tf.init_scope():
        hvd.allreduce(tf.ones(1), op=hvd.Sum, name="isotrain.met")


def _initialise(
    hvd: Any,
    variables: Mapping[str, str],
    context: ProcessContext,
    process_sets: Sequence[Any],
) -> None:
    try:
        with environ_set(variables):
            hvd.init(process_sets=list(process_sets) or None)
    except (ValueError, RuntimeError) as error:
        raise PeerLostError(
            f"Horovod could not start on rank {context.rank} of {context.world_size}: {error}"
            " Horovod writes the cause to this process's standard error, usually a process that did"
            " not start or whose host cannot be reached."
        ) from error
    if (hvd.rank(), hvd.size()) != (context.rank, context.world_size):
        raise IsotrainError(
            f"Horovod takes this process for rank {hvd.rank()} of {hvd.size()}, but it was started"
            f" as rank {context.rank} of {context.world_size}. Start it with a launcher of the same"
            " kind as the collective."
        )


def _common_variables(backend_config: BackendConfig) -> dict[str, str]:
    variables = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, math.floor(backend_config.timeout / 4))),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(2, math.ceil(backend_config.timeout))),
    }
    if "fusion_threshold_mb" in backend_config.options:
        size = float(backend_config.options["fusion_threshold_mb"]) * _MEBIBYTE
        variables["HOROVOD_FUSION_THRESHOLD"] = str(int(size))
    if "cycle_time_ms" in backend_config.options:
        variables["HOROVOD_CYCLE_TIME"] = str(float(backend_config.options["cycle_time_ms"]))
    return variables


def _mpi_variables() -> dict[str, str]:
    return {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}


def _gloo_variables(context: ProcessContext, backend_config: BackendConfig) -> dict[str, str]:
    """The variables that `horovodrun` would have set for this process."""
    host, port = context.rendezvous
    hosts = [peer.host for peer in context.peers]
    with_this_slot = [
        name for name in dict.fromkeys(hosts) if hosts.count(name) > context.local_rank
    ]
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_RANK": str(context.rank),
        "HOROVOD_SIZE": str(context.world_size),
        "HOROVOD_LOCAL_RANK": str(context.local_rank),
        "HOROVOD_LOCAL_SIZE": str(context.local_world_size),
        "HOROVOD_CROSS_RANK": str(with_this_slot.index(context.local_peer.host)),
        "HOROVOD_CROSS_SIZE": str(len(with_this_slot)),
        "HOROVOD_HOSTNAME": context.local_peer.host,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": _interface(context.local_peer.address),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, math.ceil(backend_config.timeout))),
    }


def _interface(host: str) -> str:
    """The network interface that carries this process's own address."""
    wanted = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(address.address in wanted for address in addresses):
            return name
    raise PlanError(
        f"This process's address is {host!r} ({', '.join(sorted(map(str, wanted)))}), but no network"
        f" interface of this machine has it. Interfaces: {', '.join(sorted(interfaces))}."
    )


@contextlib.contextmanager
def _rendezvous(context: ProcessContext, timeout: float) -> Iterator[None]:
    """Serves (rank 0) or waits for (other ranks) the coordinator until Horovod has started."""
    deadline = time.monotonic() + timeout
    host, port = context.rendezvous
    if context.rank != 0:
        _announce(context, deadline, timeout)
        yield
        return
    server = _open_server(host, port)
    try:
        _await_arrivals(server, context.world_size, deadline, timeout)
        server.open_gate()
        yield
    finally:
        server.stop()


def _open_server(host: str, port: int) -> RendezvousServer:
    try:
        return RendezvousServer(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PlanError(
                f"Port {port} on {host} is already in use, and Horovod's processes are to meet"
                " there. End the program that holds it, or choose another port."
            ) from error
        raise IsotrainError(f"Cannot listen on {host}:{port}: {error}.") from error


def _await_arrivals(
    server: RendezvousServer, world_size: int, deadline: float, timeout: float
) -> None:
    while missing := server.missing(world_size):
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, missing))
            raise PeerLostError(
                f"Of {world_size} processes, rank {ranks} did not come within {timeout:g} s."
            )
        time.sleep(_POLL_S)


def _announce(context: ProcessContext, deadline: float, timeout: float) -> None:
    """Tells rank 0 that this rank is there, and waits until rank 0 has heard of all.

    Horovod itself would end the process without an error if rank 0's server were late or went away.
    """
    host, port = context.rendezvous
    announced = False
    while True:
        try:
            if not announced:
                announced = _request(host, port, "PUT", str(context.rank)) == HTTPStatus.OK
            elif _request(host, port, "GET", GATE) == HTTPStatus.OK:
                return
            problem = "not all processes have come"
        except (OSError, http.client.HTTPException) as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"Rank {context.rank} waited {timeout:g} s for rank 0 at {host}:{port}: {problem}."
            )
        time.sleep(_POLL_S)


def _request(host: str, port: int, method: str, key: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT_S)
    try:
        connection.request(method, f"/{ARRIVALS}/{key}", body=b"here")
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()
