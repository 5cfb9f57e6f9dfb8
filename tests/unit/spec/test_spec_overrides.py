"""Overrides of a spec, as `--set` gives them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from unit.spec.spec_samples import FIELDS, SMALL, refused

from isotrain.core.errors import SpecError
from isotrain.core.spec.loading import json_schema, load_spec
from isotrain.core.spec.sections import Adam, Clip
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.validation import table_keys


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
    updates = {
        "critic": {"optimizer": "adam", "schedule": "cosine", "weights": "c"},
        "generator": {},
    }
    spec = load_spec(
        {**SMALL, "updates": updates},
        [
            "updates.critic.optimizer.lr=0.5",
            "updates.critic.schedule.warmup_steps=1",
            "updates.critic.weights.1=d",
            "updates.generator.optimizer.name=adam",
        ],
    )
    assert spec.for_update("critic").schedule.warmup_steps == 1
    assert spec.updates["critic"].weights == ("c", "d")
    assert spec.for_update("critic").optimizer.lr == 0.5
    assert spec.for_update("generator").optimizer.name == "adam"


SHORT_FORMS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"loss": "huber"}, "loss.delta=2", {"loss": {"name": "huber", "delta": 2}}),
    (
        {"loss": {"head": "huber"}},
        "loss.head.delta=2",
        {"loss": {"head": {"name": "huber", "delta": 2}}},
    ),
    (
        {"metrics": ["math:hypot"]},
        "metrics.0.k=9",
        {"metrics": [{"name": "math:hypot", "k": 9}]},
    ),
    (
        {"loss": {"head": "mse"}, "metrics": {"head": "accuracy"}},
        "metrics.head.1=mae",
        {"loss": {"head": "mse"}, "metrics": {"head": ["accuracy", "mae"]}},
    ),
    ({"optimizer": "sgd"}, "optimizer.lr=2", {"optimizer": {"name": "sgd", "lr": 2}}),
    (
        {"optimizer": {"name": "adam", "layer_decay": 0.5}},
        "optimizer.layer_decay.layers.0=a/*",
        {"optimizer": {"name": "adam", "layer_decay": {"factor": 0.5, "layers": ["a/*"]}}},
    ),
    (
        {"optimizer": {"name": "adam", "groups": [{"weights": "a", "schedule": "cosine"}]}},
        "optimizer.groups.0.schedule.warmup_steps=1",
        {
            "optimizer": {
                "name": "adam",
                "groups": [{"weights": "a", "schedule": {"name": "cosine", "warmup_steps": 1}}],
            }
        },
    ),
    (
        {"optimizer": {"name": "adam", "groups": [{"weights": "a", "lr_factor": 2}]}},
        "optimizer.groups.0.weights.1=b",
        {"optimizer": {"name": "adam", "groups": [{"weights": ["a", "b"], "lr_factor": 2}]}},
    ),
    (
        {"schedule": "cosine"},
        "schedule.warmup_steps=1",
        {"schedule": {"name": "cosine", "warmup_steps": 1}},
    ),
    ({"order": "shuffled"}, "order.name=sequential", {"order": "sequential"}),
    (
        {"strategy": "local-sgd"},
        "strategy.options.every=4",
        {"strategy": {"name": "local-sgd", "options": {"every": 4}}},
    ),
    (
        {"scaling": "linear"},
        "scaling.base_batch_size=2",
        {"scaling": {"rule": "linear", "base_batch_size": 2}},
    ),
    (
        {"initial_weights": "/a.npz"},
        "initial_weights.freeze=b*",
        {"initial_weights": {"source": "/a.npz", "freeze": ["b*"]}},
    ),
    (
        {"initial_weights": {"freeze": "a*"}},
        "initial_weights.freeze.1=b*",
        {"initial_weights": {"freeze": ["a*", "b*"]}},
    ),
    (
        {"early_stopping": "loss"},
        "early_stopping.patience=5",
        {"early_stopping": {"metric": "loss", "patience": 5}},
    ),
    (
        {"checkpoint": {"keep_best": "loss"}},
        "checkpoint.keep_best.mode=min",
        {"checkpoint": {"keep_best": {"metric": "loss", "mode": "min"}}},
    ),
    ({"ema": 0.999}, "ema.every=5", {"ema": {"decay": 0.999, "every": 5}}),
    ({"reproducible": "bits"}, "reproducible.granularity=4", {"reproducible": {"granularity": 4}}),
    (
        {"reproducible": "bits", "shares": "by-speed"},
        "shares.every=5",
        {"reproducible": "bits", "shares": {"every": 5}},
    ),
    ({"profile": True}, "profile.steps=2", {"profile": {"steps": 2}}),
    ({"profile": False}, "profile.steps=2", {"profile": {"steps": 2}}),
    ({"loggers": "csv"}, "loggers.1=tensorboard", {"loggers": ["csv", "tensorboard"]}),
    (
        {"loggers": ["csv"]},
        "loggers.0.options.a=1",
        {"loggers": [{"name": "csv", "options": {"a": 1}}]},
    ),
    (
        {"loggers": {"name": "csv"}},
        "loggers.0.options.a=1",
        {"loggers": [{"name": "csv", "options": {"a": 1}}]},
    ),
    (
        {"callbacks": "math:hypot"},
        "callbacks.1=json:load",
        {"callbacks": ["math:hypot", "json:load"]},
    ),
    ({"plugins": "json"}, "plugins.1=math", {"plugins": ["json", "math"]}),
    ({"per_replica": "a"}, "per_replica.1=b", {"per_replica": ["a", "b"]}),
    ({"recompute": "a"}, "recompute.1=b", {"recompute": ["a", "b"]}),
    (
        {"gradient_norm": {"top": "a"}},
        "gradient_norm.top.1=b",
        {"gradient_norm": {"top": ["a", "b"]}},
    ),
]
"""Fields in their short form, an override inside of it, and the fields that are expected."""


@pytest.mark.parametrize(("short", "override", "long"), SHORT_FORMS)
def test_overrides_go_into_short_forms(
    short: dict[str, Any], override: str, long: dict[str, Any]
) -> None:
    expected = load_spec({**SMALL, **long}, check_imports=False)
    assert load_spec({**SMALL, **short}, [override], check_imports=False) == expected


def test_every_short_form_of_the_schema_is_overridden_here() -> None:
    """Those of frameworks aside, in which a value stands for a table with any keys."""
    tested = {name for short, _, _ in SHORT_FORMS for name in short}
    short = {name for name, field in json_schema()["properties"].items() if _has_short_form(field)}
    frameworks = {"model", "call", "objective", "gradients"}
    assert short - tested == frameworks
    assert tested - short == {"checkpoint"}


def _has_short_form(schema: dict[str, Any]) -> bool:
    """Whether a field takes a value or a table or list of these."""
    forms = [form for form in schema.get("anyOf", []) if form != {"type": "null"}]
    return len(forms) > 1


def test_overrides_do_not_go_into_short_forms_of_free_options() -> None:
    source = {**SMALL, "model_args": {"schedule": "cosine", "plugins": "a"}}
    assert "'x' is below 'cosine'" in refused(source, "model_args.schedule.x=1")
    assert "'1' is below 'a'" in refused(source, "model_args.plugins.1=b")


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


def _takes(name: str, text: str) -> bool:
    try:
        load_spec(SMALL, [f"{name}={text}"], check_imports=False)
    except SpecError as error:
        return f"  {name}: got" not in str(error)
    return True


def test_fields_that_take_a_table_alone_refuse_all_else() -> None:
    """A hint on `--set` says `NAME=VALUE` of the others, and keys of these."""
    fields = TrainingSpec.model_fields
    tables = {name for name, each in fields.items() if table_keys(each) is not None}
    values = ("1", "0.5", "true", "text", "linear", "bits", "by-speed", "sgd", "a:b", "[]")
    assert not [(name, text) for name in tables for text in values if _takes(name, text)]
    assert {"clip", "elastic", "class_weight"} < tables
    assert {name for name in fields if any(_takes(name, text) for text in values)} >= {
        *("ema", "profile", "reproducible", "scaling", "shares", "strategy", "early_stopping"),
        *("optimizer", "initial_weights"),
    }
    assert load_spec(SMALL, ["class_weight={0: 0.5}"]).class_weight == {0: 0.5}
    assert load_spec(SMALL, ["clip.global_norm=0.5"]).clip == Clip(global_norm=0.5)
