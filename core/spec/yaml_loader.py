"""Safe YAML loader for specs: scalars of YAML 1.2, no duplicate keys, bounded size."""

from __future__ import annotations

import re
from typing import Any

import yaml


class TextError(Exception):
    """Text that is not YAML.

    Attributes:
        line: Line of the error, from 1.
        column: Column of the error, from 1.
        reason: Reason, without the position.
    """

    def __init__(self, line: int, column: int, reason: object) -> None:
        super().__init__(f"line {line}, column {column}: {reason}")
        self.line = line
        self.column = column
        self.reason = reason


def load(text: str) -> Any:
    """Value of one YAML document; None for an empty one.

    Raises:
        TextError: The text is not YAML.
    """
    try:
        return _construct(_Loader(text))
    except RecursionError:
        raise TextError(1, 1, "it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        assert mark is not None, "a marked error of this library says where it is"
        reason = error.problem or error.context
        raise TextError(mark.line + 1, mark.column + 1, reason) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        column = len(before) - (before.rfind("\n") + 1) + 1
        raise TextError(before.count("\n") + 1, column, error.reason) from None


_MAX_VALUES = 100_000
"""Largest number of values in a document, aliases expanded: a few lines can stand for billions."""
_MAX_DIGITS = 1000


def _construct(loader: _Loader) -> Any:
    """Value of a document, whose aliases are checked first.

    Raises:
        yaml.MarkedYAMLError: The text is not YAML, contains itself, or has too many values.
    """
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count_values(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count_values(node: Any, counts: dict[int, int]) -> int:
    """Number of values in a node, aliases expanded; `counts` has 0 for a node that is being counted."""
    if (count := counts.get(id(node))) is not None:
        if count:
            return count
        text = "a YAML alias refers to a value that contains it"
        raise yaml.composer.ComposerError(None, None, text, node.start_mark)
    counts[id(node)] = 0
    parts = node.value if isinstance(node, yaml.CollectionNode) else ()
    inner = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
    total = 1 + sum(_count_values(each, counts) for each in inner)
    if total > _MAX_VALUES:
        text = f"with its aliases it stands for more than {_MAX_VALUES:,} values"
        raise yaml.composer.ComposerError(None, None, text, node.start_mark)
    counts[id(node)] = total
    return total


_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """Safe loader with the scalars of YAML 1.2 (1e-3 is a number, `on` is text) and no duplicate keys."""

    yaml_implicit_resolvers = {}

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                text = f"the key {key.value!r} is given twice"
                raise yaml.composer.ComposerError(None, None, text, key.start_mark)
            seen.add(key.value)
        return node


def _int_of(loader: Any, node: Any) -> int:
    text = loader.construct_scalar(node)
    if len(text) > _MAX_DIGITS:
        reason = f"a whole number of {len(text):,} digits"
        raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _float_of(loader: Any, node: Any) -> float:
    return float(
        loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan")
    )


for _kind, _pattern, _starts in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", re.compile(r"^<<$"), ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, _starts)
_Loader.add_constructor("tag:yaml.org,2002:int", _int_of)
_Loader.add_constructor("tag:yaml.org,2002:float", _float_of)
