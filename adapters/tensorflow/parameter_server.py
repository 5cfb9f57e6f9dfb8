"""Parameter-server runs on TensorFlow's ParameterServerStrategy: variables on servers, closures on workers.

A closure assigns to no variable: it returns gradients and the changes of moving statistics and metrics.
The coordinator alone writes to the servers, so that a closure which TensorFlow retries, because its worker
was lost, counts once.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from isotrain.adapters.tensorflow import distribution
from isotrain.adapters.tensorflow.base import gpu
from isotrain.adapters.tensorflow.base.keras_trace_overrides import (
    local_mean_losses,
    seed_offset_of,
)
from isotrain.adapters.tensorflow.base.require_all import refusal_of
from isotrain.adapters.tensorflow.comm.base import SingleReplicaCommunicator
from isotrain.adapters.tensorflow.replica.replica_group import TensorFlowReplicaGroup
from isotrain.adapters.tensorflow.trainer.base import MicroBatch
from isotrain.plugin import (
    RECORDED,
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
    recorded_coordinator_group,
)

_PROTOCOL = "grpc"
_JOBS = {"coordinator": "chief", "worker": "worker", "server": "ps"}
"""Process role -> job name in TensorFlow's cluster."""


def start_coordinator(
    spec: TrainingSpec, backend_config: BackendConfig, server_connection: ServerConnection
) -> CoordinatorGroup:
    """Connects the coordinator to workers and servers, and builds the model on the servers."""
    if backend_config.collective == RECORDED:

        def build() -> TensorFlowReplicaGroup:
            local = SingleReplicaCommunicator()
            group = TensorFlowReplicaGroup(spec, tf.distribute.get_strategy(), local)
            _require_stateless(group.model, group.trainer.statistics)
            return group

        return recorded_coordinator_group(server_connection, build)
    _prepare(backend_config, server_connection)
    gpu.use_none()
    liveness = WorkerLiveness(server_connection)
    liveness.await_all()
    with distribution.abort_after(server_connection.start_timeout):
        strategy = tf.distribute.ParameterServerStrategy(_resolver(server_connection))
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    group = _CoordinatorReplicaGroup(
        spec, tf.distribute.get_strategy(), SingleReplicaCommunicator(), strategy
    )
    _require_stateless(group.model, group.trainer.statistics)
    with strategy.scope():
        version = tf.Variable(0, dtype=tf.int64, trainable=False)
    pool = _ClosurePool(coordinator, group, version, liveness, server_connection)
    return CoordinatorGroup(group, server_connection.context.replicas, pool)


def serve(backend_config: BackendConfig, server_connection: ServerConnection) -> None:
    """Runs a worker's or server's `tf.distribute.Server` until the coordinator is gone."""
    _prepare(backend_config, server_connection)
    if server_connection.context.role == "worker":
        gpu.use_local_gpu(backend_config, server_connection.single_replica_context())
    else:
        gpu.use_none()
    job, task = _task(server_connection)
    threads = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=backend_config.threads,
        inter_op_parallelism_threads=_waiting_threads(server_connection),
    )
    server = tf.distribute.Server(_cluster(server_connection), job, task, _PROTOCOL, threads)
    connection = connect(server_connection)
    try:
        server_connection.reporter.emit(events.Ready())
        server_connection.reporter.enter("serve")
        connection.receive()
    except ConnectionLostError:
        return
    finally:
        del server


def _prepare(backend_config: BackendConfig, server_connection: ServerConnection) -> None:
    distribution.use_threads(backend_config.threads)
    tf.config.threading.set_inter_op_parallelism_threads(_waiting_threads(server_connection))
    distribution.bypass_proxies(server_connection.context)


def _waiting_threads(server_connection: ServerConnection) -> int:
    """Inter-op threads: so many operations may wait for other processes; with one, TensorFlow deadlocks."""
    return 2 * server_connection.context.world_size


def _cluster(server_connection: ServerConnection) -> tf.train.ClusterSpec:
    context = server_connection.context
    jobs: dict[str, list[str]] = {job: [] for job in _JOBS.values()}
    addresses = distribution.server_addresses(context)
    for process, address in zip(context.processes, addresses, strict=True):
        jobs[_JOBS[process.role]].append(address)
    return tf.train.ClusterSpec(jobs)


def _task(server_connection: ServerConnection) -> tuple[str, int]:
    """Job name and task index of a process in TensorFlow's cluster."""
    context = server_connection.context
    ranks = [process.rank for process in context.processes if process.role == context.role]
    return _JOBS[context.role], ranks.index(context.rank)


def _resolver(
    server_connection: ServerConnection,
) -> tf.distribute.cluster_resolver.ClusterResolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        _cluster(server_connection), task_type="chief", task_id=0, rpc_layer=_PROTOCOL
    )


def _require_stateless(model: Any, statistics: Collection[tf.Variable]) -> None:
    """Refuses a model whose forward pass writes variables, of any shape, on the servers.

    Raises:
        UnsupportedError: The model is a tf.Module with untrained weights, which it may update itself.
    """
    if statistics and not isinstance(model, keras.Layer):
        raise UnsupportedError(
            "tf-multiworker: a worker of a parameter-server run must not update weights in its"
            " forward pass, and this tf.Module has weights that are not trained. Use a Keras model."
        )


class _CoordinatorReplicaGroup(TensorFlowReplicaGroup):
    """The coordinator's replica group, whose variables are on the servers."""

    def close(self) -> None:
        """Keeps the traced functions: to free one, TensorFlow asks every worker, also a suspended one."""


class _ClosurePool(WorkerPool):
    """Worker pool over a ClusterCoordinator, which does not tell which worker runs which closure.

    The version of the weights is a scalar int64 variable on a server.
    """

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        group: TensorFlowReplicaGroup,
        version: tf.Variable,
        liveness: WorkerLiveness,
        server_connection: ServerConnection,
    ) -> None:
        self._coordinator = coordinator
        self._version = version
        self._trainer = group.trainer
        self._liveness = liveness
        self.lost = liveness.lost
        self._fetching = ThreadPoolExecutor(server_connection.context.replicas, "isotrain-closure")
        self._in_flight: dict[int, tuple[WorkItem, Future[Any]]] = {}
        self._lost_items: list[WorkItem] = []
        self._failure: BaseException | None = None
        self._function = tf.function(self._trace, autograph=False)

    def _trace(self, micro_batches: list[MicroBatch], weights: tf.Tensor, shift: tf.Tensor) -> Any:
        """Traces a worker's closure: scalar version and loss, weighted gradients, metrics' sums."""
        version = self._version.read_value()
        frozen = self._trainer.frozen_state.watched()
        with tf.control_dependencies([version]), local_mean_losses(), frozen:
            return version, *self._trainer.stateless_contribution(micro_batches, weights, shift)

    def free(self) -> Collection[int]:
        return self._liveness.present - self._in_flight.keys()

    def hand_out(self, worker: int, item: WorkItem, version: int) -> None:
        micro_batches = [micro_batch for micro_batch in item.slices if micro_batch.count]
        slices = [
            map_tree(_tensor, (micro_batch.inputs, micro_batch.targets))
            for micro_batch in micro_batches
        ]
        weights = tf.constant([micro_batch.weight for micro_batch in micro_batches], tf.float64)
        shift = seed_offset_of(item.replica, item.step)
        remote = self._coordinator.schedule(self._function, args=(slices, weights, shift))
        self._in_flight[worker] = item, self._fetching.submit(remote.fetch)

    def collect(self, timeout: float) -> list[WorkResult]:
        if self._failure is not None:  # of a step whose results will never be complete
            raise self._failure
        self._liveness.poll()
        futures = [future for _, future in self._in_flight.values()]
        wait(futures, timeout, FIRST_COMPLETED)
        done = [worker for worker, (_, future) in self._in_flight.items() if future.done()]
        results = [self._result(*self._in_flight.pop(worker)) for worker in done]
        return [result for result in results if result is not None]

    def _result(self, item: WorkItem, future: Future[Any]) -> WorkResult | None:
        """Result of a finished closure; None, and its item is lost, if its worker was."""
        error = future.exception()
        if error is not None and distribution.is_peer_error(error):
            self._lost_items.append(item)
            return None
        if error is not None:
            is_invalid = isinstance(error, tf.errors.InvalidArgumentError)
            self._failure = (refusal_of(error) if is_invalid else None) or error
            raise self._failure from None
        version, loss, change, metrics = future.result()
        return WorkResult(item, None, int(version), float(loss), np.asarray(change), metrics)

    def lost_items(self) -> list[WorkItem]:
        """Items whose result was lost before it was fetched; TensorFlow retries unfinished closures."""
        items, self._lost_items = self._lost_items, []
        return items

    def updated(self, version: int) -> None:
        self._version.assign(version)

    def close(self) -> None:
        self._fetching.shutdown(wait=False)
        del self._coordinator
        self._liveness.close()


def _tensor(array: np.ndarray | None) -> tf.Tensor | None:
    """Tensor of an array's shape and dtype; None for None."""
    return None if array is None else tf.constant(array)
