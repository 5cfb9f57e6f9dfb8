"""Models and specs that strategy pipeline refuses."""

from __future__ import annotations

from typing import Any

import pytest
from integration.pipeline_models import data, shared, tied, written
from integration.pipeline_tasks import BASE, followed, under

import isotrain
from isotrain.core.pipeline.partition import PipelineSplit
from isotrain.testing.launching import try_run

pytestmark = pytest.mark.slow

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "objective": ({"loss": None, "objective": data, "metrics": None}, "calls the whole model"),
    "scaled": ({"precision": "float16"}, "float16|Float16"),
    "compile": ({"compile": True}, "not compiled in pipeline runs"),
    "schedule": (under({"schedule": "1b1f"}), "did you mean|1f1b"),
    "chunks": (under({"chunks": 2}), "interleaved"),
    "processes": (under({"stages": [1, 5]}), "stage 2 has 5 processes for 4 micro-batches"),
    "no processes": (under({"stages": [2, 0]}), "a whole number of at least 1, received 0"),
    "norm of all": (under({"schedule": "pipedream"}), "clip.global_norm: under schedule pipedream"),
    "scaling": (
        {
            **under({"schedule": "pipedream"}),
            "clip": None,
            "scaling": {"rule": "sqrt", "base_batch_size": 2},
        },
        "scaling: under schedule pipedream .* the learning rate for such an update",
    ),
    "vertical sync": (
        under({"vertical_sync": True}),
        "'pipedream' alone has it; received .*'1f1b'",
    ),
    "groups": (under({"schedule": "interleaved", "chunks": 2, "stages": 3}), "a multiple"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_specs_are_refused(name: str) -> None:
    changes, told = REFUSED[name]
    fields = {**BASE, **under({}), **changes}
    with pytest.raises(isotrain.IsotrainError, match=told):
        isotrain.plan(
            {k: v for k, v in fields.items() if v is not None}, backend="torch-ddp", replicas=1
        )


def test_models_that_cannot_be_split_are_refused() -> None:
    run = try_run(followed, {**BASE, "model": shared, **under({})}, "torch-ddp", 1)
    assert run.failure is not None
    assert "twice is called on both sides of a cut" in run.failure
    run.forget()


def test_a_function_that_reads_a_weight_of_another_stage_is_refused() -> None:
    fields = {**BASE, "model": tied, **under({"cut": ["second"]})}
    run = try_run(followed, fields, "torch-ddp", 1)
    assert run.failure is not None
    assert "layer 'back' reads the weight 'first/kernel' of a layer in another stage" in run.failure
    run.forget()


def cut_into(model: Any, *names: str, chunks: int = 2) -> Any:
    """Modules of a native model, cut; the rest of a program is not asked."""
    from types import SimpleNamespace

    from isotrain.adapters.torch.pipeline.modules import PipelineModules

    program: Any = SimpleNamespace(
        model=model,
        with_autocast=lambda function: function,
        call_in_eval_mode=lambda compute, *args: compute(*args),
    )
    return PipelineModules(program, PipelineSplit(chunks, modules=names))


def test_modules_that_are_not_the_model_are_refused() -> None:
    import torch
    from torch import nn

    twice, model = nn.Linear(6, 6), written()
    with pytest.raises(isotrain.UnsupportedError, match="2 is called on both sides of a cut"):
        cut_into(nn.Sequential(twice, nn.Tanh(), twice, nn.Linear(6, 4)))
    with pytest.raises(isotrain.UnsupportedError, match="is a Linear, which calls its modules"):
        cut_into(nn.Linear(6, 4))
    with pytest.raises(isotrain.SpecError, match=r"'block' matches no module.* blocks\.0\.0, "):
        cut_into(model, "first", "block")
    with pytest.raises(isotrain.SpecError, match=r"first\.weight, first\.bias is in none of them"):
        cut_into(model, "bend", "blocks.*", "head")
    found = cut_into(model, "first", "blocks.*", "head")
    with pytest.raises(isotrain.SpecError, match=r"first, blocks\.0, blocks\.1, head, one after"):
        found.check_equivalence(torch.ones(2, 6))
    cut_into(model.eval(), "first", "bend", "blocks.*", "head").check_equivalence(torch.ones(2, 6))
