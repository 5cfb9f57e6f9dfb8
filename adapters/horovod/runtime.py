"""Starts and stops Horovod in a process, without `horovodrun`; Horovod's process sets."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

from isotrain.adapters.horovod import build_info, recorded
from isotrain.adapters.horovod.rendezvous import allow_waiting, rendezvous
from isotrain.plugin import (
    DATA,
    RECORDED,
    SHARD,
    STAGE,
    BackendConfig,
    DeviceMesh,
    IsotrainError,
    PeerLostError,
    PlanError,
    ProcessContext,
    Subgroups,
    UnsupportedError,
    environ_set,
    local_subgroup,
)

_MEBIBYTE = 1 << 20
_MPI_THREADS = 3
"""MPI_THREAD_MULTIPLE: Horovod calls MPI on its own thread."""


def start(
    hvd: Any,
    context: ProcessContext,
    backend_config: BackendConfig,
    process_sets: Sequence[Any] = (),
) -> None:
    """Initializes Horovod for all processes of the run. Collective.

    Args:
        hvd: Horovod module of the framework, `horovod.torch` or `horovod.tensorflow`.
        context: Context of this process. Rank 0 runs the rendezvous server, only during the start.
        backend_config: Collective, timeout, and the options that Horovod reads when it starts.
        process_sets: Horovod process sets, the same on every process; Horovod assigns their IDs.

    Raises:
        PlanError: The rendezvous port is in use.
        UnsupportedError: The collective is MPI, and no MPI launcher started this process; or Horovod has run
            over another library in this process.
        IsotrainError: A process did not arrive, or Horovod could not start.
    """
    if backend_config.collective == RECORDED:
        recorded.start(hvd, context, process_sets)
    elif backend_config.collective == "mpi":
        init_mpi(hvd.__name__.removeprefix("horovod."))
        _initialize(
            hvd, _common_variables(backend_config) | _mpi_variables(), context, process_sets
        )
    else:
        use_library("gloo")
        with rendezvous(context, backend_config.timeout) as address:
            variables = _common_variables(backend_config)
            variables |= _gloo_variables(context, backend_config, address)
            _initialize(hvd, variables, context, process_sets)
            _sync(hvd)


@contextlib.contextmanager
def single_process(hvd: Any) -> Iterator[None]:
    """Context in which Horovod runs with this process alone."""
    variables = {
        "HOROVOD_RANK": "0",
        "HOROVOD_SIZE": "1",
        "HOROVOD_GLOO_IFACE": _network_interface("127.0.0.1"),
    }
    use_library("gloo")
    with environ_set(variables | {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}):
        hvd.init()
    _sync(hvd)
    try:
        yield
    finally:
        hvd.shutdown()


def stop(hvd: Any) -> None:
    """Shuts Horovod down. Collective: the caller must make sure that every process has arrived here."""
    hvd.shutdown()


def abandon(hvd: Any) -> None:
    """Shuts Horovod down where other processes may be lost. Local.

    Processes that are there shut down together; a process that is not ends the connections of the others.
    """
    hvd.shutdown()
    allow_waiting()


class ProcessSets:
    """Horovod's process sets, one for each subgroup in which collectives run.

    Horovod can add sets while it runs only in its dynamic mode, in which all processes compare theirs in
    every cycle. Instead it is restarted once for every new division into subgroups.
    """

    def __init__(
        self,
        hvd: Any,
        context: ProcessContext,
        backend_config: BackendConfig,
    ) -> None:
        """Starts Horovod, with the process sets of the run's device mesh. Collective.

        Args:
            hvd: Horovod module of the framework.
            context: Context of this process.
            backend_config: Backend configuration of the plan.
        """
        self._hvd = hvd
        self._context = context
        self._backend_config = backend_config
        everyone = tuple(range(context.world_size))
        subgroups = subgroups_of(context.device_mesh)
        shared = dict.fromkeys(
            tuple(sorted(subgroup)) for subgroup in subgroups if len(set(subgroup)) > 1
        )
        self._sets = {
            subgroup: hvd.ProcessSet(list(subgroup)) for subgroup in shared if subgroup != everyone
        }
        start(hvd, context, backend_config, list(self._sets.values()))

    def local(self, subgroups: Subgroups) -> Any:
        """Process set of this process's subgroup; None if it is in none, or alone.

        Collective: called by every process with the same subgroups, with no collective in flight.
        """
        shared = [tuple(sorted(subgroup)) for subgroup in subgroups if len(subgroup) > 1]
        everyone = tuple(range(self._hvd.size()))
        new = [
            subgroup for subgroup in shared if subgroup != everyone and subgroup not in self._sets
        ]
        if new:
            self._restart_with(new)
        subgroup = local_subgroup(self._hvd.rank(), shared)
        return self._sets.get(subgroup, self._hvd.global_process_set) if subgroup else None

    def _restart_with(self, new: Sequence[tuple[int, ...]]) -> None:
        """Restarts Horovod with more sets; old ones keep their IDs, which traced functions use."""
        self._sets = {
            subgroup: self._hvd.ProcessSet(list(subgroup)) for subgroup in (*self._sets, *new)
        }
        if self._backend_config.collective != RECORDED:
            _sync(self._hvd)
            stop(self._hvd)
        start(self._hvd, self._context, self._backend_config, list(self._sets.values()))


def subgroups_of(mesh: DeviceMesh) -> Iterator[Sequence[int]]:
    """Subgroups in which a run communicates.

    They are replicas with equal shards, or processes of a stage or part; replicas that share one copy of the
    state; processes of a replica; and pairs of processes of neighbouring stages.
    """
    for axis in (DATA, SHARD, mesh.replica_axis):
        yield from mesh.groups(axis)
    for processes in mesh.groups(STAGE):
        for sender, receiver in itertools.permutations(processes, 2):
            stage = mesh.coordinates(sender)[STAGE]
            if mesh.coordinates(receiver)[STAGE] == (stage + 1) % mesh.size(STAGE):
                yield sender, receiver


def _sync(hvd: Any) -> None:
    """Waits for all processes by an all-reduce; works while a TensorFlow function is traced, too."""
    if hvd.__name__.endswith("torch"):
        import torch

        hvd.allreduce(torch.ones(1), op=hvd.Sum, name="isotrain.met")
        return
    import tensorflow as tf

    with tf.init_scope():
        hvd.allreduce(tf.ones(1), op=hvd.Sum, name="isotrain.met")


def _initialize(
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
            f"Horovod says that this process is rank {hvd.rank()} of {hvd.size()}, but it was started"
            f" as rank {context.rank} of {context.world_size}. Use a launcher that matches the"
            " collective."
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


def _gloo_variables(
    context: ProcessContext, backend_config: BackendConfig, rendezvous_address: tuple[str, int]
) -> dict[str, str]:
    """Environment variables that `horovodrun` would have set for this process."""
    host, port = rendezvous_address
    hosts = [process.host for process in context.processes]
    hosts_with_local_rank = [
        name for name in dict.fromkeys(hosts) if hosts.count(name) > context.local_rank
    ]
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_RANK": str(context.rank),
        "HOROVOD_SIZE": str(context.world_size),
        "HOROVOD_LOCAL_RANK": str(context.local_rank),
        "HOROVOD_LOCAL_SIZE": str(context.local_world_size),
        "HOROVOD_CROSS_RANK": str(hosts_with_local_rank.index(context.local_process.host)),
        "HOROVOD_CROSS_SIZE": str(len(hosts_with_local_rank)),
        "HOROVOD_HOSTNAME": context.local_process.host,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": _network_interface(context.address[0]),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, math.ceil(backend_config.timeout))),
    }


def _network_interface(host: str) -> str:
    """Name of the network interface that has an address of this host."""
    host_addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(address.address in host_addresses for address in addresses):
            return name
    raise PlanError(
        f"This process's address is {host!r} ({', '.join(sorted(map(str, host_addresses)))}), but no network"
        f" interface of this machine has it. Interfaces: {', '.join(sorted(interfaces))}."
    )


class _ProcessState:
    """State of this process."""

    library: str | None = None
    """What Horovod has run over, `gloo` or `mpi`."""


def init_mpi(framework: str) -> None:
    """Initializes MPI, unless it is. Called by every process of a run.

    MPI can be initialized only once in a process, and Horovod would finalize it with the first run.

    Args:
        framework: Framework whose Horovod library is used, `torch` or `tensorflow`.

    Raises:
        UnsupportedError: No MPI launcher started this process, or Horovod has run over Gloo in it.
    """
    if not build_info.started_by_mpi():
        raise UnsupportedError(
            "Horovod's mpi works only in processes started by mpirun, and this one was not. Use --launcher"
            " mpi (launcher= in Python), or the collective gloo."
        )
    use_library("mpi")
    build = build_info.installed(framework)
    assert build is not None
    library = ctypes.CDLL(
        str(build.extension)
    )  # it has loaded the MPI library, whose functions are found through it
    is_initialized = ctypes.c_int()
    library.MPI_Initialized(ctypes.byref(is_initialized))
    if not is_initialized:
        library.MPI_Init_thread(None, None, _MPI_THREADS, ctypes.byref(ctypes.c_int()))
        atexit.register(library.MPI_Finalize)


def use_library(library: str) -> None:
    """Refuses a start over another library than before in the same process.

    Horovod would abort after MPI. After Gloo, it would send over connections that are closed.

    Raises:
        UnsupportedError: Horovod has run over the other one.
    """
    used = _ProcessState.library
    if used is not None and used != library:
        raise UnsupportedError(
            f"Horovod has run over {used} in this process, and cannot run over {library} after that. Use"
            f" {used} again, or a separate program for each."
        )
    _ProcessState.library = library
