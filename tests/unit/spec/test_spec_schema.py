"""The JSON schema of specs."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import jsonschema
import pytest
from unit.spec.spec_samples import FIELDS, SMALL, refused

import isotrain
from isotrain.core.spec import yaml_loader
from isotrain.core.spec.loading import json_schema, load_spec
from isotrain.core.spec.schedules import SCHEDULES, SCHEDULES_WITH_DEFAULTS
from isotrain.core.spec.sections import (
    OPTIMIZERS,
    ORDERS_WITH_DEFAULTS,
)
from isotrain.core.spec.training_spec import TrainingSpec


def test_schema_is_a_valid_schema_with_descriptions() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(schema["properties"]) == {*TrainingSpec.model_fields, "$schema"}
    assert all(field.get("description") for field in schema["properties"].values())
    assert json.loads(json.dumps(schema)) == schema


SOUND = [
    FIELDS,
    SMALL,
    {**SMALL, "$schema": "spec.schema.json"},
    {**SMALL, "epochs": None, "clip": None, "transform": None, "loss_scale": None},
    {**SMALL, "optimizer": {"custom": {"torch": "math:hypot"}, "lr": 0.1, "args": {"a": [1]}}},
    {**SMALL, "optimizer": {"name": "sgd", "lr": 1}, "schedule": {"warmup_epochs": 2}},
    {**SMALL, "schedule": {"name": "step", "every_steps": 5, "every_epochs": None, "factor": 0.5}},
    {**SMALL, "scaling": "none", "strategy": "data-parallel"},
    {**SMALL, "scaling": {"rule": "sqrt", "base_batch_size": 8}, "strategy": {"options": {"a": 1}}},
    {**SMALL, "loss": {"torch": {"name": "huber", "delta": 1}, "tensorflow": "math:hypot"}},
    {**SMALL, "loss": None, "objective": {"torch": "math:hypot"}},
    {**SMALL, "precision": "float16", "loss_scale": {"initial": 4}},
    {**SMALL, "early_stopping": "validation_loss", "recompute": None},
    {**SMALL, "checkpoint": {"keep_best": "validation_loss"}, "recompute": "block_*"},
    {**SMALL, "ema": 0.5, "profile": True},
    {**SMALL, "ema": {"every": 2}, "profile": {"steps": 2}},
    {**SMALL, "profile": False, "per_replica": None, "loggers": {"name": "csv"}},
    {**SMALL, "loggers": ["csv", {"name": "csv"}]},
    {**SMALL, "initial_weights": {"source": "w.safetensors", "freeze": "a_*", "include": ["b_*"]}},
    *[{**SMALL, "schedule": name} for name in SCHEDULES_WITH_DEFAULTS],
    {**SMALL, "schedule": "math:exp"},
    {**SMALL, "schedule": {"call": "math:exp", "warmup_steps": 2}},
    {**SMALL, "schedule": {"name": "cosine-restarts", "first_steps": 2}},
    {**SMALL, "schedule": {"name": "one-cycle", "momentum_range": [0.85, 0.95]}},
    *[{**SMALL, "optimizer": {"name": name, "lr": 0.5}} for name in OPTIMIZERS],
    {**SMALL, "updates": {"a": {"optimizer": "adam", "schedule": "cosine"}, "b": {}}},
    *[{**SMALL, "order": order} for order in (*ORDERS_WITH_DEFAULTS, "math:hypot", None)],
    {**SMALL, "order": {"call": "math:hypot"}, "epoch_steps": 3},
    {**SMALL, "order": {"name": "weighted", "weights": "math:hypot", "replacement": False}},
    {**SMALL, "order": {"name": "by-length", "lengths": "n", "buckets": [4, 9], "tokens": 64}},
    {**SMALL, "reproducible": "bits", "shares": "by-speed"},
]
UNSOUND = [
    {**SMALL, "epochs": 3},
    {**SMALL, "steps": None},
    {**SMALL, "precison": "float32"},
    {**SMALL, "ema": 1.5},
    {**SMALL, "profile": 5},
    {**SMALL, "optimizer": {"lr": 0.1}},
    {**SMALL, "optimizer": "sdg"},
    {**SMALL, "optimizer": "sgd"},
    {**SMALL, "updates": {"a": {"optimizer": "sgd"}}},
    *[{**SMALL, "schedule": name} for name in {*SCHEDULES} - {*SCHEDULES_WITH_DEFAULTS}],
    {**SMALL, "schedule": {"name": "milestones", "at_epochs": [1], "at_steps": [2]}},
    {**SMALL, "optimizer": {"name": "adam", "lr": -1}},
    {**SMALL, "schedule": {"name": "step", "factor": 0.5}},
    {**SMALL, "clip": {"value": 1, "norm": 1}},
    {**SMALL, "model": "net.build"},
    {**SMALL, "metrics": "accuracy"},
    {**SMALL, "loss": {"delta": 1}},
    {**SMALL, "loss": {"name": {"name": "huber", "delta": 1}}},
    {**SMALL, "seed": 2**32},
    {**SMALL, "name": "a/b"},
    *[{**SMALL, "order": name} for name in ("weighted", "by-length", "repeated", "random")],
    {**SMALL, "order": {"name": "repeated", "times": 0}},
]


def test_typed_fields_are_those_of_the_schema() -> None:
    """After a change of the spec: `python tools/spec_fields.py`."""
    tool = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "spec_fields.py"))
    assert tool["TARGET"].read_text(encoding="utf-8") == tool["source"]()
    assert {*TrainingSpec.model_fields} == {*get_type_hints(isotrain.SpecFields)}


@pytest.fixture(scope="module")
def by_schema() -> jsonschema.Draft202012Validator:
    """Validates by the schema, which is made and compiled once."""
    return jsonschema.Draft202012Validator(json_schema())


@pytest.mark.parametrize("fields", SOUND)
def test_schema_accepts_what_loading_accepts(
    fields: dict[str, Any], by_schema: jsonschema.Draft202012Validator
) -> None:
    by_schema.validate(fields)
    spec = load_spec(fields)
    by_schema.validate(spec.to_dict())
    assert load_spec(spec.to_dict()) == spec


@pytest.mark.parametrize("fields", UNSOUND)
def test_schema_refuses_what_loading_refuses(
    fields: dict[str, Any], by_schema: jsonschema.Draft202012Validator
) -> None:
    refused(fields)
    with pytest.raises(jsonschema.ValidationError):
        by_schema.validate(fields)


ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```(yaml|json|toml)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(rf"`((?:{'|'.join(TrainingSpec.model_fields)}): [^`\n]+)`")
PLACEHOLDER = re.compile(r"\.\.\.|\b[kN]\b")


def shown_fields(page: Path) -> Iterator[dict[str, Any]]:
    """Fields of a spec in the blocks of a page, and on the page of the spec also within its sentences."""
    text = page.read_text(encoding="utf-8")
    shown = BLOCK.findall(text)
    if page.name == "spec.md":
        shown += [("yaml", inline) for inline in INLINE.findall(text)]
    for language, written in shown:
        if not PLACEHOLDER.search(written):
            fields = (tomllib.loads if language == "toml" else yaml_loader.load)(written)
            if isinstance(fields, dict) and fields.keys() <= TrainingSpec.model_fields.keys():
                yield fields


def completed(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields and what else a spec requires."""
    others = {
        name: value
        for name, value in SMALL.items()
        if not fields.keys() & ALTERNATIVES.get(name, set())
    }
    return {**others, **fields}


ALTERNATIVES = {
    "loss": {"objective"},
    "global_batch_size": {"local_batch_size"},
    "steps": {"epochs"},
}
"""Required fields of which there may be another one instead."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_schema_accepts_what_the_pages_show(
    page: Path, by_schema: jsonschema.Draft202012Validator
) -> None:
    for fields in shown_fields(page):
        by_schema.validate(completed(fields))


def test_shown_fields_are_found() -> None:
    assert len([*shown_fields(ROOT / "docs" / "spec.md")]) >= 40
