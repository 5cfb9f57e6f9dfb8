"""Collectives that a plan for GPUs elsewhere counts, against those that Gloo sees in runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from integration import step_memory
from integration.collective_counts import take_steps

import isotrain
from isotrain.core import api
from isotrain.core.planning.gpu_plan import GpuPlan, counted_steps
from isotrain.testing.launching import try_run

pytestmark = pytest.mark.slow

SPECS: dict[str, dict[str, Any]] = {
    "data-parallel": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "sharded,stage=1": {"strategy": {"name": "sharded"}},
    "sharded,stage=2": {
        "strategy": {"name": "sharded", "options": {"stage": 2}},
        "gradient_accumulation_steps": 2,
    },
    "local-sgd": {"strategy": {"name": "local-sgd", "options": {"every": 3}}},
    "gossip": {"strategy": {"name": "gossip", "options": {"graph": "ring"}}},
    "sharded,stage=3": {
        "strategy": {"name": "sharded", "options": {"stage": 3, "bucket_megabytes": 0.2}}
    },
    "updates": {
        "updates": {
            "first": {"weights": ["0.*", "2.*"], "every": 2},
            "last": {"weights": "4.*", "optimizer": {"name": "adam", "lr": 0.01}, "every": 3},
        }
    },
    "skipped": {"on_nan": "skip"},
}
PIPELINE = {
    "strategy": {"name": "pipeline", "options": {"stages": 2}},
    "gradient_accumulation_steps": 4,
}


def of_positions() -> Any:
    return torch.nn.Sequential(
        *(torch.nn.Unflatten(1, (8, 8)), torch.nn.Linear(8, 512), torch.nn.Linear(512, 512)),
        *(torch.nn.LayerNorm(512), torch.nn.Linear(512, 512), torch.nn.GELU()),
        *(torch.nn.Dropout(0.1), torch.nn.Linear(512, 16), torch.nn.Flatten()),
        torch.nn.Linear(128, 10),
    )


def cut(**layers: str) -> dict[str, Any]:
    return {"strategy": {"name": "tensor", "options": {"degree": 2, "layers": layers}}}


CUT: dict[str, dict[str, Any]] = {
    "units": cut(**{"0": "colwise", "2": "rowwise", "4": "colwise-gather"}),
    "accumulated": cut(**{"2": "colwise", "4": "rowwise"}) | {"gradient_accumulation_steps": 2},
    "positions": {
        "model": {"torch": of_positions},
        **cut(
            **{"1": "colwise", "2": "rowwise-sequence", "3": "sequence"},
            **{"4": "sequence-colwise", "7": "rowwise"},
        ),
    },
}
"""Native models of which modules are cut, some with weights of 1 MiB."""
FLOAT = 4
Counts = dict[str, list[float]]
"""Number per step, and float32 elements per step, by Gloo's name of a collective."""


def spec(**fields: Any) -> dict[str, Any]:
    return {**step_memory.SPECS["dense"], **fields}


def counts_of_gloo(session: isotrain.Session) -> Counts:
    """What Gloo does in a period of steps of this process, by torch's profiler."""
    period = counted_steps(session.spec, session.strategy)
    take_steps(session, range(session.strategy.warm_up_steps * period))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        take_steps(session, range(600, 600 + period))
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for event in profile.events():
        if event.name.startswith("gloo:") and event.name != "gloo:recv":
            counts[event.name] += 1
            elements[event.name] += sum(torch.Size(shape).numel() for shape in event.input_shapes)
    return {name: [counts[name] / period, elements[name] / period] for name in counts}


def counts_of_plan(planned: GpuPlan) -> Counts:
    """The counts of a plan, by what Gloo does: its reduce-scatter is an all-reduce."""
    assert planned.collectives is not None, planned.why_not_counted
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for each in planned.collectives:
        kind = each.kind.replace("reduce-scatter", "all-reduce").replace("-", "_")
        parts = each.processes if each.kind == "all-gather" else 1
        counts[f"gloo:{kind}"] += each.count  # type: ignore[assignment]
        elements[f"gloo:{kind}"] += each.nbytes / FLOAT / parts  # type: ignore[assignment]
    return {name: [counts[name], elements[name]] for name in counts}


def gpu_plan(gpus: int, **fields: Any) -> GpuPlan:
    return api.gpu_plan(
        spec(**fields), hosts=1, gpus_per_host=gpus, backend="torch-ddp", quiet=True
    )


@pytest.mark.features
@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        *((name, 2) for name in SPECS),
        *((name, 4) for name in ("data-parallel", "sharded,stage=1", "sharded,stage=3")),
        ("data-parallel", 8),
    ],
)
def test_gloo_does_what_is_counted(name: str, replicas: int) -> None:
    run = try_run(counts_of_gloo, spec(**SPECS[name]), "torch-ddp:gloo", replicas)
    assert run.failure is None, run.failure
    found = run.returned[0]
    if name == "skipped":
        found["gloo:all_reduce"][1] += 1  # whether to skip a step is one number, of 8 bytes
    assert counts_of_plan(gpu_plan(replicas, **SPECS[name])) == found


@pytest.mark.features
@pytest.mark.parametrize("replicas", [1, 2])
def test_gloo_does_what_is_counted_of_the_first_stage(replicas: int) -> None:
    run = try_run(counts_of_gloo, spec(**PIPELINE), "torch-ddp:gloo", replicas)
    assert run.failure is None, run.failure
    counted = counts_of_plan(gpu_plan(2 * replicas, **PIPELINE))
    assert counted.keys() == run.returned[0].keys()
    for name, (number, elements) in run.returned[0].items():
        # the last stage decides whether the loss has one element or two
        assert counted[name] == [number, pytest.approx(elements, abs=1)]


@pytest.mark.features
@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("replicas", [1, 2])
def test_gloo_does_what_is_counted_of_cut_modules(name: str, replicas: int) -> None:
    run = try_run(counts_of_gloo, spec(**CUT[name]), "torch-ddp:gloo", replicas)
    assert run.failure is None, run.failure
    planned = gpu_plan(2 * replicas, **CUT[name])
    assert counts_of_plan(planned) == run.returned[0]
    assert not [note for note in planned.plan.notes if "values, which" in note]


def test_collectives_inside_and_between_hosts_are_told_apart() -> None:
    hierarchical = spec(strategy="hierarchical")
    plan = api.gpu_plan(
        hierarchical, hosts=2, gpus_per_host=4, gpu="h100", backend="torch-ddp", quiet=True
    )
    assert plan.collectives is not None
    groups = {(each.kind, each.processes, each.hosts): each.count for each in plan.collectives}
    assert groups == {
        ("all-reduce", 4, 1): 1,
        ("all-reduce", 2, 2): 1,
        ("broadcast", 4, 1): 1,
        ("all-reduce", 8, 2): 1,
    }
    assert plan.fits
    assert plan.bounds is not None
    assert 0 < plan.bounds.lowest < plan.bounds.highest
    first, *others = (64 * 512, 512 * 512, 512 * 10)  # no gradient of the inputs
    flops = 2 * 8 * (2 * first + 3 * sum(others))
    assert plan.bounds.compute == pytest.approx(flops / 66.9e12)


class FewSamples(torch.nn.Linear):
    """A layer that refuses a slice of the local batch, which is large on a CPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if len(input) > 2:
            raise ValueError(f"{len(input)} samples")
        return super().forward(input)


def test_steps_have_few_samples_where_their_messages_are_the_same() -> None:
    plan = gpu_plan(2, model={"torch": lambda: FewSamples(64, 10)})
    assert plan.why_not_counted is None
    assert counts_of_plan(plan) == {"gloo:all_reduce": [1, 64 * 10 + 10 + 1]}
