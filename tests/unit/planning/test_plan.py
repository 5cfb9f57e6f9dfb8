"""From spec, backend and replicas to a plan; nothing is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from isotrain.adapters.horovod.torch_adapter import HorovodTorch
from isotrain.core import api
from isotrain.core.contracts.backend import adapter as contract
from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.capabilities import (
    Availability,
    Capabilities,
    Capability,
    Examination,
)
from isotrain.core.contracts.backend.group_hooks import PassCosts
from isotrain.core.contracts.cluster_environment import ClusterLayout
from isotrain.core.contracts.job import PluginChoice
from isotrain.core.contracts.plan import Plan, differences, split_backend
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.contracts.state import ModelBytes
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import (
    BackendUnavailableError,
    IsotrainError,
    PlanError,
    UnsupportedError,
)
from isotrain.core.launching.run_directory.run_directory import RunDirectory
from isotrain.core.launching.scheduler.scheduler_run import rank_command
from isotrain.core.parameter_server.layout import ParameterServerLayout
from isotrain.core.planning.cluster_resources import ClusterResources
from isotrain.core.planning.model_stats import ModelStats, complete_plan
from isotrain.core.planning.planner import make_plan, missing_capabilities, plan_of_members
from isotrain.core.planning.resources import Devices
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.quantities import counted
from isotrain.core.run.start import PreviousRun
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware
from isotrain.core.system.cgroups import GroupMemory


class Declared(Adapter):
    """An adapter that declares and never starts."""

    name = "declared"
    framework = "none"
    summary = "for tests"
    collectives = {"auto": "picks wire", "wire": "a wire", "pigeon": "cannot work"}
    replicas_per_process = "one"
    capabilities = {
        "replicated": Capabilities(
            frozenset({Capability.SYNCHRONOUS_STEP}), {Capability.COMPUTE: "not built"}
        )
    }
    options = {"size": "of a bucket"}
    gpus = 0
    installed = True

    def availability(self) -> Availability:
        if self.installed:
            return Availability(True, "1.0")
        return Availability(False, None, "it is not installed", "install it")

    def examine(self) -> Examination:
        return Examination(self.availability())

    def accelerators(self) -> int:
        return self.gpus

    def resolve_collective(
        self, requested: str | None, *, device: contract.DeviceKind, replicas: int
    ) -> str:
        name = self.collective_or_default(requested)
        return "wire" if name == "auto" else name

    def environment_variables(
        self, *, device: contract.DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        return {"THREADS": str(threads)}

    def start(self, spec: Any, backend_config: Any, context: Any) -> Any:
        raise AssertionError("a plan starts nothing")


class InOneProcess(Declared):
    name = "in-one-process"
    replicas_per_process = "all"


class Missing(Declared):
    name = "missing"
    installed = False


class WithGPUs(Declared):
    name = "with-gpus"
    gpus = 2
    gpu_sharing_collectives = frozenset({"pigeon"})


class Compiling(Declared):
    name = "compiling"
    compiler = "a compiler"


class Steplss(Declared):
    name = "stepless"
    capabilities = {"replicated": Capabilities.none("nothing works")}


@pytest.fixture
def host() -> Iterator[PluginManager]:
    host = PluginManager(entry_points=False)
    for adapter in (Declared, InOneProcess, Missing, WithGPUs, Compiling, Steplss):
        host.backends.add(adapter)
    return host


def spec(**fields: Any) -> TrainingSpec:
    return TrainingSpec(
        **{
            "model": dict,
            "data": dict,
            "loss": "mse",
            "optimizer": {"name": "sgd", "lr": 0.5},
            "global_batch_size": 10,
            "epochs": 3,
            **fields,
        }
    )


def plan(
    host: PluginManager, backend: str = "declared", replicas: int | None = 3, **fields: Any
) -> Plan:
    return make_plan(ResolvedSpec(spec(**fields), host), backend=backend, replicas=replicas)


def test_local_batches_add_up_and_processes_hold_one_replica(host: PluginManager) -> None:
    found = plan(host)
    assert found.local_batch_sizes == (4, 3, 3)
    assert [process.replicas for process in found.processes] == [(0,), (1,), (2,)]
    assert found.collective == "wire"


def test_members_of_an_elastic_run_share_the_same_global_batch(host: PluginManager) -> None:
    first, resolved = plan(host), ResolvedSpec(spec(), host)
    found = plan_of_members(first, resolved, first.processes[:2])
    assert found.global_batch_size == first.global_batch_size
    assert found.local_batch_sizes == (5, 5)
    assert (found.replicas, found.collective) == (2, "wire")
    alone = plan_of_members(first, resolved, first.processes[:1])
    assert (alone.local_batch_sizes, alone.collective) == ((10,), "none")
    grown = plan_of_members(plan(host, replicas=1), resolved, first.processes)
    assert (grown.replicas, grown.collective) == (3, "wire")


def test_one_process_may_hold_every_replica(host: PluginManager) -> None:
    found = plan(host, "in-one-process")
    assert [process.replicas for process in found.processes] == [(0, 1, 2)]


def test_one_replica_has_no_collective(host: PluginManager) -> None:
    assert plan(host, replicas=1).collective == "none"


def test_threads_share_the_cores_unless_given(host: PluginManager) -> None:
    assert plan(host, threads=5).environment_variables["THREADS"] == "5"
    assert plan(host, replicas=1000).threads == 1


def test_local_batch_and_linear_scaling(host: PluginManager) -> None:
    found = plan(
        host,
        global_batch_size=None,
        local_batch_size=8,
        scaling={"rule": "linear", "base_batch_size": 8},
    )
    assert found.global_batch_size == 24
    assert (found.optimizer, found.learning_rate) == ("sgd", 1.5)


def test_measures_complete_the_plan(host: PluginManager) -> None:
    made = plan(host)
    found = complete_plan(
        made,
        ResolvedSpec(spec(), host),
        ModelStats(25, 6, 24, [(2, 3)], steps_per_epoch=3),
    )
    assert (found.steps_per_epoch, found.total_steps) == (3, 9)
    assert found.exchanged_bytes_per_step == pytest.approx(2 * 2 / 3 * 24)


def test_activations_of_a_reproducible_run_are_those_of_a_part(host: PluginManager) -> None:
    stats = ModelStats(25, 6, 24, [(2, 3)], sample_costs=PassCosts(10.0, 0.0, 0.0))
    batches = {"global_batch_size": 42, "epochs": 1}
    by_replica = complete_plan(plan(host, **batches), ResolvedSpec(spec(**batches), host), stats)
    assert by_replica.activation_bytes == 14 * 10
    by_part = ResolvedSpec(spec(**batches, reproducible="bits"), host)
    completed = complete_plan(plan(host, **batches), by_part, stats)
    assert completed.activation_bytes == 6 * 10  # of 8 parts


def test_horovods_compression_halves_the_bytes(host: PluginManager) -> None:
    made = replace(plan(host), parameters=6, gradient_bytes=24, replicas=2)
    compressed = replace(made, options={"compression": "fp16"})
    asked = ResolvedSpec(spec(), host).spec_with_model
    assert HorovodTorch().exchanged_bytes(made, asked) == 24
    assert HorovodTorch().exchanged_bytes(compressed, asked) == 12


def test_plans_diff_by_field(host: PluginManager) -> None:
    found = {
        name: (one, two)
        for name, one, two in differences(plan(host), plan(host, "declared:pigeon"))
    }
    assert found == {"collective": ("wire", "pigeon"), "requested_collective": (None, "pigeon")}


def test_replicas_share_gpus_only_by_collectives_that_allow_it(host: PluginManager) -> None:
    shared = plan(host, "with-gpus:pigeon", 5, device="gpu")
    assert (shared.device, shared.replicas) == ("gpu", 5)
    assert "5 replicas share 2 GPUs" in shared.notes
    assert plan(host, "with-gpus:pigeon", 5).device == "cpu", "only where the spec says so"
    with pytest.raises(PlanError, match="can use 2 GPUs"):
        plan(host, "with-gpus", 5, device="gpu")


def test_gpus_are_used_when_there_are_enough(host: PluginManager) -> None:
    assert plan(host, "with-gpus", None).replicas == 2
    assert plan(host, "with-gpus", 2).device == "gpu"
    assert plan(host, "with-gpus", 2, device="cpu").device == "cpu"
    too_few = plan(host, "with-gpus", 3)
    assert too_few.device == "cpu"
    assert "too few" in too_few.warnings[0]


def test_a_plan_says_that_the_model_is_compiled(host: PluginManager) -> None:
    assert plan(host, "compiling").notes == ()
    assert "compile: a compiler compiles" in plan(host, "compiling", compile=True).notes[0]


def test_a_plan_says_that_replicas_get_no_samples(host: PluginManager) -> None:
    assert plan(host, replicas=4, global_batch_size=4).warnings == ()
    (warning,) = plan(host, replicas=6, global_batch_size=4).warnings
    assert warning.startswith("global_batch_size: 4 samples for 6 replicas: 2 of these get none")
    own_batches = {"data": None, "epochs": None, "steps": 5, "global_batch_size": 4}
    assert plan(host, replicas=6, **own_batches).warnings == ()


@pytest.mark.parametrize(
    "fields", [{"layer_decay": 0.5}, {"groups": [{"weights": "*", "lr_factor": 0.5}]}]
)
def test_backends_without_optimizer_groups_refuse_them(
    host: PluginManager, fields: dict[str, Any]
) -> None:
    (name,) = fields
    expected = rf"optimizer\.{name}: backend 'declared' updates all weights with the same options"
    with pytest.raises(UnsupportedError, match=expected):
        plan(host, optimizer={"name": "sgd", "lr": 0.5, **fields})


def test_backends_without_state_of_each_replica_refuse_it(host: PluginManager) -> None:
    with pytest.raises(UnsupportedError, match="per_replica: backend 'declared' has no state"):
        plan(host, per_replica="*hidden")


def test_a_plan_says_which_options_no_backend_takes(host: PluginManager) -> None:
    options = {"declard": {"size": 1}, "stepless": {}}
    (warning,) = plan(host, "declared", backend_options=options).warnings
    assert warning.startswith("backend_options.declard: unknown backend")
    assert "Did you mean 'declared'?" in warning


@pytest.mark.parametrize(
    ("backend", "replicas", "fields", "kind", "words"),
    [
        ("declared", 1, {"compile": True}, UnsupportedError, "'declared' has no compiler"),
        ("declard", 1, {}, IsotrainError, "Did you mean 'declared'"),
        ("declared:wir", 2, {}, UnsupportedError, "Did you mean 'wire'"),
        ("declared", 0, {}, PlanError, "at least 1"),
        ("missing", 1, {}, BackendUnavailableError, "install it"),
        ("stepless", 2, {}, UnsupportedError, "nothing works"),
        ("with-gpus", 3, {"device": "gpu"}, PlanError, "can use 2 GPUs"),
        ("declared", 1, {"strategy": "data-paralel"}, IsotrainError, "'data-parallel'"),
        ("declared", 1, {"backend_options": {"declared": {"siz": 1}}}, PlanError, "'size'"),
        (
            "declared",
            1,
            {"strategy": {"name": "data-parallel", "options": {"k": 1}}},
            IsotrainError,
            "unknown option of the strategy",
        ),
    ],
)
def test_impossible_plans_are_refused_with_reasons(
    host: PluginManager,
    backend: str,
    replicas: int,
    fields: dict[str, Any],
    kind: type[Exception],
    words: str,
) -> None:
    with pytest.raises(kind, match=words):
        plan(host, backend, replicas, **fields)


CYCLE = {"name": "one-cycle", "momentum_range": [0.75, 0.875]}
SGD = {"name": "sgd", "lr": 0.5, "momentum": 0.875}


def contrastive(model: Any, batch: Any, step: Any) -> Any:
    def everywhere(rows: Any) -> Any:
        return step.all_gather(rows)[0]

    return everywhere(model(batch[0]))


def without_collectives(model: Any, batch: Any, step: Any) -> Any:
    return model(batch[0]).sum() * step.values["weight"] + batch[1].mean()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": CYCLE}, "momentum_range: optimizer sgd has no momentum"),
        (
            {"schedule": CYCLE, "optimizer": SGD, "strategy": "parameter-server"},
            "momentum_range: strategy 'parameter-server' applies gradients elsewhere",
        ),
        (
            {
                "schedule": CYCLE,
                "optimizer": {**SGD, "groups": [{"weights": "*bias", "momentum": 0.5}]},
            },
            "momentum_range: it sets the momentum of all weights",
        ),
        (
            {"loss": None, "objective": contrastive, "strategy": "gossip"},
            r"step\.all_gather: under strategy 'gossip' each replica updates weights of its own",
        ),
        (
            {"loss": None, "objective": contrastive, "gradient_accumulation_steps": 2},
            r"step\.all_gather: with gradient_accumulation_steps",
        ),
    ],
)
def test_what_a_strategy_or_optimizer_cannot_do_is_refused(
    host: PluginManager, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        plan(host, "torch-ddp", 2, **fields)


def test_what_they_can_do_is_planned(host: PluginManager) -> None:
    plan(host, "torch-ddp", 2, schedule=CYCLE, optimizer=SGD)
    plan(host, "torch-ddp", 2, schedule=CYCLE, optimizer="adam")
    for strategy, objective in (("data-parallel", contrastive), ("gossip", without_collectives)):
        plan(host, "torch-ddp", 2, loss=None, objective=objective, strategy=strategy)


class Wanting(Strategy):
    name = "wanting"
    summary = "asks for more than a backend declares"
    requires = frozenset({Capability.SYNCHRONOUS_STEP, Capability.COMPUTE, Capability.SUBGROUPS})

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        raise AssertionError("a plan takes no step")


class Serving(Wanting):
    name = "serving"
    parallel_layout = ParameterServerLayout()


class Counting(Wanting):
    """A strategy that counts how often each plan validates and configures it."""

    name = "counting"
    requires = frozenset({Capability.SYNCHRONOUS_STEP})

    def __init__(self) -> None:
        self.validated: list[int] = []
        self.configured: list[int | None] = []

    def validate(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        self.validated.append(plan.replicas)
        return ["counted"]

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:
        self.configured.append(plan.samples)


@pytest.mark.parametrize(
    ("backend", "replicas", "is_crowded"),
    [
        ("declared", 4 * hardware.cores(), False),
        ("declared", 4 * hardware.cores() + 1, True),
        ("in-one-process", 4 * hardware.cores() + 1, False),
    ],
)
def test_plans_warn_of_processes_that_are_far_more_than_the_cores(
    host: PluginManager, backend: str, replicas: int, is_crowded: bool
) -> None:
    warnings = plan(host, backend, replicas).warnings
    shared = f"replicas: {replicas} processes share {counted(hardware.cores(), 'core')} here"
    found = [text for text in warnings if "take turns" in text]
    assert [shared in text for text in found] == [True] * is_crowded
    assert all(text.endswith(f"Use at most {4 * hardware.cores()}") for text in found)


def test_plans_warn_of_state_that_this_machine_has_no_memory_for(
    host: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = ResolvedSpec(spec(), host)
    weights = hardware.memory_bytes() // 3  # and gradients of that size; the optimizer has no state
    stats = ModelStats(25, 6, weights, [(2, 3)], steps_per_epoch=3, model=ModelBytes((weights,)))

    def warnings(made: Plan) -> list[str]:
        completed = complete_plan(made, resolved, stats)
        return [text for text in completed.warnings if text.startswith("memory: ")]

    assert not warnings(plan(host, replicas=1))
    made = plan(host, replicas=2)
    (warning,) = warnings(made)
    assert warning.startswith("memory: 2 replicas take ")
    limit = GroupMemory(2 * weights - 1, Path("/sys/fs/cgroup/memory.max"))
    monkeypatch.setattr(hardware, "memory_limit", lambda: limit)
    (warning,) = warnings(plan(host, replicas=1))
    assert "and the control group (/sys/fs/cgroup/memory.max) allows " in warning
    monkeypatch.setattr(hardware, "memory_limit", lambda: None)
    elsewhere = tuple(replace(each, host=f"host-{each.rank}") for each in made.processes)
    assert not warnings(replace(made, processes=elsewhere))
    on_gpus = replace(made, device="gpu")
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: None)
    assert not warnings(on_gpus)
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: 2 * weights - 1)
    (warning,) = warnings(on_gpus)
    assert warning.startswith("memory: each GPU would have to hold ")
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: 2 * weights)
    assert not warnings(on_gpus)


def test_a_strategy_is_validated_once_per_plan_and_configured_once(host: PluginManager) -> None:
    host.strategies.add(Counting)
    resolved = ResolvedSpec(spec(strategy="counting"), host)
    made = make_plan(resolved, backend="declared", replicas=3)
    make_plan(resolved, backend="declared", replicas=1)  # to measure the model
    stats = ModelStats(25, 6, 24, [(2, 3)], steps_per_epoch=3)
    complete_plan(made, resolved, stats)
    assert isinstance(resolved.strategy, Counting)
    assert resolved.strategy.validated == [3, 1]
    assert resolved.strategy.configured == [25]
    assert made.notes == ("counted",)


def test_hosts_elsewhere_may_have_gpus_that_this_machine_lacks(host: PluginManager) -> None:
    assert devices_there(host, "declared", "gpu", 1) == Devices("gpu", 2, [])
    planned = devices_there(host, "declared", "auto", 1)
    assert planned.kind == "cpu"
    assert "each process that there starts checks for itself" in planned.notes[0]
    assert devices_there(host, "declared", "cpu", 1).notes == []
    with pytest.raises(PlanError, match="takes 1 GPU on a host; a process sees 0"):
        devices_there(host, "declared", "gpu", 0)


@pytest.mark.parametrize(
    ("backend", "device", "kind", "words"),
    [
        ("declared", "gpu", "gpu", "1 or more on each are assumed; a host with fewer ends the run"),
        ("with-gpus", "auto", "gpu", "as many as on this machine are planned"),
        ("declared", "auto", "cpu", "so CPUs are planned; each process that it starts checks"),
    ],
)
def test_assumptions_on_unknown_hosts_are_noted(
    host: PluginManager, backend: str, device: str, kind: str, words: str
) -> None:
    found = devices_there(host, backend, device, None)
    (note,) = found.notes
    assert found.kind == kind
    assert note.startswith("there does not say which GPUs its hosts have")
    assert words in note
    assert devices_there(host, backend, "cpu", None) == Devices("cpu", 2, [])


def devices_there(host: PluginManager, backend: str, device: str, gpus: int | None) -> Devices:
    """What two processes on hosts elsewhere compute on, by a plan that is made here."""
    layout = ClusterLayout("there", (ProcessInfo(0, "a"), ProcessInfo(1, "b")), cores=1, gpus=gpus)
    cast = ResolvedSpec(spec(device=device), host)
    ground = ClusterResources(layout, options={})
    return ground.devices(cast.spec, host.backend(backend), cast.strategy, None)


def test_undeclared_capabilities_are_missing(host: PluginManager) -> None:
    adapter = host.backend("declared")
    assert missing_capabilities(Wanting, adapter) == [
        "it has no compute: not built",
        "it has no subgroups: the backend does not declare it",
    ]


def test_capabilities_depend_on_the_parallel_layout(host: PluginManager) -> None:
    (undeclared,) = missing_capabilities(Serving, host.backend("declared"))
    assert undeclared.startswith(
        "in parameter-server runs it has no compute, subgroups, synchronous-step:"
    )
    (missing,) = missing_capabilities(Serving, host.backend("torch-ddp"))
    assert missing.startswith(
        "in parameter-server runs it has no compute, subgroups: one process holds"
    )
    assert not missing_capabilities(Wanting, host.backend("torch-ddp"))


def test_backend_and_collective_are_split() -> None:
    assert split_backend("a-b:c") == ("a-b", "c")
    assert split_backend("a-b") == ("a-b", None)


@pytest.mark.parametrize("backend", ["torch-ddp", "torch-ddp:gloo"])
def test_resumed_runs_and_ranks_use_the_requested_backend(
    backend: str, host: PluginManager, tmp_path: Path
) -> None:
    """It holds for workers of a parameter server too, whose connection is none of the collectives."""
    given = spec(model="m:model", data="m:data", strategy="parameter-server")
    made = make_plan(ResolvedSpec(given, host), backend=backend, replicas=2)
    assert made.collective == "tcp"
    directory = RunDirectory.create("a run", tmp_path / "run")
    directory.write_start(given, made, {})
    assert PreviousRun.of(directory.path).backend == backend
    command = rank_command(given, made, PluginChoice(), directory.path, None)
    assert command.options[:2] == ("--backend", backend)


def test_a_resumed_run_may_have_other_launcher_options(host: PluginManager, tmp_path: Path) -> None:
    given, own = spec(model="builtins:dict", data="builtins:dict"), {"hosts": "old:1", "port": 5000}
    made = replace(plan(host), launcher="torchrun", launcher_options=own)
    directory = RunDirectory.create("a run", tmp_path / "run")
    directory.write_start(given, made, {})
    with mock.patch.object(api, "prepare") as prepare:
        api.resume(directory.path, launcher_options={"hosts": "new:1"})
    _, _, _, options = prepare.call_args.args
    assert options["launcher"] == "torchrun"
    assert options["launcher_options"] == {"hosts": "new:1", "port": 5000}
