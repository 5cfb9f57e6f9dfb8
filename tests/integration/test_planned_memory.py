"""The memory that a plan says a replica needs, against what steps on CPUs allocate."""

from __future__ import annotations

import pytest
from integration import portable_memory, step_memory

from isotrain.core import api
from isotrain.core.contracts.plan import Plan
from isotrain.core.planning.gpu_plan import RESERVED_BYTES, needed_bytes
from isotrain.testing.launching import try_run


def measured(name: str, replicas: int) -> tuple[Plan, int]:
    """The plan, and the largest number of bytes that a step of a replica allocates at a time."""
    spec = step_memory.SPECS[name]
    plan = api.measured_plan(spec, backend="torch-ddp", replicas=replicas, quiet=True)
    run = try_run(step_memory.allocated, spec, "torch-ddp", replicas)
    assert run.failure is None, run.failure
    return plan, max(run.returned)


@pytest.mark.slow
@pytest.mark.parametrize("name", step_memory.SPECS)
def test_a_step_allocates_what_is_planned(name: str) -> None:
    plan, allocated = measured(name, 1)
    assert plan.state_bytes is not None
    assert plan.activation_bytes is not None
    gradients, activations = plan.state_bytes.gradients, plan.activation_bytes
    # gradients take the place of activations that are freed, unless they are there from the last micro-batch
    is_summed = plan.gradient_accumulation_steps > 1
    planned = activations + gradients if is_summed else max(activations, gradients)
    assert planned == pytest.approx(allocated, rel=0.1)


ALLOCATED = {"torch-ddp": step_memory.allocated, "tf-mirrored": portable_memory.allocated}


@pytest.mark.features
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("torch-ddp", name) for name in ("dense", "convolutional", "transformer")),
        *(("tf-mirrored", name) for name in ("dense", "deep convolutional", "transformer")),
    ],
)
def test_a_portable_model_allocates_what_is_planned(
    monkeypatch: pytest.MonkeyPatch, backend: str, name: str
) -> None:
    monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", "true")
    # TensorFlow's own kernels of convolutions have work space of the size of the processor's cache
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    spec = portable_memory.SPECS[name]
    plan = api.measured_plan(spec, backend=backend, replicas=1, quiet=True)
    run = try_run(ALLOCATED[backend], spec, backend, 1)
    assert run.failure is None, run.failure
    assert plan.activation_bytes == pytest.approx(run.returned[0], rel=0.1)


@pytest.mark.features
@pytest.mark.parametrize("name", portable_memory.SPECS)
def test_both_frameworks_have_the_same_operations(name: str) -> None:
    """Matrix products and convolutions, by which a plan estimates the time of a step."""
    torch_plan, tensorflow_plan = (
        api.gpu_plan(
            portable_memory.SPECS[name],
            hosts=1,
            gpus_per_host=2,
            gpu="h100",
            backend=backend,
            quiet=True,
        )
        for backend in ("torch-ddp", "tf-multiworker")
    )
    assert torch_plan.bounds is not None
    assert tensorflow_plan.bounds is not None
    assert tensorflow_plan.bounds.compute == torch_plan.bounds.compute
    assert tensorflow_plan.fits


@pytest.mark.features
def test_loops_in_a_graph_are_not_counted() -> None:
    """TensorFlow's loops keep lists of tensors, whose lengths their graphs do not tell."""
    spec = portable_memory.spec(portable_memory.recurrent)
    plan = api.measured_plan(spec, backend="tf-mirrored", replicas=1, quiet=True)
    assert plan.activation_bytes is None


@pytest.mark.features
def test_functions_in_a_module_are_counted() -> None:
    """A `tf.function` in a tf.Module is one operation of its graph; `compile` makes another one."""
    plain, in_function, compiled = (
        api.measured_plan(
            portable_memory.spec({"tensorflow": model}, **fields),
            backend="tf-mirrored",
            replicas=1,
            quiet=True,
        ).activation_bytes
        for model, fields in (
            (portable_memory.plain_module, {}),
            (portable_memory.module_with_function, {}),
            (portable_memory.plain_module, {"compile": True}),
        )
    )
    assert plain is not None
    assert plain == in_function == compiled


@pytest.mark.slow
def test_of_several_replicas_each_has_the_activations_of_its_samples() -> None:
    """Their gradients are in buckets, which are allocated once."""
    plan, allocated = measured("transformer", 2)
    assert plan.activation_bytes == pytest.approx(allocated, rel=0.1)


@pytest.mark.features
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_of_several_updates_the_largest_is_planned(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """They are computed one after the other, and each again."""
    monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", "true")
    whole = portable_memory.SPECS["dense"]
    updates = {
        "first": {"weights": ["*/dense/*", "*/dense_1/*", "*/dense_2/*"]},
        "last": {"weights": "*/dense_3/*", "every": 2},
    }
    spec = {**whole, "updates": updates}
    plans = [
        api.gpu_plan(each, hosts=1, gpus_per_host=1, gpu="h100", backend=backend, quiet=True)
        for each in (whole, spec)
    ]
    run = try_run(ALLOCATED[backend], spec, backend, 1)
    assert run.failure is None, run.failure
    assert plans[1].plan.activation_bytes == pytest.approx(run.returned[0], rel=0.1)
    bounds = [each.bounds for each in plans]
    assert bounds[0] is not None
    assert bounds[1] is not None
    # half of the steps have a second forward pass, a third of the whole
    assert bounds[0].compute < bounds[1].compute < 1.5 * bounds[0].compute


@pytest.mark.slow
def test_recomputation_is_planned() -> None:
    plain, recomputed = (
        api.measured_plan(step_memory.SPECS[name], backend="torch-ddp", replicas=1, quiet=True)
        for name in ("transformer", "recomputed")
    )
    assert plain.activation_bytes is not None
    assert recomputed.activation_bytes is not None
    assert recomputed.activation_bytes < plain.activation_bytes / 2


@pytest.mark.slow
def test_gpus_of_other_hosts_are_planned_without_one() -> None:
    options = {"nodes": 8, "tasks_per_node": 8, "gpus_per_node": 8}
    spec = {**step_memory.SPECS["dense"], "device": "gpu"}
    plan = api.measured_plan(
        spec, backend="torch-ddp", launcher="slurm", launcher_options=options, quiet=True
    )
    assert (plan.device, plan.collective, plan.replicas) == ("gpu", "nccl", 64)
    assert plan.activation_bytes is not None


@pytest.mark.slow
def test_the_largest_stage_keeps_what_is_planned() -> None:
    plan, kept = kept_bytes("pipeline")
    assert plan.stages is not None
    activations = max(stage.activation_bytes for stage in plan.stages.stages)
    assert needed_bytes(plan) - RESERVED_BYTES == pytest.approx(max(kept) + activations, rel=0.1)


@pytest.mark.slow
def test_a_part_of_a_replica_keeps_what_is_planned() -> None:
    plan, kept = kept_bytes("tensor")
    assert plan.state_bytes is not None
    assert [plan.state_bytes.total] * 2 == pytest.approx(kept, rel=0.1)


def kept_bytes(name: str) -> tuple[Plan, list[int]]:
    """The plan, and the number of bytes that each process of a replica keeps between steps."""
    spec = step_memory.SPLIT[name]
    plan = api.measured_plan(spec, backend="torch-ddp", replicas=1, quiet=True)
    run = try_run(step_memory.kept, spec, "torch-ddp", 1)
    assert run.failure is None, run.failure
    return plan, run.returned
