"""Overrides of a spec, as `--set` gives them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from unit.spec.spec_samples import FIELDS, SMALL, refused

from isotrain.core.spec.loading import load_spec
from isotrain.core.spec.sections import Adam
from isotrain.core.spec.training_spec import TrainingSpec


@pytest.mark.parametrize(
    ("override", "changes"),
    [
        ("optimizer.lr=0.05", {"optimizer": {"name": "adam", "lr": 0.05}}),
        ("optimizer.lr=5e-2", {"optimizer": {"name": "adam", "lr": 0.05}}),
        ("optimizer=lamb", {"optimizer": {"name": "lamb", "lr": 0.001}}),
        ("optimizer={name: sgd, lr: 1}", {"optimizer": {"name": "sgd", "lr": 1}}),
        ("schedule.warmup_steps=5", {"schedule": {"warmup_steps": 5}}),
        ("evaluation.batch=8", {"evaluation": {"batch": 8}}),
        (
            "scaling={rule: linear, base_batch_size: 2}",
            {"scaling": {"rule": "linear", "base_batch_size": 2}},
        ),
        ("model_args.deep.er=1", {"model_args": {"deep": {"er": 1}}}),
        ("metrics.0=accuracy", {"metrics": ["accuracy"]}),
        ("loss.delta=2", {"loss": {"name": "mse", "delta": 2}}),
        ("strategy.options.k=2", {"strategy": {"options": {"k": 2}}}),
        ("transform=", {}),
        ("seed = 7", {"seed": 7}),
        ("name=a=b", None),
    ],
)
def test_overrides(override: str, changes: dict[str, Any] | None) -> None:
    if changes is None:
        assert "problem in the spec" in refused(SMALL, override)
        return
    expected = TrainingSpec(**{**SMALL, **changes})
    assert load_spec(SMALL, [override]) == expected
    assert load_spec(TrainingSpec(**SMALL), [override]) == expected


def test_overrides_apply_in_order_and_leave_the_source_alone() -> None:
    fields = {**FIELDS, "optimizer": Adam(lr=0.5)}
    before = json.dumps(FIELDS)
    spec = load_spec(
        fields, ["metrics.1.k=9", "metrics.2=mse", "optimizer.lr=1", "epochs=", "steps=5"]
    )
    assert [metric.label for metric in spec.metrics] == ["accuracy", "math:hypot", "mse"]
    assert spec.metrics[1].options == {"k": 9}
    assert spec.optimizer == Adam(lr=1)
    assert (spec.epochs, spec.steps) == (None, 5)
    assert json.dumps(FIELDS) == before


def test_overrides_keep_callables() -> None:
    def build() -> int:
        return 5

    spec = load_spec(TrainingSpec(**{**SMALL, "model": build, "metrics": [build]}), ["seed=3"])
    assert (spec.model, spec.metrics[0].name, spec.seed) == (build, build, 3)


def test_overrides_of_an_update_whose_optimizer_is_a_name() -> None:
    updates = {"critic": {"optimizer": "adam", "schedule": "cosine"}, "generator": {}}
    spec = load_spec(
        {**SMALL, "updates": updates},
        ["updates.critic.optimizer.lr=0.5", "updates.generator.optimizer.name=adam"],
    )
    assert spec.for_update("critic").optimizer.lr == 0.5
    assert spec.for_update("generator").optimizer.name == "adam"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("optimizer.lr", "is not of the form path=value"),
        ("=3", "is not of the form path=value"),
        ("optimizer..lr=3", "is not of the form path=value"),
        ("seed=[1", "the value is not YAML"),
        ("seed.x=1", "seed: got {'x': 1}; expected an integer"),
        ("global_batch_size.x=1", "'x' is below 4, which is not a table"),
        ("model.x=1", "'x' is below 'math:hypot', which is not a table"),
        ("metrics.1=a", "'1' is no index of a list of 0; expected 0 to 0"),
        ("optimiser.lr=3", "optimiser: got {'lr': 3}; expected a field that exists; did you mean"),
        ("optimizer.rl=3", "optimizer.rl: got 3; expected a field that exists; did you mean 'lr'?"),
        ("optimizer.lr=fast", "optimizer.lr: got 'fast'; expected a finite number > 0"),
        ("epochs=2", "epochs and steps: got {'epochs': 2, 'steps': 3}"),
    ],
)
def test_overrides_that_are_wrong(override: str, part: str) -> None:
    source = {**SMALL, "metrics": []} if override.startswith("metrics") else SMALL
    assert part in refused(source, override)
