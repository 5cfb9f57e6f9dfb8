"""The replica group of a coordinator: it holds the parameters, and workers compute the gradients."""

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

from isotrain.core.contracts.process import ServerConnection, rank_of
from isotrain.core.contracts.replica import Computation, StatePart, Tensor
from isotrain.core.contracts.replica_group import LayerTrait, Phase, ReplicaGroup
from isotrain.core.contracts.state import MODEL_STATE, StateInfo, StateKind
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.errors import IsotrainError, UnsupportedError, unknown_name
from isotrain.core.parameter_server.flat_state import (
    STATISTICS,
    WEIGHTS,
    read_parts,
    separated,
    write_parts,
)
from isotrain.core.parameter_server.tcp_workers import TcpWorkerPool
from isotrain.core.parameter_server.work_queue import WorkItem, WorkQueue
from isotrain.core.parameter_server.worker_pool import LostWorker, WorkerPool, WorkResult


class PendingLoss:
    """The mean loss of a global batch; each slice at the weights with which it was computed."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """Makes one that is not known yet.

        Args:
            wait: Returns once `value` is set.
        """
        self._wait = wait
        self.value: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `float` gives it at once."""
        return self.value is not None

    def __float__(self) -> float:
        if self.value is None:
            self._wait()
        assert self.value is not None
        return self.value


class ParameterServerStats:
    """Staleness of the updates, and who did how much."""

    def __init__(self) -> None:
        self._staleness: Counter[int] = Counter()
        self._slices: Counter[int] = Counter()
        self._lag = 0

    def hand_out(self, lag: int) -> None:
        """Notes that a slice is handed out, with weights that lack so many global batches before it."""
        self._lag = max(self._lag, lag)

    def count(self, answer: WorkResult, updates: int) -> None:
        """Notes that an answer is used.

        Args:
            answer: Which.
            updates: In the weights it is applied to, before it.
        """
        self._staleness[updates - answer.version] += 1
        if answer.worker is not None:
            self._slices[answer.worker] += 1

    def report(self, updates: int, lost: list[LostWorker]) -> dict[str, Any]:
        """As plain JSON values."""
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


_PATIENCE_SECONDS = 0.2
_EXCHANGE = "exchange/"
_WORKER = f"{_EXCHANGE}worker/"
"""How the names of a worker's state begin, which it calls as the coordinator calls its own."""


@dataclass
class _Step:
    """A global batch that is not wholly applied: what has come of it, by replica."""

    rate: float
    synchronous: bool
    missing: int
    loss: PendingLoss
    answers: dict[int, WorkResult] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)


def _refused(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "in a parameter-server run one process holds the parameters and workers compute gradients for it:"
        " there are no replicas that step or exchange by themselves. Use parameter_server_step."
    )


_refusal: Any = _refused


def _is_worker(name: str) -> bool:
    return name.startswith(_WORKER)


class CoordinatorGroup(ReplicaGroup):
    """All replicas of a parameter-server run.

    What is asked of the weights first waits until everything that was handed out is applied.
    """

    def __init__(self, own: ReplicaGroup, replicas: int, workforce: WorkerPool) -> None:
        """Makes the coordinator's group.

        Args:
            own: A group of one replica, which holds the parameters.
            replicas: Of the run.
            workforce: Computes the gradients.
        """
        if carried := own.describe_state(("carry",)):
            raise UnsupportedError(
                f"strategy parameter-server: layers carry {', '.join(carried)} from one call to the next, and"
                " any worker may compute any slice. Take a strategy in which each replica has its own slices,"
                " or make it a weight (add_weight with trainable=False)."
            )
        self.replicas = replicas
        self.local_replicas = tuple(range(replicas))
        self._own = own
        self._workforce = workforce
        self._updates = 0
        self._version = 0
        self._newest = -1
        self._cached: np.ndarray | None = None
        self._ledger = WorkQueue()
        self._steps: dict[int, _Step] = {}
        self._measures = ParameterServerStats()
        self._execution_state: dict[int, Mapping[str, np.ndarray]] = {}
        """What workers have said of how they have come to compute, and have computed nothing since."""
        weights = own.describe_state(("trainable",)).values()
        self._kinds = tuple((weight.shape, weight.dtype) for weight in weights)
        self._ends = tuple(itertools.accumulate(weight.size for weight in weights))
        own.pop_metric_state()  # refuses those whose sums could not be added up
        self._statistics = self._read(STATISTICS)

    def weights(self) -> np.ndarray:
        """The newest weights and moving statistics, one vector; read anew after each update."""
        if self._cached is None:
            weights = self._read(WEIGHTS)
            self._cached = np.concatenate([weights, self._statistics.astype(weights.dtype)])
        return self._cached

    def _read(self, parts: tuple[StatePart, ...]) -> np.ndarray:
        return self._own.numpy(self._own.compute(read_parts, static=parts)[0])

    def parameter_server_step(
        self, batch: Batch, learning_rate: float, staleness: int | None
    ) -> Tensor:
        number = batch.step
        if number <= self._newest:
            self._settle()  # the loop has gone back: the same step may still be under way
        self._newest = number
        loss = PendingLoss(lambda: self._until(lambda: not self._ledger.is_open(number)))
        items = [
            WorkItem(number, replica, pieces, staleness)
            for replica, pieces in enumerate(batch.slices)
            if any(piece.count for piece in pieces)
        ]
        self._steps[number] = _Step(learning_rate, staleness == 0, len(items), loss)
        self._ledger.add(items)
        if staleness == 0:
            self._settle()
            return self._own.tensor(np.array(float(loss)))
        self._until(lambda: self._ledger.waiting <= self.replicas)
        return loss

    def _until(self, reached: Callable[[], bool]) -> None:
        """Hands out and applies until a condition holds; then what is there, without waiting."""
        self._go_on(0.0)
        while not reached():
            self._go_on(_PATIENCE_SECONDS)

    def _go_on(self, patience: float) -> None:
        self._hand_out()
        for answer in self._workforce.collect(patience):
            self._receive(answer)
        for item in self._workforce.lost_items():
            self._ledger.requeue(item)
        self._hand_out()

    def _hand_out(self) -> None:
        for worker, item in self._ledger.assign(self._workforce.free()):
            self._execution_state.pop(worker, None)
            self._measures.hand_out(self._ledger.lag(item))
            self._workforce.hand_out(worker, item, self._version)

    def _settle(self) -> None:
        """Returns once everything that was handed out is applied."""
        self._until(lambda: self._ledger.is_empty)

    def _receive(self, answer: WorkResult) -> None:
        step = self._steps[answer.item.step]
        step.losses[answer.item.replica] = answer.loss
        step.missing -= 1
        if step.synchronous:
            step.answers[answer.item.replica] = answer
        else:
            self._apply([answer], step.rate / self.replicas, 1.0)
        if not step.missing:
            self._finish(answer.item.step)

    def _finish(self, number: int) -> None:
        """All slices of a step have come."""
        step = self._steps.pop(number)
        if step.synchronous:
            answers = [step.answers[replica] for replica in sorted(step.answers)]
            self._apply(answers, step.rate, 1.0 / self.replicas)
        losses = [step.losses[replica] for replica in sorted(step.losses)]
        step.loss.value = sum(losses) / self.replicas

    def _apply(self, answers: Sequence[WorkResult], rate: float, factor: float) -> None:
        """Updates the weights once with the sum of some gradients, times a factor."""
        length = self._ends[-1]
        total: np.ndarray = functools.reduce(np.add, [each.change[:length] for each in answers])
        if factor != 1.0:
            total = total * total.dtype.type(factor)
        own = self._own
        static = (self._kinds, self._ends)
        own.apply_gradients(own.compute(separated, [own.tensor(total)], static=static), rate)
        self._move_statistics(answers)
        for answer in answers:
            self._measures.count(answer, self._version)
            self._ledger.applied(answer.item)
            if answer.metrics.size:
                own.add_metric_state(answer.metrics)
        self._updates += 1
        self._outdate()

    def _outdate(self) -> None:
        """Notes that the weights have changed."""
        self._version += 1
        self._cached = None
        self._workforce.updated(self._version)

    def _move_statistics(self, answers: Sequence[WorkResult]) -> None:
        """Adds each slice's change of the moving statistics, by its share of the global batch."""
        if not self._statistics.size:
            return
        for answer in answers:
            moved = answer.change[self._ends[-1] :].astype(self._statistics.dtype)
            self._statistics = self._statistics + moved * moved.dtype.type(
                answer.item.share / self.replicas
            )
        own = self._own
        own.compute(write_parts, [own.tensor(self._statistics)], static=STATISTICS)

    def parameter_server_stats(self) -> Mapping[str, Any]:
        return self._measures.report(self._updates, self._workforce.lost)

    def to_device(self, arrays: Any) -> Any:
        """Leaves NumPy arrays as they are: workers get them as such."""
        return arrays

    def synchronous_step(self, batch: Batch, learning_rate: float) -> Tensor:
        """A served step without staleness is one."""
        return self.parameter_server_step(batch, learning_rate, 0)

    def evaluation_step(self, batch: Batch) -> None:
        self._settle()
        for piece in itertools.chain.from_iterable(batch.slices):
            if piece.count:
                self._own.evaluation_step(self._placed(piece, batch))

    def _placed(self, piece: Slice, batch: Batch) -> Batch:
        """A batch of one piece, for this process's own replica."""
        place = self._own.to_device
        targets = None if piece.targets is None else place(piece.targets)
        own = Slice(place(piece.inputs), targets, piece.count, 1.0)
        return replace(batch, even=True, slices=((own,),))

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        self._settle()
        return [self._own.predict([self._own.to_device(own)])[0] for own in inputs]

    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        self._settle()
        return self._own.collect_metrics(phase)

    def pop_metric_state(self) -> np.ndarray:
        self._settle()
        return self._own.pop_metric_state()

    def add_metric_state(self, sums: np.ndarray) -> None:
        self._own.add_metric_state(sums)

    def traits(self) -> list[LayerTrait]:
        return self._own.traits()

    def optimizer_lr_schedule(self) -> Callable[[int], float] | None:
        return self._own.optimizer_lr_schedule()

    def optimizer_rates(self) -> tuple[float, float] | None:
        return self._own.optimizer_rates()

    def weight_finalizer(self) -> Callable[[], None] | None:
        finalise = self._own.weight_finalizer()
        if finalise is None:
            return None

        def finalised() -> None:
            self._settle()
            finalise()
            self._outdate()

        return finalised

    def plan_notes(self) -> list[str]:
        return self._own.plan_notes()

    def step_notes(self, batch: Batch) -> list[str]:
        return self._own.step_notes(self._placed(batch.slices[0][0], batch))

    def refuses_single_sample(self, batch: Batch) -> str | None:
        return self._own.refuses_single_sample(self._placed(batch.slices[0][0], batch))

    def not_checkpointed(self) -> list[str]:
        return self._own.not_checkpointed()

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        own = self._own.describe_state(self._kept_of(replica, kinds))
        execution_state = self._habits_of(replica, kinds).items()
        return own | {n: StateInfo(a.shape, str(a.dtype), a.nbytes) for n, a in execution_state}

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        self._settle()
        own = self._own.read_state(self._kept_of(replica, kinds))
        return own | self._habits_of(replica, kinds)

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        place = self.local_index(replica)
        self._settle()
        execution_state = {
            n.replace(_WORKER, _EXCHANGE): a for n, a in state.items() if _is_worker(n)
        }
        self._require_known(execution_state)
        self._own.write_state({n: array for n, array in state.items() if not _is_worker(n)})
        self._execution_state.clear()
        if execution_state:
            for worker in range(self.replicas) if replica is None else (place,):
                self._workforce.set_execution_state(worker, execution_state)
        self._outdate()
        self._statistics = self._read(STATISTICS)

    def _habits_of(self, replica: int | None, kinds: Sequence[StateKind]) -> dict[str, np.ndarray]:
        """How the worker of a replica has come to compute, where that is asked for."""
        if "exchange" not in kinds:
            return {}
        self._settle()
        worker = self.local_index(replica)
        if worker not in self._execution_state:
            self._execution_state[worker] = self._workforce.execution_state(worker)
        found = self._execution_state[worker]
        return {name.replace(_EXCHANGE, _WORKER, 1): array for name, array in found.items()}

    def _require_known(self, execution_state: Collection[str]) -> None:
        """Refuses what no worker takes: they have what the coordinator's own replica has."""
        known = self._own.describe_state(("exchange",))
        for name in execution_state:
            if name not in known:
                raise IsotrainError(unknown_name("state", name, known))

    def _kept_of(self, replica: int | None, kinds: Sequence[StateKind]) -> Sequence[StateKind]:
        """What is kept of a replica: the weights are those of all; the rest is counted as the first one's."""
        if self.local_index(replica) == 0:
            return kinds
        return [kind for kind in kinds if kind in MODEL_STATE]

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        return self._own.read_weights_file(path)

    def gradients(self, batch: Batch) -> tuple[list[list[Tensor]], Tensor]:
        """Computes them here, one replica's after the other's: for looking at, not for training."""
        self._settle()
        found, total = [], 0.0
        for pieces in batch.slices:
            placed = tuple(self._placed(piece, batch).slices[0][0] for piece in pieces)
            weighted = tuple(
                replace(p, weight=q.weight) for p, q in zip(placed, pieces, strict=True)
            )
            even = len(weighted) == 1 and weighted[0].weight == 1.0
            with self._own.preserving_training_state():
                own, loss = self._own.gradients(replace(batch, even=even, slices=(weighted,)))
            found += own
            total += float(loss)
        return found, self._own.tensor(np.array(total / self.replicas))

    @contextmanager
    def preserving_training_state(self) -> Iterator[None]:
        """Nothing to do: `gradients` leaves everything as it was."""
        yield

    @contextmanager
    def preserving_state(self) -> Iterator[None]:
        with self._own.preserving_state():
            yield

    def keep_gradients(self) -> bool:
        return self._own.keep_gradients()

    def kept_gradients(self) -> list[list[Tensor]]:
        """Those of the last update, for each replica alike."""
        self._settle()
        return self._own.kept_gradients() * self.replicas

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        return _refused()

    def tensor(self, array: np.ndarray) -> Tensor:
        return self._own.tensor(array)

    def numpy(self, tensor: Tensor) -> np.ndarray:
        return self._own.numpy(tensor)

    local_step = apply_gradients = average_parameters = _refusal
    shard_optimizer = update_shard = reduce_scatter_gradients = pipeline_step = gather_stages = (
        _refusal
    )
    unshard_weights = _refusal

    def barrier(self) -> None:
        """Waits for what was handed out; there is no other process to wait for."""
        self._settle()

    def synchronize_device(self) -> None:
        self._settle()
        self._own.synchronize_device()

    def close(self) -> None:
        self._settle()
        self._workforce.close()
        self._own.close()


def tcp_coordinator_group(
    server_connection: ServerConnection, build: Callable[[], ReplicaGroup]
) -> CoordinatorGroup:
    """Starts a coordinator whose workers are sent weights and slices over TCP.

    Args:
        server_connection: Of the coordinator.
        build: Makes its group of one replica, which holds the parameters.
    """
    workforce = TcpWorkerPool(server_connection)
    group = CoordinatorGroup(build(), server_connection.context.replicas, workforce)
    workforce.await_workers(group.weights)
    return group
