"""Replica group of the coordinator in a parameter-server run, which holds the parameters."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from isotrain.core.contracts.backend.group_hooks import LayerTrait
from isotrain.core.contracts.backend.group_protocols import (
    GradientKeepingGroup,
    WeightsFileGroup,
    WorkerGroup,
)
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.contracts.backend.replica import Computation, StatePart, Tensor
from isotrain.core.contracts.backend.replica_group import Phase, ReplicaGroup
from isotrain.core.contracts.process import ServerConnection, rank_of
from isotrain.core.contracts.state import MODEL_STATE, StateInfo, StateKind
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.errors import IsotrainError, UnsupportedError, unknown_name
from isotrain.core.parameter_server.flat_state import (
    STATISTICS,
    WEIGHTS,
    read_parts,
    unflatten_gradients,
    write_parts,
)
from isotrain.core.parameter_server.recorded_workers import RecordedWorkerPool
from isotrain.core.parameter_server.tcp_workers import TcpWorkerPool
from isotrain.core.parameter_server.work_queue import WorkItem, WorkQueue
from isotrain.core.parameter_server.worker_pool import LostWorker, WorkerPool, WorkResult


class PendingLoss:
    """Future mean loss of a global batch; each slice's loss at the weights with which it was computed.

    Attributes:
        value: The loss; None: not computed yet.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        """Starts without a value; `wait` returns once `value` is set."""
        self._wait = wait
        self.value: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `float` returns without waiting."""
        return self.value is not None

    def __float__(self) -> float:
        if self.value is None:
            self._wait()
        assert self.value is not None
        return self.value


class ParameterServerStats:
    """Statistics of a parameter-server run: staleness of the updates, slices by worker, lost workers."""

    def __init__(self) -> None:
        self._staleness: Counter[int] = Counter()
        self._slices: Counter[int] = Counter()
        self._lag = 0

    def record_assignment(self, lag: int) -> None:
        """Records a work item that is handed out, with weights that lack `lag` global batches before it."""
        self._lag = max(self._lag, lag)

    def record_result(self, result: WorkResult, version: int) -> None:
        """Records a result that is applied to weights of a version."""
        self._staleness[version - result.version] += 1
        if result.worker is not None:
            self._slices[result.worker] += 1

    def report(self, updates: int, lost: list[LostWorker]) -> dict[str, Any]:
        """The statistics as plain JSON values."""
        slices = self._staleness.total()
        total = sum(lag * count for lag, count in self._staleness.items())
        return {
            "slices": slices,
            "updates": updates,
            "staleness_mean": total / slices if slices else 0.0,
            "staleness_max": max(self._staleness, default=0),
            "staleness_histogram": {str(n): self._staleness[n] for n in sorted(self._staleness)},
            "lag_max": self._lag,
            "slices_by_worker": {str(rank_of(n)): self._slices[n] for n in sorted(self._slices)},
            "workers_lost": [
                {"rank": loss.rank, "step": loss.step, "reason": loss.reason} for loss in lost
            ],
        }


_POLL_SECONDS = 0.2
_EXECUTION = "execution/"
_WORKER = f"{_EXECUTION}worker/"
"""Prefix of a worker's execution state in checkpoints; the worker itself uses the prefix of `_EXECUTION`."""


@dataclass
class _Step:
    """A global batch whose gradients are not all applied: the results so far, by replica."""

    rate: float
    synchronous: bool
    missing: int
    loss: PendingLoss
    results: dict[int, WorkResult] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)


def _raise_unsupported(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "in a parameter-server run one process holds the parameters and workers compute gradients for it:"
        " no replica steps or communicates by itself. Use parameter_server_step."
    )


_unsupported: Any = _raise_unsupported


def _is_worker(name: str) -> bool:
    return name.startswith(_WORKER)


class CoordinatorGroup(ReplicaGroup):
    """Replica group of a parameter-server run, in the coordinator, for all replicas.

    Methods that read or write weights first wait until all results are applied.
    """

    def __init__(self, group: ReplicaGroup, replicas: int, pool: WorkerPool) -> None:
        """Makes the coordinator's group from that of one replica, which holds the parameters."""
        if carried := group.describe_state(("carry",)):
            raise UnsupportedError(
                f"strategy parameter-server: layers carry {', '.join(carried)} from one call to the next, and"
                " any worker may compute any slice. Use a strategy in which each replica has its own slices,"
                " or make it a weight (add_weight with trainable=False)."
            )
        self.replicas = replicas
        self.local_replicas = tuple(range(replicas))
        self._group = group
        self._pool = pool
        self._updates = 0
        self._version = 0
        self._last_step = -1
        self._cached: np.ndarray | None = None
        self._queue = WorkQueue()
        self._steps: dict[int, _Step] = {}
        self._stats = ParameterServerStats()
        self._execution_state: dict[int, Mapping[str, np.ndarray]] = {}
        """Execution state of workers that have computed nothing since it was read."""
        weights = group.describe_state(("trainable",)).values()
        self._shapes = tuple((weight.shape, weight.dtype) for weight in weights)
        self._ends = tuple(itertools.accumulate(weight.size for weight in weights))
        self._metrics = require(group, WorkerGroup)
        self._metrics.pop_metric_state()  # refuses metrics whose sums could not be added up
        self._statistics = self._read(STATISTICS)

    def weights(self) -> np.ndarray:
        """Current weights, then moving statistics: one vector, 1-D, in the weights' dtype; cached."""
        if self._cached is None:
            weights = self._read(WEIGHTS)
            self._cached = np.concatenate([weights, self._statistics.astype(weights.dtype)])
        return self._cached

    def _read(self, parts: tuple[StatePart, ...]) -> np.ndarray:
        """This process's state of some parts, as one vector."""
        return self._group.numpy(self._group.compute(read_parts, static=parts)[0])

    def parameter_server_step(
        self, batch: Batch, learning_rate: float, staleness: int | None
    ) -> Tensor:
        number = batch.step
        if number <= self._last_step:
            self._drain()  # the loop has gone back: the same step may still be open
        self._last_step = number
        loss = PendingLoss(lambda: self._poll_until(lambda: not self._queue.is_open(number)))
        items = [
            WorkItem(number, replica, slices, staleness)
            for replica, slices in enumerate(batch.slices)
            if any(micro_batch.count for micro_batch in slices)
        ]
        self._steps[number] = _Step(learning_rate, staleness == 0, len(items), loss)
        self._queue.add(items)
        if staleness == 0:
            self._drain()
            return self._group.tensor(np.array(float(loss)))
        self._poll_until(lambda: self._queue.waiting <= self.replicas)
        return loss

    def _poll_until(self, is_done: Callable[[], bool]) -> None:
        """Hands out items and applies results, at least once, until a condition holds."""
        self._poll(0.0)
        while not is_done():
            self._poll(_POLL_SECONDS)

    def _poll(self, timeout: float) -> None:
        self._assign_items()
        for result in self._pool.collect(timeout):
            self._receive(result)
        for item in self._pool.lost_items():
            self._queue.requeue(item)
        self._assign_items()

    def _assign_items(self) -> None:
        for worker, item in self._queue.assign(self._pool.free()):
            self._execution_state.pop(worker, None)
            self._stats.record_assignment(self._queue.lag(item))
            self._pool.hand_out(worker, item, self._version)

    def _drain(self) -> None:
        """Returns once all work items are applied."""
        self._poll_until(lambda: self._queue.is_empty)

    def _receive(self, result: WorkResult) -> None:
        step = self._steps[result.item.step]
        step.losses[result.item.replica] = result.loss
        step.missing -= 1
        if step.synchronous:
            step.results[result.item.replica] = result
        else:
            self._apply([result], step.rate / self.replicas, 1.0)
        if not step.missing:
            self._finish(result.item.step)

    def _finish(self, number: int) -> None:
        """Completes a step of which all results have been received."""
        step = self._steps.pop(number)
        if step.synchronous:
            results = [step.results[replica] for replica in sorted(step.results)]
            self._apply(results, step.rate, 1.0 / self.replicas)
        losses = [step.losses[replica] for replica in sorted(step.losses)]
        step.loss.value = sum(losses) / self.replicas

    def _apply(self, results: Sequence[WorkResult], rate: float, factor: float) -> None:
        """Updates the weights once, with the sum of the results' gradients times a factor."""
        length = self._ends[-1]
        total: np.ndarray = functools.reduce(np.add, [each.update[:length] for each in results])
        if factor != 1.0:
            total = total * total.dtype.type(factor)
        group = self._group
        static = (self._shapes, self._ends)
        gradients = group.compute(unflatten_gradients, [group.tensor(total)], static=static)
        group.apply_gradients(gradients, rate)
        self._update_statistics(results)
        for result in results:
            self._stats.record_result(result, self._version)
            self._queue.applied(result.item)
            if result.metrics.size:
                self._metrics.add_metric_state(result.metrics)
        self._updates += 1
        self._bump_version()

    def _bump_version(self) -> None:
        """Gives the changed weights a new version."""
        self._version += 1
        self._cached = None
        self._pool.updated(self._version)

    def _update_statistics(self, results: Sequence[WorkResult]) -> None:
        """Adds each result's change of the moving statistics, weighted by its part of the global batch."""
        if not self._statistics.size:
            return
        for result in results:
            delta = result.update[self._ends[-1] :].astype(self._statistics.dtype)
            self._statistics = self._statistics + delta * delta.dtype.type(
                result.item.weight / self.replicas
            )
        group = self._group
        group.compute(write_parts, [group.tensor(self._statistics)], static=STATISTICS)

    def parameter_server_stats(self) -> Mapping[str, Any]:
        return self._stats.report(self._updates, self._pool.lost)

    def to_device(self, arrays: Any) -> Any:
        """Returns NumPy arrays unchanged: they are sent to workers as such. Local."""
        return arrays

    def synchronous_step(self, batch: Batch, learning_rate: float) -> Tensor:
        """Runs a parameter-server step with staleness 0; returns the mean loss, a scalar."""
        return self.parameter_server_step(batch, learning_rate, 0)

    def evaluation_step(self, batch: Batch) -> None:
        self._drain()
        for micro_batch in itertools.chain.from_iterable(batch.slices):
            if micro_batch.count:
                self._group.evaluation_step(self._local_batch(micro_batch, batch))

    def _local_batch(self, micro_batch: Slice, batch: Batch) -> Batch:
        """A batch of one micro-batch, on the device of the coordinator's replica."""
        to_device = self._group.to_device
        targets = None if micro_batch.targets is None else to_device(micro_batch.targets)
        local = Slice(to_device(micro_batch.inputs), targets, micro_batch.count, 1.0)
        return replace(batch, even=True, slices=((local,),))

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        self._drain()
        return [self._group.predict([self._group.to_device(local)])[0] for local in inputs]

    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        self._drain()
        return self._group.collect_metrics(phase)

    def traits(self) -> list[LayerTrait]:
        return self._group.traits()

    def optimizer_lr_schedule(self) -> Callable[[int], float] | None:
        return self._group.optimizer_lr_schedule()

    def optimizer_rates(self) -> tuple[float, float] | None:
        return self._group.optimizer_rates()

    def weight_finalizer(self) -> Callable[[], None] | None:
        finalize = self._group.weight_finalizer()
        if finalize is None:
            return None

        def drain_and_finalize() -> None:
            self._drain()
            finalize()
            self._bump_version()

        return drain_and_finalize

    def plan_notes(self) -> list[str]:
        return self._group.plan_notes()

    def step_notes(self, batch: Batch) -> list[str]:
        return self._group.step_notes(self._local_batch(batch.slices[0][0], batch))

    def refuses_single_sample(self, batch: Batch) -> str | None:
        return self._group.refuses_single_sample(self._local_batch(batch.slices[0][0], batch))

    def not_checkpointed(self) -> list[str]:
        return self._group.not_checkpointed()

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        local = self._group.describe_state(self._kinds_of(replica, kinds))
        execution_state = self._execution_state_of(replica, kinds).items()
        return local | {n: StateInfo(a.shape, str(a.dtype), a.nbytes) for n, a in execution_state}

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        self._drain()
        local = self._group.read_state(self._kinds_of(replica, kinds))
        return local | self._execution_state_of(replica, kinds)

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        index = self.local_index(replica)
        self._drain()
        execution_state = {
            n.replace(_WORKER, _EXECUTION): a for n, a in state.items() if _is_worker(n)
        }
        self._require_known(execution_state)
        self._group.write_state({n: array for n, array in state.items() if not _is_worker(n)})
        self._execution_state.clear()
        if execution_state:
            for worker in range(self.replicas) if replica is None else (index,):
                self._pool.set_execution_state(worker, execution_state)
        self._bump_version()
        self._statistics = self._read(STATISTICS)

    def _execution_state_of(
        self, replica: int | None, kinds: Sequence[StateKind]
    ) -> dict[str, np.ndarray]:
        """Execution state of a replica's worker by name, any shapes; empty if `kinds` lacks it."""
        if "execution" not in kinds:
            return {}
        self._drain()
        worker = self.local_index(replica)
        if worker not in self._execution_state:
            self._execution_state[worker] = self._pool.execution_state(worker)
        state = self._execution_state[worker]
        return {name.replace(_EXECUTION, _WORKER, 1): array for name, array in state.items()}

    def _require_known(self, execution_state: Collection[str]) -> None:
        """Refuses names that no worker has: workers have those of the coordinator's replica."""
        names = self._group.describe_state(("execution",))
        for name in execution_state:
            if name not in names:
                raise IsotrainError(unknown_name("state", name, names))

    def _kinds_of(self, replica: int | None, kinds: Sequence[StateKind]) -> Sequence[StateKind]:
        """Kinds of state of a replica: weights belong to all replicas, all other kinds to replica 0."""
        if self.local_index(replica) == 0:
            return kinds
        return [kind for kind in kinds if kind in MODEL_STATE]

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        return require(self._group, WeightsFileGroup).read_weights_file(path)

    def gradients(self, batch: Batch) -> tuple[list[list[Tensor]], Tensor]:
        """Computes gradients, of the weights' shapes, replica by replica, for inspection. Local."""
        self._drain()
        gradients, total = [], 0.0
        for slices in batch.slices:
            local = tuple(self._local_batch(each, batch).slices[0][0] for each in slices)
            weighted = tuple(
                replace(p, weight=q.weight) for p, q in zip(local, slices, strict=True)
            )
            even = len(weighted) == 1 and weighted[0].weight == 1.0
            with self._group.preserving_training_state():
                of_replica, loss = self._group.gradients(
                    replace(batch, even=even, slices=(weighted,))
                )
            gradients += of_replica
            total += float(loss)
        return gradients, self._group.tensor(np.array(total / self.replicas))

    @contextmanager
    def preserving_training_state(self) -> Iterator[None]:
        """Does nothing: `gradients` leaves all state unchanged. Local."""
        yield

    @contextmanager
    def preserving_state(self) -> Iterator[None]:
        with self._group.preserving_state():
            yield

    def keep_gradients(self) -> bool:
        return isinstance(self._group, GradientKeepingGroup) and self._group.keep_gradients()

    def kept_gradients(self) -> list[list[Tensor]]:
        """Gradients of the last update, of the weights' shapes, the same for each replica. Local."""
        self._drain()
        return require(self._group, GradientKeepingGroup).kept_gradients() * self.replicas

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        return _raise_unsupported()

    def tensor(self, array: np.ndarray) -> Tensor:
        return self._group.tensor(array)

    def numpy(self, tensor: Tensor) -> np.ndarray:
        """Copy of a tensor, or of an array of a batch (see `to_device`). Local."""
        return tensor.copy() if isinstance(tensor, np.ndarray) else self._group.numpy(tensor)

    local_step = apply_gradients = average_parameters = _unsupported

    def barrier(self) -> None:
        """Waits until all work items are applied. Local: workers take part in no barrier."""
        self._drain()

    def synchronize_device(self) -> None:
        self._drain()
        self._group.synchronize_device()

    def close(self) -> None:
        self._drain()
        self._pool.close()
        self._group.close()


def tcp_coordinator_group(
    server_connection: ServerConnection, build: Callable[[], ReplicaGroup]
) -> CoordinatorGroup:
    """Starts a coordinator that sends weights and slices to its workers over TCP."""
    pool = TcpWorkerPool(server_connection)
    group = CoordinatorGroup(build(), server_connection.context.replicas, pool)
    pool.await_workers(group.weights)
    return group


def recorded_coordinator_group(
    server_connection: ServerConnection, build: Callable[[], ReplicaGroup]
) -> CoordinatorGroup:
    """Starts a coordinator alone, which records what it would send to workers and servers. Local.

    Args:
        server_connection: Connection of a plan's rank 0; nothing is sent over it.
        build: Makes the replica group of this process, which holds the parameters.
    """
    pool = RecordedWorkerPool(server_connection)
    group = CoordinatorGroup(build(), server_connection.context.replicas, pool)
    pool.await_workers(group.weights)
    return group
