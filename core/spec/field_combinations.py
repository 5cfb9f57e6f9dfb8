"""Rules of a training spec on several fields: what is required together, and what excludes each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from isotrain.core.spec import import_strings
from isotrain.core.spec.sections import Reproducible
from isotrain.core.spec.validation import Problem, at_most_one, exactly_one, expected_of

NEED_TRAINING_DATA = ("epochs", "validation_split", "class_weight", "collate", "transform", "order")
"""Fields that have a meaning only with training data."""
_UPDATE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def combination_problems(fields: Mapping[str, Any], optimizer: FieldInfo) -> Iterator[Problem]:
    """Problems of pairs of which exactly one is required, and of combinations that are not supported.

    Args:
        fields: Fields of the spec, before they are validated.
        optimizer: Description of the field `optimizer`.
    """
    yield from _update_problems(fields, optimizer)
    if fields.get("loss_weights") is not None and not isinstance(fields.get("loss"), Mapping):
        hint = "a single loss has no weight"
        yield Problem("loss as a table {output: loss}", ("loss_weights",), None, hint)
    for field in ("values", "frozen"):
        if fields.get(field) and fields.get("objective") is None and not fields.get("updates"):
            yield Problem(f"an objective with {field}", (field,), None, "a loss gets no step")
    yield from exactly_one(fields, "global_batch_size", "local_batch_size")
    yield from exactly_one(fields, "epochs", "steps")
    if fields.get("data") is None:
        needing = [name for name in NEED_TRAINING_DATA if fields.get(name) is not None]
        if needing or fields.get("steps") is None:
            hint = f"{needing[0]} needs them; " if needing else ""
            hint += "only with `steps`, for a loop that makes its batches, are they left out"
            yield Problem(f"{import_strings.SYNTAX} or a data source", ("data",), hint=hint)
    if fields.get("order") is not None and (shuffle := fields.get("shuffle")) is not None:
        is_sequential = _name_of(fields["order"]) == "sequential"
        if shuffle is is_sequential:
            hint = "the order says whether samples are shuffled: leave shuffle out"
            yield Problem(f"{not is_sequential}".lower(), ("shuffle",), shuffle, hint)
    for field in ("min_replicas", "elastic"):
        if fields.get(field) is not None and fields.get("local_batch_size") is not None:
            hint = "with fewer replicas the global batch stays the same; local_batch_size makes it smaller"
            yield Problem(f"global_batch_size with {field}", (field,), fields[field], hint)
    if fields.get("elastic") is not None and fields.get("updates"):
        hint = "a step with several updates could be broken off between two of them"
        yield Problem("no updates with elastic", ("elastic",), fields["elastic"], hint)
    if fields.get("batch_norm") in ("global", "ghost"):
        yield from _statistics_problems(fields)
    elif (ghosts := fields.get("ghost_batches")) is not None:
        yield Problem("batch_norm: ghost with ghost_batches", ("ghost_batches",), ghosts)
    if fields.get("random_layers") == "per-sample" and fields.get("compile"):
        hint = "a compiled step draws by numbers of its own"
        yield Problem("per-replica with compile", ("random_layers",), "per-sample", hint)
    if fields.get("reproducible") is not None:
        yield from _reproducible_problems(fields)
    else:
        for field in ("shares", "drop_outliers", "verify_every"):
            if fields.get(field) is not None:
                hint = "it gives a global batch the parts that this field is about"
                yield Problem(f"reproducible with {field}", ("reproducible",), None, hint)
    if fields.get("compile") and fields.get("recompute"):
        hint = "the compiler itself decides what it keeps"
        yield Problem("no recompute with compile", ("recompute",), fields["recompute"], hint)
    yield from _unevaluated_metrics(fields)
    yield from at_most_one(fields, "ema", "swa")
    precision = fields.get("precision", "float32")
    if fields.get("on_nan") == "skip" and precision == "float16":
        hint = "with float16 the loss scale already skips steps whose gradients overflow"
        yield Problem("stop, warn or ignore with float16", ("on_nan",), "skip", hint)
    if fields.get("loss_scale") is not None and precision != "float16":
        hint = "leave loss_scale out"
        yield Problem("precision float16 with loss_scale", ("precision",), precision, hint)


def _update_problems(fields: Mapping[str, Any], optimizer: FieldInfo) -> Iterator[Problem]:
    """Problems of loss, objective and optimizer, which updates may have in place of the spec."""
    updates = fields.get("updates")
    if not updates or not isinstance(updates, Mapping):
        yield from exactly_one(fields, "loss", "objective")
        if fields.get("optimizer") is None:
            yield Problem(expected_of(optimizer), ("optimizer",))
        return
    yield from at_most_one(fields, "loss", "objective")
    for name, update in updates.items():
        if not _UPDATE_NAME.fullmatch(str(name)):
            hint = "it names metrics, as NAME_loss, and state"
            yield Problem("letters, digits and _ as the name", ("updates",), name, hint)
        for names in (("loss", "objective"), ("optimizer",)):
            if all(_field(update, each) is None and fields.get(each) is None for each in names):
                yield Problem("here, or for all updates in the spec", ("updates", name, names[-1]))


def _statistics_problems(fields: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of fields with which a forward pass does not see its local batch whole and once."""
    others = {
        "gradient_accumulation_steps": "a micro-batch is not the local batch",
        "updates": "each update would move the statistics",
        "recompute": "the backward pass would compute them again",
        "compile": "a compiled step has the framework's own batch normalization",
    }
    for name, hint in others.items():
        value = fields.get(name)
        if (value and value != 1) or value is True:
            mode = fields["batch_norm"]
            yield Problem(f"batch_norm: local with {name}", ("batch_norm",), mode, hint)


def _reproducible_problems(fields: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of fields whose results depend on the number of replicas."""
    others = {
        "gradient_accumulation_steps": "the parts of the global batch are the micro-batches",
        "batch_norm": "its sums over replicas have no order",
        "per_replica": "there is one for each replica",
        "local_batch_size": "the global batch would grow with the number of replicas",
        "updates": "steps of several updates are not summed in one order",
        "compile": "the compiler rounds by what it has seen of the batches",
        "metrics_over_all": "it takes the predictions of whole local batches",
    }
    allowed: tuple[Any, ...] = (None, False, 1, "local", "ghost", (), [], {})
    for name, hint in others.items():
        value = fields.get(name)
        if value not in allowed or value is True:
            yield Problem(f"no {name} with reproducible", (name,), value, hint)
    granularity = _field(fields["reproducible"], "granularity") or Reproducible().granularity
    if (ghosts := fields.get("ghost_batches")) not in (None, granularity):
        hint = "ghost batches are the parts of the global batch"
        yield Problem(f"{granularity} with reproducible", ("ghost_batches",), ghosts, hint)
    if fields.get("precision") == "float16":
        hint = "its loss scale is not summed in one order"
        yield Problem(
            "float32, float64 or bfloat16 with reproducible", ("precision",), "float16", hint
        )


def _unevaluated_metrics(fields: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of monitored validation metrics in a spec that never evaluates."""
    evaluation = fields.get("evaluation")
    if _field(evaluation, "every_epochs") != 0 or _field(evaluation, "every_steps") is not None:
        return
    monitored: dict[tuple[str, ...], Any] = {
        ("early_stopping",): fields.get("early_stopping"),
        ("checkpoint", "keep_best"): _field(fields.get("checkpoint"), "keep_best"),
    }
    updates = fields.get("updates")
    named = updates if isinstance(updates, Mapping) else {}
    schedules: dict[tuple[str, ...], Any] = {("schedule",): fields.get("schedule")}
    schedules |= {
        ("updates", name, "schedule"): _field(each, "schedule") for name, each in named.items()
    }
    for path, schedule in schedules.items():
        if "plateau" in (schedule, _field(schedule, "name")):
            monitored[path] = _field(schedule, "metric") or "validation_loss"
    for path, section in monitored.items():
        metric = section if isinstance(section, str) else _field(section, "metric")
        if section is not None and str(metric or "validation_loss").startswith("validation_"):
            hint = f"{'.'.join(map(str, path))} looks at a metric of validation"
            yield Problem(
                "an evaluation, by every_epochs or every_steps", ("evaluation",), evaluation, hint
            )


def _name_of(section: Any) -> Any:
    """Name that a section of the spec chooses, in one of its forms."""
    return section if isinstance(section, str) else _field(section, "name")


def _field(section: Any, name: str) -> Any:
    """Field of a section of the spec or of its table."""
    return section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)
