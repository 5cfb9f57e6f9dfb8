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

from isotrain.adapters.tensorflow import native
from isotrain.adapters.tensorflow.exchange import SingleReplica
from isotrain.adapters.tensorflow.group import TensorFlowReplicaGroup
from isotrain.adapters.tensorflow.keras_tracing import plain_losses, shift_of
from isotrain.adapters.tensorflow.peers import blames_peer
from isotrain.adapters.tensorflow.program import Piece
from isotrain.plugin import (
    Answer,
    Attendance,
    ServedGroup,
    Service,
    Setting,
    TrainingSpec,
    Unit,
    UnsupportedError,
    WireError,
    Workforce,
    connect,
    events,
    map_tree,
)

_PROTOCOL = "grpc"
_JOBS = {"coordinator": "chief", "worker": "worker", "server": "ps"}
"""What a process of each role is called in TensorFlow's cluster."""


def start_coordinator(spec: TrainingSpec, setting: Setting, service: Service) -> ServedGroup:
    """Connects to workers and servers, and builds the model on the servers."""
    _prepare(setting, service)
    tf.config.set_visible_devices([], "GPU")
    attendance = Attendance(service)
    attendance.await_all()
    with native.ended_after(service.start_timeout):
        strategy = tf.distribute.ParameterServerStrategy(_resolver(service))
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    own = _OnServers(spec, tf.distribute.get_strategy(), SingleReplica(), strategy)
    _require_stateless(own.model, own.program.statistics)
    with strategy.scope():
        version = tf.Variable(0, dtype=tf.int64, trainable=False)
    workforce = _Cluster(coordinator, own, version, attendance, service)
    return ServedGroup(own, service.context.replicas, workforce)


def serve(setting: Setting, service: Service) -> None:
    """Runs a worker's or server's part of TensorFlow's cluster until the coordinator is gone."""
    _prepare(setting, service)
    if service.context.role == "worker":
        native.use_own_gpu(setting, service.alone())
    else:
        tf.config.set_visible_devices([], "GPU")
    job, task = _task(service)
    threads = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=setting.threads,
        inter_op_parallelism_threads=_waiting_threads(service),
    )
    server = tf.distribute.Server(_cluster(service), job, task, _PROTOCOL, threads)
    wire = connect(service)
    try:
        service.reporter.emit(events.Ready())
        service.reporter.enter("serve")
        wire.receive()
    except WireError:
        return
    finally:
        del server


def _prepare(setting: Setting, service: Service) -> None:
    native.use_threads(setting.threads)
    tf.config.threading.set_inter_op_parallelism_threads(_waiting_threads(service))
    native.pass_by_proxies(service.context.peers)


def _waiting_threads(service: Service) -> int:
    """So many operations may wait for other processes at once; with one, TensorFlow waits for ever."""
    return 2 * service.context.world_size


def _cluster(service: Service) -> tf.train.ClusterSpec:
    peers = service.context.peers
    jobs: dict[str, list[str]] = {job: [] for job in _JOBS.values()}
    for peer, address in zip(peers, native.addresses_of(peers), strict=True):
        jobs[_JOBS[peer.role]].append(address)
    return tf.train.ClusterSpec(jobs)


def _task(service: Service) -> tuple[str, int]:
    """The name and number that a process has in TensorFlow's cluster."""
    context = service.context
    alike = [peer.rank for peer in context.peers if peer.role == context.role]
    return _JOBS[context.role], alike.index(context.rank)


def _resolver(service: Service) -> tf.distribute.cluster_resolver.ClusterResolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        _cluster(service), task_type="chief", task_id=0, rpc_layer=_PROTOCOL
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


class _Cluster(Workforce):
    """Workers that TensorFlow hands closures to; which of them does what, it does not tell."""

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        own: TensorFlowReplicaGroup,
        version: tf.Variable,
        attendance: Attendance,
        service: Service,
    ) -> None:
        self._coordinator = coordinator
        self._version = version
        self._program = own.program
        self._attendance = attendance
        self.lost = attendance.lost
        self._waiting = ThreadPoolExecutor(service.context.replicas, "isotrain-closure")
        self._under_way: dict[int, tuple[Unit, Future[Any]]] = {}
        self._lost_units: list[Unit] = []
        self._function = tf.function(self._trace, autograph=False)

    def _trace(self, pieces: list[Piece], weights: tf.Tensor, shift: tf.Tensor) -> Any:
        version = self._version.read_value()
        with tf.control_dependencies([version]), plain_losses():
            return version, *self._program.contribution_aside(pieces, weights, shift)

    def free(self) -> Collection[int]:
        return self._attendance.present - self._under_way.keys()

    def hand_out(self, worker: int, unit: Unit, version: int) -> None:
        pieces = [piece for piece in unit.pieces if piece.count]
        given = [map_tree(_tensor, (piece.inputs, piece.targets)) for piece in pieces]
        weights = tf.constant([piece.weight for piece in pieces], tf.float64)
        shift = shift_of(unit.replica, unit.step)
        remote = self._coordinator.schedule(self._function, args=(given, weights, shift))
        self._under_way[worker] = unit, self._waiting.submit(remote.fetch)

    def collect(self, patience: float) -> list[Answer]:
        self._attendance.look()
        futures = [future for _, future in self._under_way.values()]
        wait(futures, patience, FIRST_COMPLETED)
        done = [slot for slot, (_, future) in self._under_way.items() if future.done()]
        found = [self._answer(*self._under_way.pop(slot)) for slot in done]
        return [answer for answer in found if answer is not None]

    def _answer(self, unit: Unit, future: Future[Any]) -> Answer | None:
        """What a closure gave; None, and its unit is given back, if that was lost with its worker."""
        error = future.exception()
        if error is not None and blames_peer(error):
            self._lost_units.append(unit)
            return None
        version, loss, change, metrics = future.result()
        return Answer(unit, None, int(version), float(loss), np.asarray(change), metrics)

    def given_back(self) -> list[Unit]:
        """Those whose result was lost before it was fetched; closures that have none TensorFlow repeats."""
        units, self._lost_units = self._lost_units, []
        return units

    def updated(self, version: int) -> None:
        self._version.assign(version)

    def close(self) -> None:
        self._waiting.shutdown(wait=False)
        del self._coordinator
        self._attendance.close()


def _tensor(array: np.ndarray | None) -> tf.Tensor | None:
    return None if array is None else tf.constant(array)
