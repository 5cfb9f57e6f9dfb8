"""Served runs by TensorFlow's ParameterServerStrategy: variables on servers, closures on workers.

A closure assigns to no variable: it gives back gradients, and what it would have done to moving statistics
and metrics. The coordinator alone writes to the servers, so that a closure which TensorFlow repeats, because
its worker was lost, counts once.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from isotrain.adapters.tensorflow import distribution
from isotrain.adapters.tensorflow.base.keras_tracing import local_mean_losses, seed_offset_of
from isotrain.adapters.tensorflow.comm.base import SingleReplicaCommunicator
from isotrain.adapters.tensorflow.replica.group import TensorFlowReplicaGroup
from isotrain.adapters.tensorflow.trainer.base import MicroBatch
from isotrain.plugin import (
    BackendConfig,
    ConnectionLostError,
    CoordinatorGroup,
    ServerConnection,
    TrainingSpec,
    UnsupportedError,
    WorkerLiveness,
    WorkerPool,
    WorkItem,
    WorkResult,
    connect,
    events,
    map_tree,
)

_PROTOCOL = "grpc"
_JOBS = {"coordinator": "chief", "worker": "worker", "server": "ps"}
"""What a process of each role is called in TensorFlow's cluster."""


def start_coordinator(
    spec: TrainingSpec, backend_config: BackendConfig, server_connection: ServerConnection
) -> CoordinatorGroup:
    """Connects to workers and servers, and builds the model on the servers."""
    _prepare(backend_config, server_connection)
    tf.config.set_visible_devices([], "GPU")
    attendance = WorkerLiveness(server_connection)
    attendance.await_all()
    with distribution.abort_after(server_connection.start_timeout):
        strategy = tf.distribute.ParameterServerStrategy(_resolver(server_connection))
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    own = _OnServers(spec, tf.distribute.get_strategy(), SingleReplicaCommunicator(), strategy)
    _require_stateless(own.model, own.trainer.statistics)
    with strategy.scope():
        version = tf.Variable(0, dtype=tf.int64, trainable=False)
    workforce = _Cluster(coordinator, own, version, attendance, server_connection)
    return CoordinatorGroup(own, server_connection.context.replicas, workforce)


def serve(backend_config: BackendConfig, server_connection: ServerConnection) -> None:
    """Runs a worker's or server's part of TensorFlow's cluster until the coordinator is gone."""
    _prepare(backend_config, server_connection)
    if server_connection.context.role == "worker":
        distribution.use_local_gpu(backend_config, server_connection.single_replica_context())
    else:
        tf.config.set_visible_devices([], "GPU")
    job, task = _task(server_connection)
    threads = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=backend_config.threads,
        inter_op_parallelism_threads=_waiting_threads(server_connection),
    )
    server = tf.distribute.Server(_cluster(server_connection), job, task, _PROTOCOL, threads)
    wire = connect(server_connection)
    try:
        server_connection.reporter.emit(events.Ready())
        server_connection.reporter.enter("serve")
        wire.receive()
    except ConnectionLostError:
        return
    finally:
        del server


def _prepare(backend_config: BackendConfig, server_connection: ServerConnection) -> None:
    distribution.use_threads(backend_config.threads)
    tf.config.threading.set_inter_op_parallelism_threads(_waiting_threads(server_connection))
    distribution.bypass_proxies(server_connection.context.peers)


def _waiting_threads(server_connection: ServerConnection) -> int:
    """So many operations may wait for other processes at once; with one, TensorFlow waits for ever."""
    return 2 * server_connection.context.world_size


def _cluster(server_connection: ServerConnection) -> tf.train.ClusterSpec:
    peers = server_connection.context.peers
    jobs: dict[str, list[str]] = {job: [] for job in _JOBS.values()}
    for peer, address in zip(peers, distribution.addresses_of(peers), strict=True):
        jobs[_JOBS[peer.role]].append(address)
    return tf.train.ClusterSpec(jobs)


def _task(server_connection: ServerConnection) -> tuple[str, int]:
    """The name and number that a process has in TensorFlow's cluster."""
    context = server_connection.context
    alike = [peer.rank for peer in context.peers if peer.role == context.role]
    return _JOBS[context.role], alike.index(context.rank)


def _resolver(
    server_connection: ServerConnection,
) -> tf.distribute.cluster_resolver.ClusterResolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        _cluster(server_connection), task_type="chief", task_id=0, rpc_layer=_PROTOCOL
    )


def _require_stateless(model: Any, statistics: Collection[tf.Variable]) -> None:
    """Refuses a model whose forward pass writes to the servers.

    Raises:
        UnsupportedError: It is a tf.Module with weights of its own to move.
    """
    if statistics and not isinstance(model, keras.Layer):
        raise UnsupportedError(
            "tf-multiworker: a worker of a parameter server must not move a model's weights in its"
            " forward pass, and this tf.Module has weights that are not trained. Use a Keras model."
        )


class _OnServers(TensorFlowReplicaGroup):
    """The coordinator's own replica, whose variables are on the servers."""

    def close(self) -> None:
        """Keeps the traced functions: to forget one, TensorFlow asks every worker, also a suspended one."""


class _Cluster(WorkerPool):
    """Workers that TensorFlow hands closures to; which of them does what, it does not tell."""

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        own: TensorFlowReplicaGroup,
        version: tf.Variable,
        attendance: WorkerLiveness,
        server_connection: ServerConnection,
    ) -> None:
        self._coordinator = coordinator
        self._version = version
        self._trainer = own.trainer
        self._attendance = attendance
        self.lost = attendance.lost
        self._waiting = ThreadPoolExecutor(server_connection.context.replicas, "isotrain-closure")
        self._under_way: dict[int, tuple[WorkItem, Future[Any]]] = {}
        self._lost_items: list[WorkItem] = []
        self._function = tf.function(self._trace, autograph=False)

    def _trace(self, micro_batches: list[MicroBatch], weights: tf.Tensor, shift: tf.Tensor) -> Any:
        version = self._version.read_value()
        with tf.control_dependencies([version]), local_mean_losses():
            return version, *self._trainer.stateless_contribution(micro_batches, weights, shift)

    def free(self) -> Collection[int]:
        return self._attendance.present - self._under_way.keys()

    def hand_out(self, worker: int, item: WorkItem, version: int) -> None:
        micro_batches = [micro_batch for micro_batch in item.slices if micro_batch.count]
        given = [
            map_tree(_tensor, (micro_batch.inputs, micro_batch.targets))
            for micro_batch in micro_batches
        ]
        weights = tf.constant([micro_batch.weight for micro_batch in micro_batches], tf.float64)
        shift = seed_offset_of(item.replica, item.step)
        remote = self._coordinator.schedule(self._function, args=(given, weights, shift))
        self._under_way[worker] = item, self._waiting.submit(remote.fetch)

    def collect(self, patience: float) -> list[WorkResult]:
        self._attendance.poll()
        futures = [future for _, future in self._under_way.values()]
        wait(futures, patience, FIRST_COMPLETED)
        done = [slot for slot, (_, future) in self._under_way.items() if future.done()]
        found = [self._answer(*self._under_way.pop(slot)) for slot in done]
        return [answer for answer in found if answer is not None]

    def _answer(self, item: WorkItem, future: Future[Any]) -> WorkResult | None:
        """What a closure gave; None, and its item is given back, if that was lost with its worker."""
        error = future.exception()
        if error is not None and distribution.is_peer_error(error):
            self._lost_items.append(item)
            return None
        version, loss, change, metrics = future.result()
        return WorkResult(item, None, int(version), float(loss), np.asarray(change), metrics)

    def lost_items(self) -> list[WorkItem]:
        """Those whose result was lost before it was fetched; closures that have none TensorFlow repeats."""
        items, self._lost_items = self._lost_items, []
        return items

    def updated(self, version: int) -> None:
        self._version.assign(version)

    def close(self) -> None:
        self._waiting.shutdown(wait=False)
        del self._coordinator
        self._attendance.close()


def _tensor(array: np.ndarray | None) -> tf.Tensor | None:
    return None if array is None else tf.constant(array)
