"""Parameter-server runs without processes: the work queue, and pending losses."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.backend.group_protocols import WorkerGroup
from isotrain.core.contracts.backend.protocol_checks import methods_of
from isotrain.core.contracts.state import StateInfo
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.parameter_server.coordinator import CoordinatorGroup, PendingLoss
from isotrain.core.parameter_server.layout import PARAMETER_SERVER_CAPABILITIES
from isotrain.core.parameter_server.work_queue import WorkItem, WorkQueue
from isotrain.core.parameter_server.worker_pool import WorkerPool, WorkResult
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.loading import load_spec
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.testing.recording_group import NEEDS


def unit(step: int, replica: int, staleness: int | None = 0) -> WorkItem:
    return WorkItem(step, replica, (Slice(None, None, 4, 1.0),), staleness)


def work_queue(steps: int, replicas: int, staleness: int | None) -> WorkQueue:
    made = WorkQueue()
    for step in range(steps):
        made.add([unit(step, replica, staleness) for replica in range(replicas)])
    return made


def names(given: list[tuple[int, WorkItem]]) -> list[tuple[int, int, int]]:
    return sorted((worker, each.step, each.replica) for worker, each in given)


def test_each_slice_goes_to_its_preferred_worker_if_free() -> None:
    assert names(work_queue(1, 3, 0).assign([2, 0, 1])) == [(0, 0, 0), (1, 0, 1), (2, 0, 2)]
    assert names(work_queue(1, 3, 0).assign([0, 2])) == [(0, 0, 0), (2, 0, 2)]


def test_a_slice_whose_worker_is_busy_goes_to_another() -> None:
    made = work_queue(1, 3, 0)
    assert names(made.assign([2])) == [(2, 0, 2)]
    assert names(made.assign([2])) == [(2, 0, 0)]
    assert made.waiting == 1


def test_an_earlier_step_has_priority() -> None:
    made = work_queue(2, 2, None)
    assert names(made.assign([0])) == [(0, 0, 0)]
    assert names(made.assign([0])) == [(0, 0, 1)]


def test_synchronous_steps_wait_for_all_of_the_step_before() -> None:
    made = work_queue(2, 2, 0)
    first = [each for _, each in made.assign([0, 1])]
    made.applied(first[0])
    assert made.assign([0, 1]) == []
    made.applied(first[1])
    assert names(made.assign([0, 1])) == [(0, 1, 0), (1, 1, 1)]


def test_every_wait_has_a_bound() -> None:
    assert len(work_queue(5, 2, None).assign(range(10))) == 10


def test_work_of_a_lost_worker_comes_first() -> None:
    made = work_queue(2, 2, None)
    lost = dict(made.assign([0, 1]))[0]
    made.requeue(lost)
    assert names(made.assign([1])) == [(1, 0, 0)]


@given(some.integers(0, 2**32), some.integers(1, 4), some.one_of(some.none(), some.integers(0, 3)))
def test_every_slice_is_applied_once_and_none_too_early(
    seed: int, replicas: int, staleness: int | None
) -> None:
    """It holds for any order of answers, and however often workers are lost."""
    made, steps, chance = work_queue(6, replicas, staleness), 6, Random(seed)
    applied: Counter[tuple[int, int]] = Counter()
    busy: dict[int, WorkItem] = {}
    while not made.is_empty:
        for worker, each in made.assign(set(range(replicas)) - busy.keys()):
            assert worker not in busy
            busy[worker] = each
            if staleness is not None:
                early = [(s, r) for s in range(each.step - staleness) for r in range(replicas)]
                assert all(applied[name] for name in early)
        worker = chance.choice(sorted(busy))
        each = busy.pop(worker)
        if chance.randrange(10) == 0:
            made.requeue(each)
        else:
            applied[each.step, each.replica] += 1
            made.applied(each)
    assert applied == Counter({(s, r): 1 for s in range(steps) for r in range(replicas)})


def test_a_pending_loss_waits_only_when_it_is_read() -> None:
    waited = []

    def wait() -> None:
        waited.append(True)
        loss.value = 2.5

    loss = PendingLoss(wait)
    assert not loss.is_ready
    assert not waited
    assert (float(loss), float(loss)) == (2.5, 2.5)
    assert waited == [True]
    assert loss.is_ready


class OneWeight:
    """A group of one replica, with what a coordinator needs to apply gradients."""

    def describe_state(self, kinds: Any) -> dict[str, StateInfo]:
        return {"trainable/w": StateInfo((1,), "float64", 8)} if "trainable" in kinds else {}

    def read_state(self, kinds: Any) -> dict[str, np.ndarray]:
        return {}

    def write_state(self, state: Any) -> None:
        pass

    def reseed(self, replica: int, step: int) -> None: ...

    def add_metric_state(self, sums: np.ndarray) -> None: ...

    def pop_metric_state(self) -> np.ndarray:
        return np.zeros(0)

    def compute(self, computation: Any, *values: Any, static: Any) -> list[Any]:
        return [np.zeros(0)]

    def apply_gradients(self, gradients: Any, rate: float) -> None:
        pass

    def tensor(self, array: np.ndarray) -> np.ndarray:
        return array

    def numpy(self, tensor: np.ndarray) -> np.ndarray:
        return tensor


class Counting(WorkerPool):
    """Workers that answer at once, and count what they were asked."""

    def __init__(self) -> None:
        self.lost = []
        self.done: list[WorkResult] = []
        self.steps, self.asked = Counter[int](), Counter[int]()

    def free(self) -> list[int]:
        return [0, 1]

    def hand_out(self, worker: int, item: WorkItem, version: int) -> None:
        self.steps[worker] += 1
        self.done.append(WorkResult(item, worker, version, 0.0, np.zeros(1), np.zeros(0)))

    def collect(self, timeout: float) -> list[WorkResult]:
        done, self.done = self.done, []
        return done

    def lost_items(self) -> list[WorkItem]:
        return []

    def execution_state(self, worker: int) -> dict[str, np.ndarray]:
        self.asked[worker] += 1
        return {"execution/steps": np.array(self.steps[worker])}

    def close(self) -> None:
        pass


def test_a_save_requests_each_workers_execution_state_once() -> None:
    workers = Counting()
    own: Any = OneWeight()
    group = CoordinatorGroup(own, 2, workers)
    slices = ((Slice(None, None, 4, 1.0),), (Slice(None, None, 4, 1.0),))
    for step in range(3):
        for replica in (0, 1):
            described = group.describe_state(("execution",), replica=replica)
            state = group.copy_state(("execution",), {}, replica=replica)()
            assert state == {"execution/worker/steps": step}
            assert described.keys() == state.keys()
        assert workers.asked == {0: step + 1, 1: step + 1}
        group.parameter_server_step(Batch(0, step, step, 8, False, True, slices), 0.5, 0)
    group.write_state({})
    group.read_state(("execution",), replica=1)
    group.write_state({})
    group.read_state(("execution",), replica=1)
    assert workers.asked[1] == 5, "after a restore they may compute otherwise"


def spec(**options: Any) -> TrainingSpec:
    return load_spec(
        {
            "model": dict,
            "data": dict,
            "loss": "mse",
            "optimizer": {"name": "sgd", "lr": 0.5},
            "global_batch_size": 12,
            "steps": 20,
            "device": "cpu",
            "strategy": {"name": "parameter-server", "options": options},
        }
    )


def refuses(method: str) -> bool:
    """Whether a coordinator's group lacks this, or says that it cannot do it."""
    bare: Any = object.__new__(CoordinatorGroup)
    if not hasattr(CoordinatorGroup, method):
        return True
    try:
        getattr(bare, method)(None)
    except UnsupportedError:
        return True
    except (AttributeError, TypeError):
        return False
    return False


def test_the_group_refuses_exactly_the_undeclared_capabilities() -> None:
    assert all(
        refuses(method) == (needed in PARAMETER_SERVER_CAPABILITIES.lacks)
        for method, needed in NEEDS.items()
        if method not in methods_of(WorkerGroup)
    )
    assert PARAMETER_SERVER_CAPABILITIES.has | set(PARAMETER_SERVER_CAPABILITIES.lacks) == set(
        Capability
    )


def roles(host: PluginManager, backend: str, replicas: int = 2, **options: Any) -> list[Any]:
    made = make_plan(ResolvedSpec(spec(**options), host), backend=backend, replicas=replicas)
    return [(process.role, process.replicas) for process in made.processes]


def test_the_plan_has_a_coordinator_and_a_worker_for_each_replica(host: PluginManager) -> None:
    workers = [("worker", (0,)), ("worker", (1,))]
    assert roles(host, "torch-ddp") == [("coordinator", (0, 1)), *workers]
    native = roles(host, "tf-multiworker", servers=2)
    assert native == [("coordinator", (0, 1)), *workers, ("server", ()), ("server", ())]
    assert roles(host, "torch-ddp", 1) == [("replica", (0,))]


def test_unsupported_options_are_refused_with_the_reason(host: PluginManager) -> None:
    with pytest.raises(
        UnsupportedError, match="keeps the parameters of a parameter-server run in rank 0"
    ):
        roles(host, "torch-ddp", servers=2)
    with pytest.raises(UnsupportedError, match="live in one process and step together"):
        roles(host, "tf-mirrored")
    with pytest.raises(PlanError, match="staleness: expected a whole number of at least 0"):
        roles(host, "torch-ddp", staleness=-1)
    half = spec().model_copy(update={"precision": "float16"})
    with pytest.raises(UnsupportedError, match="loss scale"):
        make_plan(ResolvedSpec(half, host), backend="torch-ddp", replicas=2)
