"""Writes the spec as `TypedDict`s, `core/spec/spec_fields.py`, from its JSON Schema."""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isotrain.core.spec.loading import json_schema

TARGET = Path(__file__).parents[1] / "core" / "spec" / "spec_fields.py"
_HEAD = '''\
"""Fields of a spec as `TypedDict`s, for editors that complete mappings; `tools/spec_fields.py` writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

# fmt: off
# ruff: noqa: E501
'''
_ANY = {"callbacks", "data", "frozen", "initial_weights", "loss", "metrics", "model", "plugins"}
"""Fields for which Python also takes objects, such as arrays, modules and plugins."""
_SIMPLE = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}


def source() -> str:
    """Text of the module."""
    schema = json_schema()
    tables = {**schema["$defs"], "Spec": schema}
    return _HEAD + "\n".join(_table(name, table) for name, table in tables.items())


def _table(name: str, table: Mapping[str, Any]) -> str:
    fields = {key: value for key, value in table["properties"].items() if key != "$schema"}
    assert not [key for key in fields if keyword.iskeyword(key)], "a class cannot have this field"
    lines = [f"\nclass {name}Fields(TypedDict, total=False):", f'    """{_title(table, name)}"""\n']
    for key, value in fields.items():
        lines.append(f"    {key}: {'Any' if key in _ANY else _type(value)}")
    return "\n".join([*lines, ""])


def _title(table: Mapping[str, Any], name: str) -> str:
    return str(table.get("description", f"{name}.")).partition("\n")[0]


def _type(value: Mapping[str, Any]) -> str:
    return " | ".join(sorted(dict.fromkeys(_types(value)), key="None".__eq__))  # None last


def _types(value: Mapping[str, Any]) -> Iterator[str]:
    """The types of a value; a reference may be the callable itself in Python."""
    if "$ref" in value:
        yield f"{value['$ref'].rpartition('/')[2]}Fields"
    elif choices := value.get("anyOf") or value.get("oneOf"):
        for choice in choices:
            yield from _types(choice)
    elif "import reference" in value.get("description", ""):
        yield from ("str", "Callable[..., Any]")
    elif "const" in value or "enum" in value:
        yield f"Literal[{', '.join(map(repr, value.get('enum', [value.get('const')])))}]"
    elif value.get("type") == "array":
        yield f"Sequence[{_type(value.get('items', {}))}]"
    elif value.get("type") == "object":
        of = value.get("additionalProperties")
        yield f"Mapping[str, {_type(of) if isinstance(of, dict) else 'Any'}]"
    else:
        named = value.get("type", [])
        names = [named] if isinstance(named, str) else named
        yield from [_SIMPLE.get(each, "Any") for each in names] or ["Any"]


if __name__ == "__main__":
    TARGET.write_text(source(), encoding="utf-8")
