"""Makes the `tf.distribute` strategies, and claims the devices that they run on."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import sys
import warnings
from collections.abc import Iterable, Iterator

import tensorflow as tf

from isotrain.adapters.common.wait_for_server import wait_for_rank_zero
from isotrain.adapters.tensorflow.base.private_api import disable_silence_limit
from isotrain.plugin import BackendConfig, Peer, PlanError, ProcessContext

_CROSS_DEVICE_OPS = {
    "hierarchical-copy": tf.distribute.HierarchicalCopyAllReduce,
    "one-device": tf.distribute.ReductionToOneDevice,
    "nccl": tf.distribute.NcclAllReduce,
}
_COMMUNICATION = tf.distribute.experimental.CommunicationImplementation
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that send gRPC through a proxy, also to this machine."""
_NO_PROXY = "no_grpc_proxy"
"""Where it is set, gRPC does not look at `no_proxy`."""


def use_threads(threads: int) -> None:
    """Sets the size of this process's compute pool; warns where TensorFlow already runs with another."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError:
        given = tf.config.threading.get_intra_op_parallelism_threads()
        warnings.warn(
            f"TensorFlow already runs with {given} threads in this process, and not with the"
            f" {threads} of the plan. Start a process of its own with isotrain.run or launch.",
            stacklevel=2,
        )


def use_local_gpu(backend_config: BackendConfig, context: ProcessContext) -> None:
    """Leaves this process the GPU of its local rank, and no more of its memory than it needs.

    Raises:
        PlanError: There are fewer GPUs than processes on this host.
    """
    if backend_config.device == "cpu":
        return
    gpus = tf.config.list_physical_devices("GPU")
    if context.local_rank >= len(gpus):
        raise PlanError(
            f"process {context.rank} needs GPU {context.local_rank} of its host, and TensorFlow sees"
            f" {len(gpus)}. Use at most one replica per GPU, or device: cpu."
        )
    tf.config.set_visible_devices(gpus[context.local_rank], "GPU")
    tf.config.experimental.set_memory_growth(gpus[context.local_rank], True)


def mirrored_strategy(
    backend_config: BackendConfig, context: ProcessContext
) -> tf.distribute.Strategy:
    """One replica per device of this process: GPUs, or logical CPUs."""
    count = len(context.local_replicas)
    kind = backend_config.device.upper()
    if kind == "CPU":
        split_cpu(count)
    else:
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
    available = len(tf.config.list_logical_devices(kind))
    if available < count:
        raise PlanError(
            f"tf-mirrored: {count} replicas need as many {kind} devices, and this process has"
            f" {available}. Devices are laid out once per process, before TensorFlow's first"
            " operation: start each run in a process of its own (isotrain.run does)."
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
    """One replica in each process. Called by every process; returns once all have called it.

    TensorFlow's own limit on a collective stays off: it keeps a thread asleep for that long after every
    single one, tens of thousands in a minute of small steps. The launcher watches the progress instead.
    """
    use_local_gpu(backend_config, context)
    gpus = 1 if backend_config.device == "gpu" else 0
    bypass_proxies(context.peers)
    with abort_after(start_timeout):
        wait_for_rank_zero(context)
        addresses = addresses_of(context.peers)
        return _cluster_strategy(addresses, context.rank, gpus, backend_config.collective)


def addresses_of(peers: Iterable[Peer]) -> tuple[str, ...]:
    """Where their servers listen, as TensorFlow writes it."""
    return tuple(f"{peer.address}:{peer.port}" for peer in peers)


def bypass_proxies(peers: Iterable[Peer]) -> None:
    """Has gRPC connect the processes of a run without a proxy; all else that it connects to goes as before.

    gRPC reads the variables whenever it connects, as long as this process lives.
    """
    if not any(map(os.environ.get, _PROXIES)):
        return
    direct = os.environ.get(_NO_PROXY, os.environ.get("no_proxy", "")).split(",")
    hosts = dict.fromkeys([*filter(None, direct), *(peer.address for peer in peers)])
    os.environ[_NO_PROXY] = ",".join(hosts)


@functools.cache
def _cluster_strategy(
    addresses: tuple[str, ...], rank: int, gpus: int, collective: str
) -> tf.distribute.Strategy:
    """Made once in a process: TensorFlow has one server, and to start it anew would cut off the peers."""
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
    disable_silence_limit(len(addresses))
    return tf.distribute.MultiWorkerMirroredStrategy(resolver, options)


@contextlib.contextmanager
def abort_after(seconds: float) -> Iterator[None]:
    """Ends the process, with a traceback, if its body takes longer.

    The body may wait in native code for a peer that never starts; nothing else can interrupt it.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def is_peer_error(error: BaseException) -> bool:
    """Whether an error of TensorFlow says that another process is gone, or did not answer in time."""
    classes = (
        *(tf.errors.UnavailableError, tf.errors.DeadlineExceededError),
        *(tf.errors.CancelledError, tf.errors.AbortedError),
    )
    return isinstance(error, classes)
