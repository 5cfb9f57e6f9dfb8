"""Builds the `tf.distribute` strategies, and configures the devices that they run on."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import sys
import warnings
from collections.abc import Iterator

import tensorflow as tf

from isotrain.adapters.common.wait_for_server import wait_for_rank_zero
from isotrain.adapters.tensorflow.base import gpu
from isotrain.adapters.tensorflow.base.private_api import disable_heartbeat_timeout
from isotrain.plugin import BackendConfig, PlanError, ProcessContext

_CROSS_DEVICE_OPS = {
    "hierarchical-copy": tf.distribute.HierarchicalCopyAllReduce,
    "one-device": tf.distribute.ReductionToOneDevice,
    "nccl": tf.distribute.NcclAllReduce,
}
_COMMUNICATION = tf.distribute.experimental.CommunicationImplementation
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Environment variables that send gRPC through a proxy, also to this machine."""
_NO_PROXY = "no_grpc_proxy"
"""Overrides `no_proxy` for gRPC."""


def use_threads(threads: int) -> None:
    """Sets the size of the compute thread pool; warns where TensorFlow already runs with another."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError:
        current = tf.config.threading.get_intra_op_parallelism_threads()
        warnings.warn(
            f"TensorFlow already runs with {current} threads in this process instead of the plan's"
            f" {threads}. Start a new process with isotrain.run or isotrain.launch.",
            stacklevel=2,
        )


def mirrored_strategy(
    backend_config: BackendConfig, context: ProcessContext
) -> tf.distribute.Strategy:
    """Strategy with one replica per device of this process: GPUs, or logical CPUs.

    Raises:
        PlanError: This process has fewer devices than local replicas.
    """
    count = len(context.local_replicas)
    kind = backend_config.device.upper()
    if kind == "CPU":
        split_cpu(count)
    else:
        gpu.use_all()
    available = len(tf.config.list_logical_devices(kind))
    if available < count:
        raise PlanError(
            f"tf-mirrored: expected a {kind} device for each replica ({count}), and this process has"
            f" {available}. TensorFlow fixes its devices once per process, at its first operation:"
            " start each run in a new process (isotrain.run does)."
        )
    return tf.distribute.MirroredStrategy(
        [f"{kind}:{index}" for index in range(count)],
        cross_device_ops=_CROSS_DEVICE_OPS[backend_config.collective](),
    )


def split_cpu(count: int) -> None:
    """Makes logical CPU devices, unless TensorFlow already runs."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    with contextlib.suppress(RuntimeError):
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        )


def multi_worker_strategy(
    backend_config: BackendConfig, context: ProcessContext, start_timeout: float
) -> tf.distribute.Strategy:
    """Strategy with one replica per process. Collective: returns once every process has called it.

    TensorFlow's own timeout of collectives stays off: it keeps a thread asleep for that long after every
    single one, tens of thousands in a minute of small steps. The launcher watches the progress instead.

    Args:
        backend_config: Device, collective and options of this run.
        context: Process context of this process.
        start_timeout: Seconds until the process is aborted.
    """
    gpu.use_local_gpu(backend_config, context)
    gpus = 1 if backend_config.device == "gpu" else 0
    bypass_proxies(context)
    with abort_after(start_timeout):
        wait_for_rank_zero(context)
        addresses = server_addresses(context)
        return _cluster_strategy(addresses, context.rank, gpus, backend_config.collective)


def server_addresses(context: ProcessContext) -> tuple[str, ...]:
    """Addresses (`host:port`) of the servers of all processes, by rank."""
    return tuple(f"{host}:{port}" for host, port in context.addresses)


def bypass_proxies(context: ProcessContext) -> None:
    """Has gRPC connect to the processes of a run without a proxy; other hosts stay as configured.

    gRPC reads the variables on every connection, so they stay set for the life of this process.
    """
    if not any(map(os.environ.get, _PROXIES)):
        return
    direct = os.environ.get(_NO_PROXY, os.environ.get("no_proxy", "")).split(",")
    hosts = dict.fromkeys([*filter(None, direct), *(host for host, _ in context.addresses)])
    os.environ[_NO_PROXY] = ",".join(hosts)


@functools.cache
def _cluster_strategy(
    addresses: tuple[str, ...], rank: int, gpus: int, collective: str
) -> tf.distribute.Strategy:
    """Cached: TensorFlow has one server per process, and starting it anew would disconnect the peers."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(addresses)}),
        task_type="worker",
        task_id=rank,
        num_accelerators={"GPU": gpus},
        rpc_layer="grpc",
    )
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=_COMMUNICATION[collective.upper()],
    )
    disable_heartbeat_timeout(len(addresses))
    return tf.distribute.MultiWorkerMirroredStrategy(resolver, options)


@contextlib.contextmanager
def abort_after(seconds: float) -> Iterator[None]:
    """Aborts the process, with a traceback, if the body takes longer than this number of seconds.

    The body may wait in native code for a peer that never starts; nothing else can interrupt it.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def is_peer_error(error: BaseException) -> bool:
    """Whether a TensorFlow error means that another process is gone, or did not answer in time."""
    classes = (
        *(tf.errors.UnavailableError, tf.errors.DeadlineExceededError),
        *(tf.errors.CancelledError, tf.errors.AbortedError),
    )
    return isinstance(error, classes)
