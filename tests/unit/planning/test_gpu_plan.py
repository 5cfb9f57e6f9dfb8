"""Plans for GPUs elsewhere without a run: what is sent, what fits, and bounds on the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isotrain.core.contracts.backend.adapter_protocols import Message
from isotrain.core.contracts.backend.group_hooks import PassCosts
from isotrain.core.contracts.launcher import Allocation, HostSlots
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.state import ModelBytes
from isotrain.core.errors import PlanError
from isotrain.core.pipeline.pipeline_plan import PipelinePlan, PlannedStage, Proposal
from isotrain.core.planning.cluster_resources import ClusterResources, layout_of
from isotrain.core.planning.gpu_plan import (
    GPUS,
    RESERVED_BYTES,
    Collective,
    GpuPlan,
    collectives,
    counting_obstacle,
    fitting_alternatives,
    gathered_bytes,
    gpu,
    needed_bytes,
    step_bounds,
)
from isotrain.core.planning.model_stats import ModelStats, complete_plan
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.reporting import text
from isotrain.core.spec.training_spec import TrainingSpec

WEIGHTS = (4 * 10**9,) * 8
COSTS = PassCosts(peak_bytes=10**8, flops=10**12, moved_bytes=10**9)


RESOURCES = ClusterResources(
    layout_of("any launcher", Allocation((HostSlots(4, devices=4),) * 2)), {}
)


def planned(**fields: Any) -> tuple[ResolvedSpec, ModelStats, Plan]:
    """A run of 8 replicas on 2 hosts, of a model of 32 GB."""
    spec = TrainingSpec(
        model={"torch": dict},
        data=lambda: (np.zeros((64, 1)), np.zeros(64)),
        loss="mse",
        optimizer="adam",
        global_batch_size=64,
        steps=8,
        device="gpu",
        **fields,
    )
    resolved = ResolvedSpec(spec, plugin_manager())
    plan = make_plan(resolved, backend="torch-ddp", replicas=None, resources=RESOURCES)
    stats = ModelStats(
        samples=64,
        parameters=sum(WEIGHTS) // 4,
        gradient_bytes=sum(WEIGHTS),
        weight_shapes=[(each // 4,) for each in WEIGHTS],
        model=ModelBytes(WEIGHTS, slots=2),
        steps_per_epoch=1,
        sample_costs=COSTS,
    )
    return resolved, stats, complete_plan(plan, resolved, stats)


def test_messages_are_counted_by_kind_group_and_hosts() -> None:
    plan = planned()[-1]
    messages = [
        *[Message("all-reduce", 100, tuple(range(8)))] * 4,
        Message("all-reduce", 8, (0, 1, 2, 3)),
        Message("send", 6, (0, 4)),
        *[Message("all-reduce", 20, tuple(range(8)), is_fused=True)] * 3,
    ]
    found = collectives(messages, 2, plan)
    assert found == [
        Collective("all-reduce", 8, 2, 2.0, 200.0),
        Collective("all-reduce", 8, 2, 1.5, 30.0, is_fused=True),
        Collective("all-reduce", 4, 1, 0.5, 4.0),
        Collective("send", 2, 2, 0.5, 3.0),
    ]
    shown = text.gpu_plan(GpuPlan(plan, found, None, needed_bytes(plan)).to_dict())
    assert "| at most 1.5 |" in shown
    assert "| 2           |" in shown


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        *(("all-reduce", 150), ("all-gather", 75), ("reduce-scatter", 75), ("all-to-all", 75)),
        *(("send", 100), ("broadcast", 100)),
    ],
)
def test_a_ring_sends_a_part_of_the_tensor(kind: str, sent: float) -> None:
    assert Collective(kind, 4, 1, 1, 100).sent_bytes == sent


def test_all_gpus_of_a_host_share_its_network() -> None:
    card = GPUS["h100"]
    inside, between, pairs = (
        Collective("all-reduce", *group, 1, 1e9) for group in ((8, 1), (16, 2), (2, 2))
    )
    assert inside.seconds(card) == pytest.approx(2 * 7 / 8 * 1e9 / 450e9)
    assert between.seconds(card) == pytest.approx(2 * 15 / 16 * 1e9 / 400e9)
    assert pairs.seconds(card) == pytest.approx(1e9 / 50e9)


def test_what_does_not_fit_is_told_with_what_would() -> None:
    resolved, stats, plan = planned()
    assert needed_bytes(plan) == 4 * sum(WEIGHTS) + 8 * 10**8 + RESERVED_BYTES
    fitting = list(fitting_alternatives(resolved, plan, stats, RESOURCES, 80e9))
    assert fitting == [f"--strategy sharded,stage={stage}" for stage in (1, 2, 3)]
    stats = replace(stats, sample_costs=PassCosts(10**10, 1, 1))
    plan = complete_plan(plan, resolved, stats)
    fitting = list(fitting_alternatives(resolved, plan, stats, RESOURCES, 60e9))
    assert fitting == [
        "--strategy sharded,stage=2 --set gradient_accumulation_steps=8",
        "--strategy sharded,stage=3 --set gradient_accumulation_steps=8",
    ]
    assert not list(fitting_alternatives(resolved, plan, stats, RESOURCES, 2e9))
    *_, recompute = fitting_alternatives(
        resolved, plan, stats, RESOURCES, 4 * sum(WEIGHTS) + 3 * 2**30
    )
    assert recompute == "recompute, where it leaves 2 GiB of activations or less"


def staged(plan: Plan, stages: Sequence[int], activation_bytes: int, versions: int = 1) -> Plan:
    """The plan with stages of so many bytes of weights, each with two slots."""
    planned_stages = tuple(
        PlannedStage(
            *(("layer",), 1, 1.0, 2.0, weights, versions, versions),
            *(2 * weights, activation_bytes, 0),
        )
        for weights in stages
    )
    none = Proposal((), (), 0.0)
    return replace(plan, stages=PipelinePlan(planned_stages, 1.0, 1.0, 0.0, ("", ""), none, none))


def test_what_recompute_must_save_in_a_pipeline_is_of_its_largest_stage() -> None:
    pipeline = {"name": "pipeline", "options": {"stages": 4}}
    resolved, stats, plan = planned(strategy=pipeline, gradient_accumulation_steps=4)
    plan = staged(plan, (6 * 10**9, 8 * 10**9, 8 * 10**9, 10 * 10**9), 70 * 2**30)
    assert needed_bytes(plan) == RESERVED_BYTES + 4 * 10 * 10**9 + 70 * 2**30
    limit = RESERVED_BYTES + 4 * 10 * 10**9 + 64 * 2**30
    *_, recompute = fitting_alternatives(resolved, plan, stats, RESOURCES, limit)
    assert recompute == "recompute, where it leaves 64 GiB of activations or less"


def test_stages_without_a_flush_need_two_versions_of_weights_and_gradients() -> None:
    stages = (6 * 10**9, 10 * 10**9)
    *_, plan = planned(
        strategy={"name": "pipeline", "options": {"schedule": "2bw"}}, gradient_accumulation_steps=4
    )
    assert plan.state_bytes is not None
    weights = replace(plan.state_bytes, weights=sum(stages) + stages[1])  # and the earlier version
    plan = replace(staged(plan, stages, 2**30, 2), state_bytes=weights)
    assert needed_bytes(plan) == RESERVED_BYTES + (4 + 2) * stages[1] + 2**30


def test_all_weights_fit_besides_what_a_step_needs() -> None:
    """A stage is small, but at the end of the run its process has all weights."""
    resolved, stats, plan = planned(
        strategy={"name": "pipeline", "options": {"stages": 8}}, gradient_accumulation_steps=4
    )
    plan = staged(plan, WEIGHTS, 0)
    assert gathered_bytes(plan) == RESERVED_BYTES + sum(WEIGHTS) + 3 * WEIGHTS[0]
    made = GpuPlan(plan, [], None, needed_bytes(plan), "h100")
    assert made.fits
    assert "with all weights: in evaluations" in text.gpu_plan(made.to_dict())
    larger = replace(plan.state_bytes, weights=80 * 10**9)  # type: ignore[type-var]
    assert replace(made, plan=replace(plan, state_bytes=larger)).fits is False
    assert not list(fitting_alternatives(resolved, plan, stats, RESOURCES, sum(WEIGHTS)))
    whole = planned(strategy={"name": "sharded", "options": {"stage": 3}})[-1]
    assert whole.state_bytes is not None
    assert gathered_bytes(whole) == RESERVED_BYTES + whole.state_bytes.total + sum(WEIGHTS)
    assert gathered_bytes(planned()[-1]) is None


@pytest.mark.parametrize(
    ("fields", "stages"),
    [
        ({}, [1, 2, 3]),
        ({"ema": {"decay": 0.9}}, [1, 2]),  # with stage 3 no replica has the weights to average
        ({"compile": True}, []),
    ],
)
def test_nothing_that_plans_refuse_would_fit(fields: dict[str, Any], stages: list[int]) -> None:
    resolved, stats, plan = planned(**fields)
    fitting = list(fitting_alternatives(resolved, plan, stats, RESOURCES, 80e9))
    assert fitting == [f"--strategy sharded,stage={stage}" for stage in stages]


@pytest.mark.parametrize(
    ("card", "fits", "shown"), [("b200", None, "unknown"), ("h100", False, "no")]
)
def test_activations_that_are_not_counted_never_fit(
    card: str, fits: bool | None, shown: str
) -> None:
    resolved, stats, plan = planned()
    stats = replace(stats, sample_costs=None)
    plan = complete_plan(plan, resolved, stats)
    options = list(fitting_alternatives(resolved, plan, stats, RESOURCES, 80e9))
    made = GpuPlan(plan, [], None, needed_bytes(plan), card, None, options)
    assert made.fits is fits
    fields = made.to_dict()
    assert (fields["fits"], fields["activations_counted"]) == (fits, False)
    assert options[0] == "--strategy sharded,stage=1, without activations"
    lines = text.gpu_plan(fields).splitlines()
    assert any(line.split() == ["fits", "on", card, shown] for line in lines)
    assert "without activations, which are not counted" in text.gpu_plan(fields)


def test_bounds_of_a_step_are_those_of_the_slowest_part() -> None:
    _, stats, plan = planned()
    bounds = step_bounds(plan, stats, [Collective("send", 2, 2, 1, 5e9)], gpu("h100"))
    assert bounds is not None
    updated = sum(WEIGHTS) + 2 * 3 * sum(WEIGHTS)
    assert bounds.compute == pytest.approx(8 * 1e12 / 66.9e12)
    assert bounds.memory == pytest.approx((8e9 + updated) / 3.35e12)
    assert bounds.communication == pytest.approx(0.1)
    assert bounds.lowest == max(bounds.compute, bounds.memory, 0.1)
    assert bounds.highest == pytest.approx((max(bounds.compute, bounds.memory) + 0.1) / 0.4)
    by_plan = step_bounds(plan, stats, None, gpu("h100"))
    assert by_plan is not None
    assert by_plan.communication == pytest.approx(2 * 7 / 8 * sum(WEIGHTS) / 200e9)
    assert step_bounds(plan, replace(stats, sample_costs=None), [], gpu("h100")) is None


def test_16_bits_have_the_rate_of_matrix_products_in_16_bits() -> None:
    _, stats, plan = planned(precision="bfloat16")
    bounds = step_bounds(plan, stats, [], gpu("h100"))
    assert bounds is not None
    assert bounds.compute == pytest.approx(8 * 1e12 / 989.4e12)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("data-parallel", None),
        ({"name": "local-sgd", "options": {"every": 65}}, "they repeat after 65 steps"),
    ],
)
def test_what_cannot_be_counted_is_told(strategy: Any, reason: str | None) -> None:
    resolved, _, plan = planned(strategy=strategy)
    obstacle = counting_obstacle(resolved, plan)
    assert obstacle is None if reason is None else reason in str(obstacle)


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(PlanError, match=r"--gpu: .*h10.*h100"):
        gpu("h10")
