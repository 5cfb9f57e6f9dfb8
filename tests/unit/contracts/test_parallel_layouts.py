"""Parallel layouts: device meshes, process roles, and a layout of a plugin."""

from __future__ import annotations

from typing import Any

import pytest

from isotrain.core.contracts.backend.capabilities import Capabilities, Capability
from isotrain.core.contracts.device_mesh import DATA, SHARD, STAGE, DeviceMesh
from isotrain.core.contracts.parallel_layout import REPLICATED, ParallelLayout
from isotrain.core.contracts.process import ProcessContext, ProcessInfo, from_variables
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import UnsupportedError
from isotrain.core.parameter_server.layout import ParameterServerLayout
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.testing.reference.adapter import Reference

SPEC = TrainingSpec(
    model="m:build",
    loss="mean_squared_error",
    data="m:data",
    optimizer={"name": "sgd", "lr": 0.1},
    global_batch_size=8,
    epochs=1,
)


def test_mesh_positions_are_numbered_row_by_row() -> None:
    mesh = DeviceMesh({DATA: 2, SHARD: 3})
    assert (mesh.total_size, mesh.replicas, mesh.size(STAGE)) == (6, 6, 1)
    assert [tuple(mesh.coordinates(place).values()) for place in range(6)] == [
        *((0, 0), (0, 1), (0, 2)),
        *((1, 0), (1, 1), (1, 2)),
    ]
    assert mesh.groups(SHARD) == ((0, 1, 2), (3, 4, 5))
    assert mesh.groups(DATA) == ((0, 3), (1, 4), (2, 5))
    assert mesh.groups(STAGE) == tuple((place,) for place in range(6))


def test_stages_are_parts_of_a_replica() -> None:
    mesh = DeviceMesh({STAGE: 2, DATA: 3})
    assert (mesh.total_size, mesh.replicas) == (6, 3)
    assert mesh.coordinates(4) == {STAGE: 1, DATA: 1}


def test_a_mesh_is_sent_with_the_process_context() -> None:
    mesh = DeviceMesh({DATA: 2, SHARD: 2})
    context = ProcessContext(
        1, 4, "", (ProcessInfo(1, "h", 1, (1,)),), (("h", 1),), device_mesh=mesh
    )
    again = from_variables(context.to_variables())
    assert again == context
    assert again is not None
    assert again.device_mesh.coordinates(again.rank) == {DATA: 0, SHARD: 1}


class Paired(ParallelLayout):
    """Layout of a plugin: every replica is in two processes, with a stage in each."""

    name = "paired"
    extra_ports = 2

    def device_mesh(self, replicas: int) -> DeviceMesh:
        return DeviceMesh({STAGE: 2, DATA: replicas})

    def processes(self, adapter: Any, replicas: int) -> tuple[ProcessInfo, ...]:
        return tuple(ProcessInfo(rank, replicas=(rank % replicas,)) for rank in range(2 * replicas))

    def open(self, adapter: Any, *given: Any) -> Any:
        return adapter.start_paired(*given)


class InPairs(Strategy):
    name = "in-pairs"
    summary = "of a third party"
    requires = frozenset({Capability.SYNCHRONOUS_STEP})
    parallel_layout = Paired()

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        raise AssertionError("a plan takes no step")


class InPairsToo(Reference):
    name = "in-pairs-too"
    capabilities = {
        **Reference.capabilities,
        "paired": Capabilities(frozenset({Capability.SYNCHRONOUS_STEP})),
    }

    def start_paired(self, *given: Any) -> Any:
        return given


@pytest.fixture
def host() -> PluginManager:
    found = PluginManager()
    found.backends.add(InPairsToo)
    found.backends.add(Reference)
    found.strategies.add(InPairs)
    return found


def test_a_plugin_may_have_its_own_parallel_layout(host: PluginManager) -> None:
    spec = SPEC.model_copy(
        update={"strategy": SPEC.strategy.model_copy(update={"name": "in-pairs"})}
    )
    plan = make_plan(ResolvedSpec(spec, host), backend="in-pairs-too", replicas=3)
    assert plan.parallel_layout == "paired"
    assert plan.to_dict()["device_mesh"] == {"stage": 2, "data": 3}
    assert [process.replicas for process in plan.processes] == [(0,), (1,), (2,)] * 2
    assert plan.ports == 6 + 2
    assert Paired().open(InPairsToo(), 1, 2, 3, None) == (1, 2, 3, None)
    with pytest.raises(
        UnsupportedError, match="in paired runs it has no synchronous-step: the back"
    ):
        make_plan(ResolvedSpec(spec, host), backend="reference", replicas=3)


def test_a_single_replica_needs_no_parameter_server() -> None:
    assert ParameterServerLayout().for_replicas(1) is REPLICATED
    layout = ParameterServerLayout(servers=2)
    assert layout.for_replicas(2) is layout
    processes = layout.processes(_Servers(), 2)
    assert [process.rank for process in processes] == [0, 1, 2, 3, 4]
    roles = [process.role for process in processes]
    assert roles == ["coordinator", "worker", "worker", "server", "server"]


class _Servers(Reference):
    def servers(self, requested: int) -> int:
        return requested
