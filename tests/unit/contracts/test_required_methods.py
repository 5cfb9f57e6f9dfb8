"""What a first backend has to write stays small enough to hold in the head."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.capabilities import Availability, Capability
from isotrain.core.contracts.backend.replica import Computation, Replica, StatePart, Tensor
from isotrain.core.contracts.backend.replica_group import Phase, ReplicaGroup
from isotrain.core.contracts.plan import BackendConfig
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.contracts.state import MODEL_STATE, StateInfo, StateKind
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.errors import UnsupportedError
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.testing.reference.tensor_ops import NumpyTensorOps

REPLICAS = 4
ROWS = np.array([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0], [0.1, 0.2]])
"""What replica r sends, by row."""


def test_a_first_backend_writes_at_most_twenty_methods() -> None:
    classes: tuple[type, ...] = (Adapter, ReplicaGroup, Replica)
    required = {each.__name__: sorted(each.__abstractmethods__) for each in classes}  # type: ignore[attr-defined]
    assert sum(map(len, required.values())) <= 20, required


class Gathering(Replica):
    """A replica that writes nothing but the required methods; the others send the rows of `ROWS`."""

    ops = NumpyTensorOps()

    def __init__(self, index: int, state: dict[StatePart, np.ndarray] | None = None) -> None:
        self.index, self.replicas, self.state = index, REPLICAS, state or {}

    def read(self, parts: Sequence[StatePart]) -> Tensor:
        return np.concatenate([self.state.get(part, np.zeros(0)) for part in parts])

    def write(self, parts: Sequence[StatePart], vector: Tensor) -> None:
        (part,) = parts
        self.state[part] = vector

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = ROWS.astype(tensor.dtype)
        gathered[self.index] = tensor
        return gathered


@pytest.mark.parametrize("index", range(REPLICAS))
def test_every_collective_has_an_exact_default(index: int) -> None:
    replica, row = Gathering(index), ROWS[index]
    total = ROWS[0] + ROWS[1] + ROWS[2] + ROWS[3]
    assert replica.all_reduce(row).tolist() == total.tolist()
    assert replica.all_reduce(row, "mean").tolist() == (total / REPLICAS).tolist()
    assert replica.all_reduce(row, "max").tolist() == ROWS.max(axis=0).tolist()
    assert replica.send_receive(row, [1, 2, 3, 0]).tolist() == ROWS[index - 1].tolist()
    subgroups = [[0, 2], [1]]
    pair = ROWS[0] + ROWS[2] if index in (0, 2) else row
    assert replica.all_reduce_within(row, subgroups).tolist() == pair.tolist()
    first = ROWS[0] if index in (0, 2) else row
    assert replica.broadcast_within(row, subgroups).tolist() == first.tolist()


def test_the_mean_of_integers_keeps_their_dtype() -> None:
    assert Gathering(0).all_reduce(np.array([4, 4]), "mean").dtype == np.int64


class First(ReplicaGroup):
    """Two local replicas of one weight each, which write nothing but the required methods."""

    replicas = 2
    local_replicas = (0, 1)

    def __init__(self) -> None:
        self.states = [{"w": np.array([10.0]), "optimizer/steps": np.array(0)} for _ in range(2)]
        self.statistics = [np.array([1.0]), np.array([4.0])]

    def to_device(self, arrays: Any) -> Any:
        return np.array(arrays)

    def numpy(self, tensor: Tensor) -> np.ndarray:
        return np.array(tensor)

    def gradients(self, batch: Batch) -> tuple[list[list[Tensor]], Tensor]:
        """The gradient of a slice with mean 1, 2, ... is that number."""
        weighted = [
            sum(micro_batch.weight * micro_batch.inputs for micro_batch in slices)
            for slices in batch.slices
        ]
        return [[np.array([each])] for each in weighted], np.mean(weighted)

    def apply_gradients(self, gradients: Sequence[Sequence[Tensor]], learning_rate: float) -> None:
        for state, (gradient,) in zip(self.states, gradients, strict=True):
            state["w"] = state["w"] - learning_rate * gradient
            state["optimizer/steps"] = state["optimizer/steps"] + 1

    def evaluation_step(self, batch: Batch) -> None:
        raise NotImplementedError

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        raise NotImplementedError

    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        raise NotImplementedError

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        state = self.states[self.local_index(replica)]
        kinds_by_name = {name: name.split("/")[0] if "/" in name else "trainable" for name in state}
        return {name: value for name, value in state.items() if kinds_by_name[name] in kinds}

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        self.states[self.local_index(replica)].update(state)

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        """Runs the replicas in turn: twice, so that the second round knows what all of them send."""
        options = {} if static is None else {"static": static}
        sent: list[Tensor] = []
        for is_known in (False, True):
            results = []
            for index, state in enumerate(self.states):
                parts = {"trainable": state["w"], "statistics": self.statistics[index]}
                replica = _Local(index, dict(parts), sent, is_known)
                arguments = [value[index] for value in values]
                results.append((computation(replica, *arguments, **options), replica.state))
        for index, (_, parts) in enumerate(results):
            self.states[index]["w"], self.statistics[index] = (
                parts["trainable"],
                parts["statistics"],
            )
        return [result for result, _ in results]


class _Local(Gathering):
    def __init__(self, index: int, state: Any, sent: list[Tensor], is_known: bool) -> None:
        super().__init__(index, state)
        self.replicas, self.sent, self.is_known = 2, sent, is_known

    def all_gather(self, tensor: Tensor) -> Tensor:
        if self.is_known:
            return np.stack(self.sent)
        self.sent.append(tensor)
        return np.stack([tensor, tensor])


def batch(*counts: int) -> Batch:
    """One micro-batch per replica: so many samples, with mean 1 on the first and 2 on the second."""
    size = sum(counts)
    slices = tuple(
        (Slice(float(r + 1), None, count, count * 2 / size),) for r, count in enumerate(counts)
    )
    return Batch(0, 0, 0, size, False, len(set(counts)) == 1, slices)


def test_the_default_step_applies_the_mean_and_averages_statistics() -> None:
    group = First()
    loss = group.synchronous_step(batch(3, 1), 1.0)
    assert float(loss) == pytest.approx((3 * 1 + 1 * 2) / 4)
    assert [float(state["w"][0]) for state in group.states] == [10 - 1.25] * 2
    assert [float(each[0]) for each in group.statistics] == [(1.0 * 1.5 + 4.0 * 0.5) / 2] * 2


def test_the_default_local_step_takes_the_mean_over_the_slice() -> None:
    group = First()
    group.local_step(batch(3, 1), 1.0)
    assert [float(state["w"][0]) for state in group.states] == [9.0, 8.0]


def test_a_replica_without_samples_keeps_its_state_in_a_local_step() -> None:
    group = First()
    group.local_step(batch(4, 0), 1.0)
    assert [float(state["w"][0]) for state in group.states] == [9.0, 10.0]
    assert [int(state["optimizer/steps"]) for state in group.states] == [1, 0]


class LazySlots(First):
    """Replicas whose momentum the first update creates, decayed weights in it."""

    def apply_gradients(self, gradients: Sequence[Sequence[Tensor]], learning_rate: float) -> None:
        for state, (gradient,) in zip(self.states, gradients, strict=True):
            momentum = state.get("optimizer/w/momentum", np.zeros(1))
            state["optimizer/w/momentum"] = 0.5 * momentum + gradient + 0.1 * state["w"]
        super().apply_gradients(gradients, learning_rate)


def test_a_replica_without_samples_gets_zeros_as_optimizer_state() -> None:
    group = LazySlots()
    group.local_step(batch(4, 0), 1.0)
    assert [float(state["optimizer/w/momentum"][0]) for state in group.states] == [2.0, 0.0]
    assert [float(state["w"][0]) for state in group.states] == [9.0, 10.0]


SHARDS = [np.array([-0.0]), np.array([3.0, -0.0])]


def _all_gather_shards(replica: Replica, shard: Tensor, *, static: bool) -> Tensor:
    sizes, subgroups = [1, 2], [[0, 1]]
    if static:
        return replica.all_gather_shards_within(shard, sizes, subgroups)
    return replica.all_gather_shards(shard, sizes)


def _reduce_scatter(replica: Replica, vector: Tensor, *, static: bool) -> Tensor:
    sizes, subgroups = [1, 2], [[0, 1]]
    if static:
        return replica.reduce_scatter_within(vector, sizes, subgroups)
    return replica.reduce_scatter(vector, sizes)


@pytest.mark.parametrize("within", [False, True])
def test_shards_by_default(within: bool) -> None:
    joined = First().compute(_all_gather_shards, SHARDS, static=within)
    assert [each.tobytes() for each in joined] == [np.concatenate(SHARDS).tobytes()] * 2
    vectors = [np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0])]
    summed = First().compute(_reduce_scatter, vectors, static=within)
    assert [each.tolist() for each in summed] == [[11.0], [22.0, 33.0]]


@pytest.mark.parametrize("is_training", [False, True])
def test_state_is_preserved_by_default(is_training: bool) -> None:
    group = First()
    kinds = ("non-trainable", "random", "carry", "metrics", "optimizer")
    for state in group.states:
        state |= {f"{kind}/x": np.array(1) for kind in kinds}
    preserving = group.preserving_training_state if is_training else group.preserving_state
    with preserving():
        for state in group.states:
            state |= {f"{kind}/x": np.array(2) for kind in kinds}
    for state in group.states:
        values = [int(state[f"{kind}/x"]) for kind in kinds]
        assert values == [1, 1, 1, 1 if is_training else 2, 2]


def test_the_other_defaults_of_a_group() -> None:
    group = First()
    group.states[1]["w"] = np.array([20.0])
    group.average_parameters()
    assert [float(state["w"][0]) for state in group.states] == [15.0, 15.0]
    assert group.all_reduce_max([1.5, 2.5]) == [1.5, 2.5]
    assert group.describe_state()["w"] == StateInfo((1,), "float64", 8)
    group.barrier()
    group.synchronize_device()
    group.close()


class OnCPUs(Adapter):
    """An adapter that writes nothing but the required members."""

    name = "on-cpus"
    framework = "none"
    summary = "for a test"
    collectives = {"tcp": "one", "shared-memory": "two"}
    packages = ("numpy", "no-such-distribution")

    def availability(self) -> Availability:
        return Availability(True, "1.0")

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        raise NotImplementedError


def test_the_defaults_of_an_adapter() -> None:
    adapter = OnCPUs()
    assert adapter.accelerators() == 0
    assert adapter.environment_variables(device="cpu", threads=1, replicas=2) == {}
    assert adapter.resolve_collective(None, device="cpu", replicas=2) == "tcp"
    with pytest.raises(UnsupportedError, match=r"on-cpus.*CPUs only"):
        adapter.resolve_collective(None, device="gpu", replicas=2)
    found = adapter.examine()
    assert found.backend == adapter.availability()
    assert found.collectives == dict.fromkeys(adapter.collectives, found.backend)
    assert found.versions == {"numpy": np.__version__}
    has = adapter.capabilities_for("replicated").has
    assert {Capability.SYNCHRONOUS_STEP, Capability.SUBGROUPS} < has
    assert Capability.BFLOAT16_COLLECTIVES not in has
    assert not adapter.capabilities_for("pipeline").has
