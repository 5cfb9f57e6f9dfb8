"""Strategies without a run: options, graphs, schedules, bytes, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isotrain.core.contracts.cluster_environment import ClusterLayout
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.contracts.state import ModelBytes, StateBytes
from isotrain.core.contracts.strategy import Strategy, StrategyState
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.errors import IsotrainError, PlanError, UnsupportedError
from isotrain.core.planning.cluster_resources import ClusterResources
from isotrain.core.planning.model_stats import ModelStats, complete_plan
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.plugin import Capability, ShardedLayout
from isotrain.strategies import topologies
from isotrain.strategies.diloco import outer_step
from isotrain.strategies.local_sgd import LocalSGD
from isotrain.strategies.sharded import global_norm
from isotrain.testing.reference.tensor_ops import NumpyTensorOps

BACKEND = "torch-ddp"


def spec(name: str, options: dict[str, Any], **fields: Any) -> TrainingSpec:
    return TrainingSpec(
        **{
            "model": dict,
            "data": dict,
            "loss": "mse",
            "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.5},
            "global_batch_size": 12,
            "steps": 20,
            "device": "cpu",
            "strategy": {"name": name, "options": options},
            **fields,
        }
    )


def plan(
    host: PluginManager, name: str, options: dict[str, Any], replicas: int = 4, **fields: Any
) -> Plan:
    backend = fields.pop("backend", BACKEND)
    cast = ResolvedSpec(spec(name, options, **fields), host)
    return make_plan(cast, backend=backend, replicas=replicas)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("local-sgd", {"every": 0}, "every: expected a whole number of at least 1, received 0"),
        ("local-sgd", {"every": 2.5}, "received 2.5"),
        ("local-sgd", {"every": []}, "pairs"),
        ("local-sgd", {"every": [[5, 2]]}, "the first at 0 or before"),
        ("local-sgd", {"every": [[0, 2], [0, 3]]}, "ascending"),
        ("local-sgd", {"start": -1}, "start"),
        ("local-sgd", {"average_momenta": 1}, "true or false"),
        (
            "local-sgd",
            {"evry": 1},
            r"of the strategy 'local-sgd': 'evry'. Did you mean 'every'\? Available: average_",
        ),
        ("gossip", {"graph": "rng"}, "Did you mean 'ring'"),
        ("gossip", {"degree": 2}, "none except for graph random"),
        ("gossip", {"graph": "random", "degree": 3}, "even number from 2 to 3"),
        ("compressed", {}, "method"),
        ("compressed", {"method": "fp8"}, "unknown method 'fp8'"),
        ("compressed", {"method": "topk", "ratio": 0}, "above 0 and up to 1"),
        ("compressed", {"method": "topk", "ratio": 1.5}, "received 1.5"),
        ("compressed", {"method": "topk", "rank": 2}, "rank is an option of method 'powersgd'"),
        ("compressed", {"method": "powersgd", "rank": 0}, "at least 1"),
        ("compressed", {"method": "powersgd", "start": 1}, "at least 2"),
        ("hierarchical", {"host_size": 3}, "a divisor of the 4 replicas, got 3"),
        ("elastic-averaging", {"beta": 2}, "beta"),
        ("diloco", {"every": 0}, "strategy diloco: every: expected a whole number of at least 1"),
        ("diloco", {"outer_rate": 0}, "outer_rate: expected a number above 0, received 0"),
        ("diloco", {"outer_momentum": 2}, "outer_momentum: expected a number from 0 to 1"),
        ("diloco", {"outer_momentum": None}, "outer_momentum: expected a number from 0 to 1"),
        ("diloco", {"bits": 2}, "bits: expected 8, 4 or none, received 2"),
        ("diloco", {"fragments": 0}, "fragments: expected a whole number of at least 1"),
        ("diloco", {"every": 3, "fragments": 4}, "fragments: expected at most 3, as every"),
        ("diloco", {"every": 3, "overlap": 3}, "overlap: expected less than every, 3, received 3"),
        ("diloco", {"mix": 0.5}, "diloco: mix needs overlap: set overlap, or leave mix out"),
        ("diloco", {"overlap": 2, "mix": 2}, "mix: expected a number from 0 to 1, received 2"),
        ("diloco", {"overlap": 2, "mix": ""}, "mix: expected a number from 0 to 1, received ''"),
        ("diloco", {"overlap": 2, "mix": []}, r"mix: expected a number from 0 to 1, received \[\]"),
        (
            "diloco",
            {"every": [[0, 8], [20, 4]], "start": 5, "overlap": 1},
            r"every: expected a number, with fragments or overlap, received \[\[0, 8\], \[20, 4\]\]",
        ),
        ("elastic-averaging", {"every": True}, "every"),
        ("sharded", {"stage": 0}, "stage: expected a whole number of at least 1, received 0"),
        ("sharded", {"stage": 4}, "stage: expected 1, 2 or 3, received 4"),
        (
            "sharded",
            {"bucket_megabytes": 0},
            "bucket_megabytes: expected a number above 0, received 0",
        ),
        ("sharded", {"hybrid": 2}, "hybrid: expected true or false, received 2"),
        ("sharded", {"host_size": 2}, "host_size is an option of `hybrid: true`"),
        ("sharded", {"hybrid": True, "host_size": 0}, "host_size: expected a whole number of at"),
        ("sharded", {"hybrid": True, "host_size": 3}, "a divisor of the 4 replicas, got 3"),
    ],
)
def test_wrong_options_are_refused_by_the_plan(
    host: PluginManager, name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(IsotrainError, match=words):
        plan(host, name, options)


def test_an_unknown_stage_is_refused_by_the_plan(host: PluginManager) -> None:
    with pytest.raises(PlanError, match="stage: expected 1, 2 or 3, received 4"):
        plan(host, "sharded", {"stage": 4})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hierarchical", {"host_size": 2}),
        ("sharded", {"hybrid": True, "host_size": 2}),
        ("gossip", {"graph": "torus"}),
        ("gossip", {"graph": "random"}),
    ],
)
def test_options_for_several_replicas_allow_one(
    host: PluginManager, name: str, options: dict[str, Any]
) -> None:
    """A measured plan and a check look at data and model with one replica."""
    assert plan(host, name, options, replicas=1).replicas == 1


def test_the_plan_says_which_backends_wait_for_exchanges(host: PluginManager) -> None:
    """It is said where there are exchanges, and they were to overlap."""
    waits = (
        "diloco: numpy has no asynchronous-collectives: its collectives return when they are done: each"
        " exchange is waited for, with the same results"
    )
    overlapping = {"every": 8, "overlap": 2}
    assert waits in plan(host, "diloco", overlapping, backend="numpy").notes
    assert waits not in plan(host, "diloco", overlapping, backend="numpy", replicas=1).notes
    assert waits not in plan(host, "diloco", {"every": 8}, backend="numpy").notes
    said = {
        backend: any(
            "waited for" in note
            for note in plan(host, "diloco", overlapping, backend=backend).notes
        )
        for backend in ("torch-ddp", "horovod-torch")
    }
    assert said == {"torch-ddp": False, "horovod-torch": True}


def test_a_torus_needs_a_grid(host: PluginManager) -> None:
    with pytest.raises(PlanError, match="rows"):
        plan(host, "gossip", {"graph": "torus"}, replicas=5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("local-sgd", {}),
        ("gossip", {}),
        ("elastic-averaging", {}),
        ("diloco", {}),
        ("hierarchical", {}),
        ("compressed", {"method": "topk"}),
        ("sharded", {}),
    ],
)
def test_loss_scaling_is_refused(host: PluginManager, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="loss scale"):
        plan(host, name, options, precision="float16")


def test_a_strategy_that_does_not_say_so_is_elastic_only_without_steps_and_state_of_its_own() -> (
    None
):
    class Plain(Strategy):
        requires = frozenset({Capability.SYNCHRONOUS_STEP})

        def step(self, group: Any, batch: Batch, learning_rate: float) -> Any: ...

    class OwnState(Plain):
        def state(self, group: Any) -> StrategyState:
            return StrategyState({"steps": 1})

    class OwnStep(Plain):
        requires = frozenset({Capability.LOCAL_STEP})

    class OwnLayout(Plain):
        parallel_layout = ShardedLayout()

    assert Plain().why_not_elastic() is None
    for each in (OwnState, OwnStep, OwnLayout):
        assert "override `why_not_elastic`" in str(each().why_not_elastic())


@pytest.mark.parametrize("name", ["sharded", "pipeline"])
def test_a_custom_optimizer_is_refused_where_it_would_see_a_shard(
    host: PluginManager, name: str
) -> None:
    optimizer = {"custom": "somewhere:make", "lr": 0.5}
    with pytest.raises(UnsupportedError, match="its shard of the weights"):
        plan(host, name, {}, optimizer=optimizer)


def test_muon_is_refused_where_no_replica_has_a_whole_matrix(host: PluginManager) -> None:
    optimizer = {"name": "muon", "lr": 0.5}
    plan(host, "sharded", {}, optimizer=optimizer)
    with pytest.raises(UnsupportedError, match="the whole gradient of a matrix"):
        plan(host, "sharded", {"stage": 3}, optimizer=optimizer)


def test_bfloat16_is_refused_where_it_would_travel_as_float32(host: PluginManager) -> None:
    (strategy,) = [host.strategy("compressed", {"method": "bf16"})]
    lacking = [
        name
        for name in host.backends.names()
        if strategy.requires - host.backend(name).capabilities_for("replicated").has
    ]
    assert lacking
    assert all("horovod" in name or name == "numpy" for name in lacking)


def test_clipping_is_noted(host: PluginManager) -> None:
    assert any("clip" in r for r in plan(host, "gossip", {}, clip={"value": 1.0}).notes)
    assert not any("clip" in r for r in plan(host, "gossip", {}).notes)


ALL_GRAPHS = [
    (graph, replicas)
    for graph in topologies.GRAPHS
    for replicas in (2, 3, 4, 6, 8, 9, 12)
    if not (graph == "torus" and replicas < 4) and not (graph == "random" and replicas < 3)
]


def is_connected(weights: np.ndarray) -> bool:
    return bool((np.linalg.matrix_power(weights, len(weights)) > 0).all())


@pytest.mark.parametrize(("graph", "replicas"), [g for g in ALL_GRAPHS if g != ("torus", 3)])
def test_graphs_are_doubly_stochastic_and_connected(graph: str, replicas: int) -> None:
    product = np.eye(replicas)
    for rounds in topologies.mixings(graph, replicas, 2, seed=7):
        weights = np.array(topologies.matrix(rounds, replicas))
        assert (weights >= 0).all()
        assert np.allclose(weights.sum(axis=0), 1)
        assert np.allclose(weights.sum(axis=1), 1)
        assert all(sorted(permutation) == list(range(replicas)) for permutation in rounds)
        product = weights @ product
    assert is_connected(product)


def test_graph_neighbours() -> None:
    def neighbours(graph: str, replicas: int, mixing: int = 0) -> list[int]:
        rounds = topologies.mixings(graph, replicas, 2, 0)[mixing]
        return sorted(permutation[0] for permutation in rounds)

    assert neighbours("ring", 8) == [1, 7]
    assert neighbours("ring", 2) == [1]
    assert neighbours("torus", 12) == [1, 3, 4, 8]
    assert neighbours("exponential", 8) == [1, 2, 4]
    assert [neighbours("one-peer-exponential", 8, m) for m in range(3)] == [[1], [2], [4]]
    assert neighbours("complete", 4) == [1, 2, 3]
    weights = topologies.matrix(topologies.mixings("complete", 5, 2, 0)[0], 5)
    assert np.allclose(weights, 1 / 5)


def test_a_random_graph_follows_its_seed() -> None:
    first, again, other = (topologies.mixings("random", 9, 4, seed) for seed in (1, 1, 2))
    assert first == again != other


def averagings(every: Any, start: int, steps: int) -> list[int]:
    strategy = LocalSGD(every=every, start=start)
    return [step for step in range(start, steps) if strategy.is_averaged_after(step)]


def test_local_sgd_averages_when_its_schedule_says() -> None:
    assert averagings(3, 0, 10) == [2, 5, 8]
    assert averagings(3, 2, 10) == [4, 7]
    assert averagings([[0, 1], [3, 2], [8, 4]], 0, 16) == [0, 1, 2, 4, 6, 7, 11, 15]
    assert averagings([[0, 2], [6, 3]], 1, 9) == [2, 4, 5, 8]


def test_local_sgd_restarts_its_count_when_restored_to_an_average() -> None:
    strategy, group = LocalSGD(every=4), SimpleNamespace(local_replicas=(0,))
    between = StrategyState(
        {"steps": 2, "even": False, "local": True}, per_replica={0: {"samples": np.array(3.0)}}
    )
    averaged = strategy.state(group)  # type: ignore[arg-type]
    strategy.load_state(group, between)  # type: ignore[arg-type]
    assert strategy.state(group) == between  # type: ignore[arg-type]
    strategy.load_state(group, averaged)  # type: ignore[arg-type]
    assert strategy.state(group) == averaged  # type: ignore[arg-type]


def test_local_sgd_averages_by_the_samples_of_all_steps_since_the_last_average() -> None:
    """An uneven batch counts also where the one before the average is even."""

    class Averaging:
        local_replicas = (0, 1)
        weights: Any = ()

        def local_step(self, batch: Batch, learning_rate: float) -> float:
            return 0.0

        def tensor(self, value: np.ndarray) -> float:
            return float(value)

        def compute(self, computation: Any, *values: Any, static: Any) -> None:
            self.weights = values

    def batch(step: int, weights: Sequence[float]) -> Batch:
        slices = tuple((Slice(None, None, 1, weight),) for weight in weights)
        return Batch(0, step, step, 8, False, len(set(weights)) == 1, slices)

    strategy, group = LocalSGD(every=2), Averaging()
    found = []
    for step, weights in enumerate([(1.5, 0.5), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]):
        strategy.step(group, batch(step, weights), 0.125)  # type: ignore[arg-type]
        found.append(group.weights)
    assert found == [(), ([1.25, 0.75],), ([1.25, 0.75],), ()]


def test_an_outer_step_reads_no_weights_and_writes_those_of_its_fragment() -> None:
    """Of many weights, each copy takes longer than the step itself."""

    class Written:
        start: int | None = None
        vector: Any = None

        def write_range(self, start: int, vector: np.ndarray) -> None:
            self.start, self.vector = start, vector

    replica, state = Written(), [np.ones(3), np.zeros(3)]
    outer, _ = outer_step(replica, state, np.ones(3), static=(7, 0.25, 0.0, 0.0))  # type: ignore[arg-type]
    assert replica.start == 7
    assert replica.vector is outer
    np.testing.assert_array_equal(outer, np.full(3, 0.75))


class Computing:
    """A group of two local replicas that notes the last argument of each computation, or a native step."""

    replicas = 2
    local_replicas = (0, 1)

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def read_state(self, kinds: Sequence[str]) -> dict[str, np.ndarray]:
        return {"kernel": np.zeros((6, 5)), "bias": np.zeros(5)}

    def tensor(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def numpy(self, tensor: np.ndarray) -> np.ndarray:
        return tensor

    def local_step(self, batch: Any, learning_rate: float) -> float:
        return 0.0

    def synchronous_step(self, batch: Any, learning_rate: float) -> float:
        self.calls.append("native")
        return 0.0

    def gradients(self, batch: Any) -> tuple[list[Any], float]:
        return [], 0.0

    def replica_weights(self, batch: Any) -> list[Any]:
        return []

    def apply_gradients(self, gradients: Any, learning_rate: float) -> None:
        """Does nothing: there are no weights."""

    def compute(self, computation: Any, *values: Any, static: Any) -> list[Any]:
        self.calls.append(static)
        return [([], state) for state in values[-1]] if values else []


def test_gossip_takes_its_mixings_in_turn(host: PluginManager) -> None:
    options = {"graph": "one-peer-exponential", "every": 2}
    strategy, group = host.strategy("gossip", options), Computing()
    strategy.configure(spec("gossip", options), plan(host, "gossip", options))
    for step in range(8):
        strategy.step(group, SimpleNamespace(step=step), 0.125)  # type: ignore[arg-type]
    assert group.calls == list(topologies.mixings("one-peer-exponential", 4, 2, 0)) * 2


def test_powersgd_compresses_from_its_start(host: PluginManager) -> None:
    strategy = host.strategy(
        "compressed", {"method": "powersgd", "start": 2, "rank": 1, "native": False}
    )
    group = Computing()
    strategy.started(group)  # type: ignore[arg-type]
    for step in range(4):
        strategy.step(group, SimpleNamespace(step=step), 0.125)  # type: ignore[arg-type]
    assert group.calls == ["native", "native", 1, 1]


def test_powersgd_restores_residuals_and_right_factors(host: PluginManager) -> None:
    strategy = host.strategy("compressed", {"method": "powersgd", "rank": 1, "native": False})
    group: Any = Computing()
    strategy.started(group)
    saved = StrategyState(
        tensors={"right/0": np.full((5, 1), 3.0)},
        per_replica={replica: {"residual/0": np.full((6, 5), replica)} for replica in (0, 1)},
    )
    strategy.load_state(group, saved)
    state = strategy.state(group)
    np.testing.assert_equal(state.tensors, saved.tensors)
    np.testing.assert_equal(state.per_replica, saved.per_replica)


SHAPES = [(20, 30), (30,)]
BYTES = 4 * 630


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("local-sgd", {"every": 5}, 1.5 * BYTES / 5),
        ("local-sgd", {"every": 8}, 1.5 * BYTES * 3 / 20),
        ("local-sgd", {"every": 5, "start": 10}, 1.5 * BYTES * 12 / 20),
        ("local-sgd", {"every": 5, "average_momenta": True}, 2 * 1.5 * BYTES / 5),
        ("gossip", {}, (2 + 1.5 / 20) * BYTES),
        ("gossip", {"graph": "one-peer-exponential", "every": 2}, (1 / 2 + 1.5 / 20) * BYTES),
        ("gossip", {"graph": "complete"}, 1.5 * 21 / 20 * BYTES),
        ("compressed", {"method": "fp16"}, 1.5 * BYTES / 2),
        ("compressed", {"method": "topk", "ratio": 0.1}, 3 * 63 * 8),
        ("compressed", {"method": "powersgd", "rank": 2}, 1.5 * 4 * (2 * 50 + 30)),
        ("hierarchical", {"host_size": 2}, (2 * 3 + 2) * BYTES / 4),
        ("sharded", {"hybrid": True, "host_size": 2}, (2 * 2 + 2) * BYTES / 4),
        ("elastic-averaging", {"every": 3}, 1.5 * BYTES * 7 / 20),
        ("diloco", {"every": 10}, 1.5 * BYTES / 10),
        ("diloco", {"every": 10, "fragments": 2, "overlap": 4}, 1.5 * BYTES * 2.5 / 20),
        ("diloco", {"every": 8, "bits": 4}, 3 * BYTES * (1 / 8 + 1 / 256) * 3 / 20),
    ],
)
def test_the_plan_has_the_sent_bytes(
    host: PluginManager, name: str, options: dict[str, Any], expected: float
) -> None:
    made = plan(host, name, options)
    found = complete_plan(
        made,
        ResolvedSpec(spec(name, options), host),
        ModelStats(samples=100, parameters=630, gradient_bytes=BYTES, weight_shapes=SHAPES),
    )
    assert found.exchanged_bytes_per_step == pytest.approx(expected)
    assert "weight_shapes" not in found.to_dict()


def test_a_model_with_fewer_weights_than_replicas_is_refused(host: PluginManager) -> None:
    made = plan(host, "sharded", {})
    with pytest.raises(
        PlanError, match="the model has 2 trainable weights, and each of 4 replicas"
    ):
        complete_plan(
            made,
            ResolvedSpec(spec("sharded", {}), host),
            ModelStats(samples=100, parameters=630, gradient_bytes=BYTES, weight_shapes=SHAPES),
        )


class Noting:
    """A group that computes nothing, and notes between whom it was to."""

    between: Any = None

    def gradients(self, batch: Any) -> tuple[list[Any], float]:
        return [], 0.0

    def replica_weights(self, batch: Any) -> list[Any]:
        return []

    def compute(self, computation: Any, *values: Any, static: Any) -> list[Any]:
        self.between = static
        return []

    def apply_gradients(self, gradients: Any, learning_rate: float) -> None:
        """Does nothing: there are no weights."""


def test_hosts_are_those_of_the_plan(host: PluginManager) -> None:
    strategy = host.strategy("hierarchical", {})
    made = plan(host, "hierarchical", {})
    processes = [replace(p, host=name) for p, name in zip(made.processes, "abab", strict=True)]
    strategy.configure(spec("hierarchical", {}), replace(made, processes=tuple(processes)))
    group = Noting()
    strategy.step(group, SimpleNamespace(even=True), 0.125)  # type: ignore[arg-type]
    assert group.between == ((0, 2), (1, 3))


def on_hosts(
    host: PluginManager, hosts: str, options: dict[str, Any], backend: str = BACKEND, **changes: Any
) -> Plan:
    """A plan for processes that lie on these hosts, of one letter each."""
    processes = tuple(
        ProcessInfo(rank, name, hosts[:rank].count(name)) for rank, name in enumerate(hosts)
    )
    native = options.get("stage") == 3 and backend == BACKEND
    model = {"torch": dict} if native else dict
    cast = ResolvedSpec(spec("sharded", options, model=model, **changes), host)
    layout = ClusterLayout("there", processes, cores=1, gpus=0)
    made = make_plan(cast, backend=backend, replicas=len(hosts), resources=ClusterResources(layout))
    measures = ModelStats(100, 4 * 630, 4 * BYTES, 4 * SHAPES)
    return complete_plan(made, cast, measures)


@pytest.mark.parametrize("hosts", ["aabb", "abab"])
@pytest.mark.parametrize(
    ("stage", "sent"),
    [(2, 2 * 3 / 4), (3, (2 + 2) * 1 / 2 + 2 * 1 / 2 / 2)],  # of all gradients
)
def test_hybrid_shards_are_inside_the_hosts_of_the_plan(
    host: PluginManager, hosts: str, stage: int, sent: float
) -> None:
    made = on_hosts(host, hosts, {"hybrid": True, "stage": stage})
    assert made.device_mesh.groups("shard") == made.hosts
    assert (made.device_mesh.size("data"), made.device_mesh.size("shard")) == (2, 2)
    assert made.exchanged_bytes_per_step == pytest.approx(sent * 4 * BYTES)


@pytest.mark.parametrize(
    ("hosts", "options", "sent"),
    [
        ("aaaa", {"stage": 1}, (1 + 1) * 3 / 4),
        ("aaaa", {"stage": 2}, (3 + 1) * 3 / 4),
        ("aabb", {"stage": 2, "hybrid": True}, (3 + 1) * 1 / 2 + 3 * 2 * 1 / 2 / 2),
        ("aaaa", {"stage": 3}, (3 * 2 + 2) * 3 / 4),
    ],
)
def test_exchange_of_micro_batches_is_noted(
    host: PluginManager, hosts: str, options: dict[str, Any], sent: float
) -> None:
    made = on_hosts(host, hosts, options, gradient_accumulation_steps=3)
    assert made.exchanged_bytes_per_step == pytest.approx(sent * 4 * BYTES)


@pytest.mark.parametrize("backend", ["tf-multiworker", "horovod-tf"])
def test_tensorflow_reduces_shards_in_each_micro_batch(host: PluginManager, backend: str) -> None:
    options = {"stage": 3, "hybrid": True}
    made = on_hosts(host, "aabb", options, backend, gradient_accumulation_steps=3)
    sent = 3 * (3 * 1 / 2 + 2 * 1 / 2 / 2)
    assert made.exchanged_bytes_per_step == pytest.approx(sent * 4 * BYTES)
    assert any("recomputed in the backward pass" in note for note in made.notes)


def test_hybrid_runs_need_hosts_of_one_size_and_a_weight_for_each_replica_of_one(
    host: PluginManager,
) -> None:
    with pytest.raises(PlanError, match="hybrid: 2 hosts have 2, 1 replicas"):
        on_hosts(host, "aab", {"hybrid": True})
    assert on_hosts(host, "aab", {"hybrid": True, "host_size": 1}).device_mesh.size("data") == 3
    assert (
        on_hosts(host, 9 * "a" + 9 * "b", {"stage": 3, "hybrid": True}).device_mesh.size("shard")
        == 9
    )
    with pytest.raises(PlanError, match="8 trainable weights, and each of 9 replicas of a host"):
        on_hosts(host, 9 * "a" + 9 * "b", {"hybrid": True})


@pytest.mark.parametrize(
    "name",
    ["sharded", "pipeline", "parameter-server", "gossip", "elastic-averaging", "hierarchical"],
)
def test_options_that_only_data_parallel_steps_honour_are_refused(
    host: PluginManager, name: str
) -> None:
    fields = {"backend_options": {BACKEND: {"bucket_cap_mb": 1}}}
    with pytest.raises(UnsupportedError, match=r"bucket_cap_mb: .* Leave it out"):
        plan(host, name, {}, **fields)
    plan(host, "local-sgd", {}, **fields)  # whose first steps may be such


def test_horovod_options_are_refused_in_parameter_server_runs(host: PluginManager) -> None:
    options = {"horovod-torch": {"cycle_time_ms": 1}}
    cast = ResolvedSpec(spec("parameter-server", {}, backend_options=options), host)
    with pytest.raises(UnsupportedError, match="Leave cycle_time_ms out"):
        make_plan(cast, backend="horovod-torch", replicas=2)


def test_a_plan_notes_that_full_sharding_is_not_captured(host: PluginManager) -> None:
    told = "steps of a portable model with sharded weights are not captured"
    for replicas, backend in ((2, "torch-ddp"), (2, "horovod-torch"), (1, "torch-ddp")):
        found = plan(host, "sharded", {"stage": 3}, replicas=replicas, backend=backend)
        assert any(told in note for note in found.notes) == (replicas > 1)


def test_the_global_norm_has_one_dtype_on_all_replicas() -> None:
    """A replica may have no weights of the widest dtype; all exchange the same."""
    replica: Any = SimpleNamespace(ops=NumpyTensorOps(), all_reduce=lambda squares: squares)
    norm = global_norm(replica, [np.array([3.0], np.float32), np.array([[4.0]], np.float32)])
    assert (norm.dtype, float(norm)) == (np.float64, 5.0)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"stages": 2}, 8),  # 8 | 1 3 2 2
        ({"stages": 3}, 8),
        ({"stages": 5}, 8),
        ({"stages": 2, "chunks": 2, "schedule": "interleaved"}, 8),
        ({"stages": 1}, 16),
    ],
)
def test_state_bytes_of_a_stage_follow_its_cuts(
    host: PluginManager, options: dict[str, Any], most: int
) -> None:
    strategy = host.strategy("pipeline", options)
    found = strategy.state_bytes(ModelBytes((8, 1, 3, 2, 2), fixed=4, slots=2), 2)
    assert found == StateBytes(20, most, 2 * most), "all weights are there for an evaluation"


def test_stashed_versions_are_counted_and_told(host: PluginManager) -> None:
    """The largest stage that keeps earlier versions counts, not the largest; there is one gradient."""
    model = ModelBytes((8, 1, 3, 2, 2), fixed=4, slots=2)  # 8 | 1 3 2 2
    for vertical_sync, earlier in ((False, 8), (True, 8)):
        options = {"schedule": "pipedream", "vertical_sync": vertical_sync}
        found = host.strategy("pipeline", options).state_bytes(model, 2)
        assert found == StateBytes(20 + earlier, 8, 16)
    three = host.strategy("pipeline", {"schedule": "pipedream", "stages": 3})
    assert three.state_bytes(ModelBytes((1, 4, 4), 0, 0), 1) == StateBytes(9 + 4, 4, 0)
    options = {"schedule": "pipedream", "stages": [2, 1, 1]}
    notes = plan(host, "pipeline", options, replicas=1, gradient_accumulation_steps=4).notes
    (told,) = (note for note in notes if "staleness" in note)
    assert "(by stage: 1, 1, 0). A step updates the stages 2 or 4 times" in told


def test_a_resumed_run_says_that_its_first_updates_are_not_late(host: PluginManager) -> None:
    """Not where none is ever late."""
    for schedule, stages, told in (("2bw", 1, 1), ("pipedream", 2, 1), ("pipedream", 1, 0)):
        strategy = host.strategy("pipeline", {"schedule": schedule, "stages": stages})
        notes = strategy.resume_notes("data-parallel", 1, 1)
        assert len(notes) == told, (schedule, stages)
        assert "not late" in " ".join(notes) or not told


def test_stages_that_are_updated_by_each_micro_batch_exchange_gradients_as_often(
    host: PluginManager,
) -> None:
    """The ring of two replicas sends all gradients once an update."""
    for schedule, updates in (("1f1b", 1), ("2bw", 1), ("pipedream", 4)):
        strategy = host.strategy("pipeline", {"schedule": schedule})
        fields = {"gradient_accumulation_steps": 4}
        made = plan(host, "pipeline", {"schedule": schedule}, replicas=2, **fields)
        strategy.configure(spec("pipeline", {"schedule": schedule}, **fields), made)
        assert strategy.exchanged_bytes(100, 2) == updates * 50
