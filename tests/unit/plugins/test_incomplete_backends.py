"""Backends that lack methods of their contracts are refused by name, before anything calls these methods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.capabilities import (
    REPLICATED_CAPABILITIES,
    Availability,
    Capabilities,
    Capability,
)
from isotrain.core.contracts.backend.group_protocols import ExportingGroup, ShardedGroup
from isotrain.core.contracts.backend.protocol_checks import missing_methods, require_protocols
from isotrain.core.contracts.backend.replica import Replica
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.job import PluginChoice
from isotrain.core.contracts.plan import BackendConfig
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import PluginError
from isotrain.core.plugins.hookspecs import hookimpl
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.session.training.context import open_group
from isotrain.core.spec.training_spec import TrainingSpec


class Complete(Adapter):
    """A backend that writes what is required, and whose group is given by `group`."""

    name = "complete"
    framework = "none"
    summary = "for a test"
    collectives = {"tcp": "one"}
    group: Any = None

    def availability(self) -> Availability:
        return Availability(True)

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        made: ReplicaGroup = self.group()
        return made


class WithoutMethods(Adapter):
    name = "without-methods"
    framework = "none"
    summary = "for a test"
    collectives = {"tcp": "one"}

    def availability(self) -> Availability:
        return Availability(True)


class WithoutAttributes(Adapter):
    name = "without-attributes"
    collectives = {"tcp": "one"}
    summary = "for a test"
    availability = Complete.availability
    start = Complete.start  # type: ignore[assignment]


class DeclaresStages(Complete):
    name = "declares-stages"
    capabilities = {"pipeline": Capabilities.only({Capability.PIPELINE_STEP}, "for a test")}


class HalfAServer(Complete):
    name = "half-a-server"

    def serve(self) -> None: ...


class StrategyWithoutStep(Strategy):
    name = "without-step"
    summary = "for a test"
    requires = frozenset()


def manager() -> PluginManager:
    return PluginManager(entry_points=False)


REFUSED = [
    (
        WithoutMethods,
        ["plugin 'WithoutMethods'", "backend 'without-methods'", "lacks start (Joins the process"],
    ),
    (WithoutAttributes, ["backend 'without-attributes'", "lacks the attributes framework."]),
    (
        DeclaresStages,
        ["'declares-stages'", "declares pipeline-step", "start_pipeline (Starts a process of a"],
    ),
    (
        HalfAServer,
        ["'half-a-server'", "half a ParameterServerBackend", "servers (Number of", "start_param"],
    ),
    (StrategyWithoutStep, ["strategy 'without-step'", "lacks step (Trains on one global batch"]),
]


@pytest.mark.parametrize(("plugin", "words"), REFUSED)
def test_what_is_incomplete_is_refused_by_name(plugin: type, words: list[str]) -> None:
    with pytest.raises(PluginError) as refused:
        manager().add(plugin)
    for each in words:
        assert each in str(refused.value)


def test_an_incomplete_backend_is_skipped_and_reported() -> None:
    choice = PluginChoice(registered=(("bad", WithoutMethods), ("good", Complete)))
    loaded = PluginManager(choice, entry_points=False, strict=False)
    assert "lacks start" in loaded.faults["bad"]
    assert "without-methods" not in loaded.backends.names()
    assert loaded.backend("complete").summary == "for a test"


def test_a_backend_by_reference_is_refused_when_it_is_used_with_its_plugin() -> None:
    @hookimpl
    def isotrain_register_backends(register: Any) -> None:
        register.add(f"{__name__}:DeclaresStages", name="by-reference")

    loaded = manager()
    loaded.add(
        SimpleNamespace(isotrain_register_backends=isotrain_register_backends), name="theirs"
    )
    with pytest.raises(
        PluginError, match=r"plugin 'theirs': the backend 'by-reference'.*start_pipeline"
    ):
        loaded.backend("by-reference")


class GroupWithoutMethods(ReplicaGroup):
    pass


class ReplicaWithoutMethods(Replica):
    pass


@pytest.mark.parametrize(
    ("contract", "words"),
    [
        (GroupWithoutMethods, ["GroupWithoutMethods lacks ", "predict (Calls the model in"]),
        (ReplicaWithoutMethods, ["ReplicaWithoutMethods lacks all_gather (All-gather over"]),
    ],
)
def test_a_group_or_replica_names_all_methods_that_it_lacks(
    contract: Any, words: list[str]
) -> None:
    with pytest.raises(PluginError) as refused:
        contract()
    for each in words:
        assert each in str(refused.value)


def opened(adapter: Adapter) -> Any:
    layout = SimpleNamespace(name="replicated", open=lambda adapter, *_: adapter.start(*_[:3]))
    resolved: Any = SimpleNamespace(
        plugins=SimpleNamespace(backend=lambda name: adapter),
        strategy=SimpleNamespace(parallel_layout=SimpleNamespace(for_replicas=lambda _: layout)),
        spec_with_model=SimpleNamespace(updates=None, frozen={}),
    )
    plan: Any = SimpleNamespace(backend=adapter.name, replicas=1, backend_config=None)
    return open_group(resolved, plan, None, None)  # type: ignore[arg-type]


def test_a_run_whose_group_lacks_methods_names_its_backend() -> None:
    class Starting(Complete):
        group = GroupWithoutMethods

    with pytest.raises(PluginError, match=r"backend 'complete': .*GroupWithoutMethods lacks"):
        opened(Starting())


def test_a_group_has_the_methods_of_what_its_backend_declares() -> None:
    class Promising(Complete):
        group = object
        capabilities = {
            "replicated": REPLICATED_CAPABILITIES.with_changes(has={Capability.UNSHARD_WEIGHTS})
        }

    with pytest.raises(
        PluginError, match=r"declares unshard-weights, but lacks unshard_weights \(All-g"
    ):
        opened(Promising())


def test_a_group_has_no_half_of_a_capability() -> None:
    class Keeping:
        def keep_gradients(self) -> bool:
            return True

    class Starting(Complete):
        group = Keeping

    with pytest.raises(PluginError, match=r"half a GradientKeepingGroup, but lacks kept_gradients"):
        opened(Starting())
    Keeping.kept_gradients = Keeping.keep_gradients  # type: ignore[attr-defined]
    assert isinstance(opened(Starting()), Keeping)


def test_inheriting_from_a_protocol_is_not_having_its_methods() -> None:
    class Inheriting(ShardedGroup):
        def shard_optimizer(self, weights: Any) -> None: ...

    lacked = ["reduce_scatter_gradients", "update_shard"]
    assert missing_methods(Inheriting, ShardedGroup) == lacked
    assert missing_methods(Inheriting(), ShardedGroup) == lacked  # type: ignore[abstract]


def test_a_protocol_that_is_inherited_and_not_written_is_refused() -> None:
    """`isinstance` says that such a class has the protocol, whose stubs would do nothing without a word."""

    class Exporting(ExportingGroup):
        pass

    with pytest.raises(PluginError, match="is half a ExportingGroup, but lacks export"):
        require_protocols(Exporting, {ExportingGroup: frozenset()}, (), "group")
