"""Reading a training spec from YAML, TOML, JSON or Python."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from isotrain.core.errors import SpecError, did_you_mean
from isotrain.core.spec import import_strings, short_forms
from isotrain.core.spec.field_types import REFERENCE_SCHEMA, Component
from isotrain.core.spec.schedules import SCHEDULES_WITH_DEFAULTS
from isotrain.core.spec.sections import (
    OPTIMIZERS_WITH_DEFAULTS,
    ORDERS_WITH_DEFAULTS,
    StrategyChoice,
    StrategyLike,
    keeps_options,
)
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.validation import SpecModel, as_spec_error

if TYPE_CHECKING:
    from isotrain.core.spec.spec_fields import SpecFields

SpecLike: TypeAlias = "TrainingSpec | SpecFields | Mapping[str, Any] | str | PathLike[str]"
"""Forms in which `load_spec` accepts a spec."""

_IMPORTS_CHECKED: weakref.WeakValueDictionary[int, TrainingSpec] = weakref.WeakValueDictionary()
"""Specs whose imports were checked, by identity: a changed copy may have other imports."""

_SCRIPT = re.compile(r"\.py:[^:/]+$")
_VARIABLE = "env:"
"""Prefix of the name of an environment variable with a spec in JSON."""
_MAX_LEVELS = 100


def load_spec(
    source: SpecLike,
    overrides: Sequence[str] = (),
    *,
    strategy: StrategyLike | None = None,
    loggers: Sequence[Mapping[str, Any] | str] = (),
    check_imports: bool = True,
) -> TrainingSpec:
    """Reads and validates a spec, without importing what its import strings name.

    Args:
        source: Path (.yaml, .yml, .toml or .json), `path/to/script.py:name`, `env:NAME`, mapping of fields,
            or spec. A script is imported; the name in it is a spec, a mapping, or a function that returns
            one. An environment variable holds JSON.
        overrides: Changes such as "optimizer.lr=0.05"; values are YAML, an empty one is null.
        strategy: Strategy to replace the spec's; the bare name of the spec's own keeps its options.
        loggers: Additional loggers.
        check_imports: Whether to check that the modules and names of import strings exist.

    Returns:
        The spec; an unchanged spec that was loaded before is returned as it is. Paths in a spec file are
        relative to its folder.

    Raises:
        SpecError: The file cannot be read, or the spec is invalid; the message lists every problem.
    """
    if isinstance(source, str) and _SCRIPT.search(source):
        source = _spec_in_script(source)
    is_changed = bool(overrides or loggers) or strategy is not None
    if not is_changed and _IMPORTS_CHECKED.get(id(source)) is source:
        return source
    fields, title, folder = _read_source(source)
    for override in overrides:
        fields = _override(fields, override)
    if strategy is not None:
        fields["strategy"] = _merge_strategy(strategy, fields.get("strategy"))
    if loggers:
        fields["loggers"] = [*_logger_list(fields.get("loggers")), *loggers]
    fields.pop("$schema", None)
    changes = "".join(f" --set {override}" for override in overrides)
    with as_spec_error(f"{title} with{changes}" if changes else title):
        spec = TrainingSpec.model_validate(
            fields, context={"folder": folder, "check_imports": check_imports}
        )
    if check_imports:
        _IMPORTS_CHECKED[id(spec)] = spec
    return spec


def _read_source(source: SpecLike) -> tuple[dict[str, Any], str, Path]:
    """Unvalidated fields of a spec, its name in messages, and the folder that its paths are relative to."""
    if isinstance(source, str) and source.startswith(_VARIABLE):
        return _read_variable(source), source, Path.cwd()
    if isinstance(source, str | PathLike):
        path = Path(source).expanduser()
        return _read_file(path), str(path), path.absolute().parent
    if not isinstance(source, Mapping | TrainingSpec):
        kind = type(source).__name__
        raise SpecError(f"a spec is a path, a mapping or a TrainingSpec; got {kind}")
    return _as_fields(source), "the spec", Path.cwd()


def _merge_strategy(strategy: StrategyLike, current: Any) -> Any:
    """Field `strategy` with another strategy; the bare name of the current one keeps its options."""
    choice = StrategyChoice.of(strategy)
    name = current.get("name") if isinstance(current, Mapping) else current
    return current if keeps_options(choice, name) else _as_fields(choice)


def _logger_list(loggers: Any) -> Sequence[Any]:
    """Field `loggers` as a list; a single logger may be given without one."""
    if isinstance(loggers, list | tuple):
        return loggers
    return [] if loggers is None else [loggers]


def _spec_in_script(reference: str) -> TrainingSpec | Mapping[str, Any]:
    """Spec of a name in a script.

    As if the script was run, its folder is put on `sys.path` and its functions are pickled by value.

    Raises:
        SpecError: The script cannot be imported, or the name is not a spec.
    """
    import cloudpickle

    script, _, _ = reference.rpartition(":")
    folder = str(Path(script).expanduser().resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = import_strings.resolve(reference)
    cloudpickle.register_pickle_by_value(import_strings.load_module(script))
    if callable(spec) and not isinstance(spec, TrainingSpec):
        spec = spec()
    if not isinstance(spec, TrainingSpec | Mapping):
        raise SpecError(
            f"{reference}: it is a {type(spec).__name__!r}; expected a TrainingSpec, a mapping of its"
            " fields, or a function without arguments that returns one of these."
        )
    return spec


def _read_variable(reference: str) -> dict[str, Any]:
    """Fields of a spec in an environment variable, as JSON.

    Raises:
        SpecError: The variable is not set, or is not a JSON object.
    """
    name = reference.removeprefix(_VARIABLE)
    text = os.environ.get(name)
    if text is None:
        raise SpecError(
            f"{reference}: the variable {name} is not set; expected a spec in it, as JSON."
        )
    return _parse(_read_json, Path(reference), text)


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of spec files, including shorthands."""
    schema = TrainingSpec.model_json_schema()
    fields = schema["properties"]
    definitions = schema["$defs"]
    decay = definitions["Ema"]["properties"]["decay"]
    for name, shorthand in (
        ("optimizer", _names(OPTIMIZERS_WITH_DEFAULTS)),
        ("schedule", _names(SCHEDULES_WITH_DEFAULTS)),
        ("order", _names(ORDERS_WITH_DEFAULTS)),
        ("strategy", _ANY_NAME),
        ("scaling", _names(["none"])),
        ("initial_weights", _ANY_NAME),
        ("early_stopping", _ANY_NAME),
        ("reproducible", _names(["bits"])),
        ("shares", _names(["by-speed"])),
        ("ema", {key: decay[key] for key in decay if key not in _ANNOTATIONS}),
        ("profile", {"type": "boolean"}),
    ):
        fields[name] = _with_shorthand(fields[name], shorthand)
    update = definitions["Update"]["properties"]
    update["optimizer"] = _with_shorthand(update["optimizer"], _names(OPTIMIZERS_WITH_DEFAULTS))
    update["schedule"] = _with_shorthand(update["schedule"], _names(SCHEDULES_WITH_DEFAULTS))
    group = definitions["OptimizerGroup"]["properties"]
    group["schedule"] = _with_shorthand(group["schedule"], _names(SCHEDULES_WITH_DEFAULTS))
    schedules = fields["schedule"], update["schedule"], group["schedule"]
    for callable_too in (*schedules, fields["order"]):
        callable_too["anyOf"].append(REFERENCE_SCHEMA)
    for null_too in (fields["recompute"], fields["per_replica"]):
        null_too["anyOf"].append({"type": "null"})
    policy = definitions["CheckpointPolicy"]["properties"]
    policy["keep_best"] = _with_shorthand(policy["keep_best"], _ANY_NAME)
    loggers = fields["loggers"]
    logger = {"anyOf": [_ANY_NAME, loggers["items"]]}
    fields["loggers"] = _with_shorthand({**loggers, "items": logger}, logger)
    fields["$schema"] = {"type": "string", "description": "Address of this schema, for editors."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


_ANNOTATIONS = ("default", "description", "title")
_ANY_NAME: dict[str, Any] = {"type": "string"}


def _names(choices: Sequence[str]) -> dict[str, Any]:
    """Schema of a bare name, one of `choices`."""
    return {"type": "string", "enum": list(choices)}


def _with_shorthand(schema: Mapping[str, Any], shorthand: Mapping[str, Any]) -> dict[str, Any]:
    """Schema that also accepts a shorthand, such as a bare name."""
    outer = {key: schema[key] for key in schema if key in _ANNOTATIONS}
    inner = {key: value for key, value in schema.items() if key not in outer}
    return {**outer, "anyOf": [shorthand, inner]}


def _as_fields(value: Any) -> Any:
    """Value of a spec in its form in a spec file; callables and data are unchanged."""
    if isinstance(value, SpecModel):
        names = [n for n in type(value).model_fields if n in value.model_fields_set or n == "name"]
        return {name: _as_fields(getattr(value, name)) for name in names}
    if isinstance(value, Component):
        return value.fields
    if isinstance(value, Mapping):
        return {key: _as_fields(part) for key, part in value.items()}
    if isinstance(value, tuple) and any(isinstance(part, Component) for part in value):
        return [_as_fields(part) for part in value]
    return value


def _override(fields: dict[str, Any], override: str) -> dict[str, Any]:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SpecError(
            f"override {override!r} is not of the form path=value, such as optimizer.lr=0.05"
        )
    from isotrain.core.spec import yaml_loader

    try:
        value = yaml_loader.load(text)
    except yaml_loader.TextError as error:
        raise SpecError(f"override {override!r}: the value is not YAML: {error.reason}") from None
    changed = _put(fields, [], keys, value, override)
    assert isinstance(changed, dict)
    return changed


def _put(value: Any, path: Sequence[str], keys: Sequence[str], new: Any, override: str) -> Any:
    """Copy of a nested value with one entry replaced.

    Args:
        value: Table, list, short form of one of these, or other value.
        path: Path of the value in the spec.
        keys: Path of the entry in the value: keys of tables and indices of lists.
        new: New value of the entry.
        override: Override in the form of the user, for messages.
    """
    if not keys:
        return new
    key, rest = keys[0], keys[1:]
    value = short_forms.expand(value, path[2:] if path[:1] == ["updates"] else path, key)
    if value is None:
        value = [] if key.isdecimal() else {}
    inner = [*path, key]
    if isinstance(value, Mapping):
        return {**value, key: _put(value.get(key), inner, rest, new, override)}
    if isinstance(value, list | tuple):
        items = list(value)
        if not key.isdecimal() or int(key) > len(items):
            raise SpecError(
                f"override {override!r}: {key!r} is no index of a list of {len(items)}; "
                f"expected 0 to {len(items)} ({len(items)} appends)"
            )
        items[int(key) : int(key) + 1] = [
            _put([*items, None][int(key)], inner, rest, new, override)
        ]
        return items
    raise SpecError(f"override {override!r}: {key!r} is below {value!r}, which is not a table")


def _read_file(path: Path) -> dict[str, Any]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        suffixes = ", ".join(_READERS)
        hint = f"; for a script, add the name of the spec in it: {path.name}:NAME" * (
            path.suffix == ".py"
        )
        raise SpecError(f"spec {str(path)!r}: expected a file that ends in one of {suffixes}{hint}")
    return _parse(reader, path, _read_text(path))


def _parse(reader: Callable[[Path, str], Any], source: Path, text: str) -> dict[str, Any]:
    """The table in a text, if there is one and it is not nested too deeply."""
    try:
        value = reader(source, text)
    except ValueError as error:
        raise SpecError(f"{source}: {error}") from None
    except RecursionError:
        raise _too_deep(source) from None
    if value is None:
        raise SpecError(f"{source} is empty. `isotrain init` writes a spec to start from.")
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise SpecError(f"{source}: expected a table of fields at the top, got a {kind}")
    if _levels(value) > _MAX_LEVELS:
        raise _too_deep(source)
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SpecError(f"there is no spec file {str(path)!r}.{_file_suggestion(path)}") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


def _file_suggestion(path: Path) -> str:
    if not path.parent.is_dir():
        return f" There is no folder {str(path.parent)!r} either."
    names = [entry.name for entry in path.parent.iterdir() if entry.suffix in _READERS]
    return did_you_mean(path.name, names)


def _parse_error(path: Path, line: int, column: int, reason: object) -> SpecError:
    return SpecError(f"{path}, line {line}, column {column}: {reason}")


def _read_yaml(path: Path, text: str) -> Any:
    from isotrain.core.spec import yaml_loader

    try:
        return yaml_loader.load(text)
    except yaml_loader.TextError as error:
        raise _parse_error(path, error.line, error.column, error.reason) from None


def _read_toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        position = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        if position is None:
            last = text.count("\n") + 1
            raise _parse_error(path, last, len(text.rsplit("\n", 1)[-1]) + 1, error) from None
        reason = str(error)[: position.start()].strip()
        raise _parse_error(path, int(position[1]), int(position[2]), reason) from None


def _read_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise _parse_error(path, error.lineno, error.colno, error.msg) from None


def _too_deep(source: Path) -> SpecError:
    return SpecError(f"{source}: it is nested too deeply; a spec needs no {_MAX_LEVELS} levels")


def _levels(value: Any) -> int:
    """Nesting depth of tables and lists, counted up to just above the limit."""
    levels, level = 0, [value]
    while level and levels <= _MAX_LEVELS:
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [part for each in inner for part in each if isinstance(part, dict | list)]
        levels += 1
    return levels


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the key {key!r} is given twice in one object")
    return dict(pairs)


_READERS: dict[str, Callable[[Path, str], Any]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".toml": _read_toml,
    ".json": _read_json,
}
