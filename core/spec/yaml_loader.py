"""YAML as specs use it: safe, with the scalars of YAML 1.2, no key twice."""

from __future__ import annotations

import re
from typing import Any

import yaml


class TextError(Exception):
    """Text that is not YAML.

    Attributes:
        line: Where, from 1.
        column: Where, from 1.
        reason: Why.
    """

    def __init__(self, line: int, column: int, reason: object) -> None:
        super().__init__(f"line {line}, column {column}: {reason}")
        self.line = line
        self.column = column
        self.reason = reason


def load(text: str) -> Any:
    """Reads one document.

    Raises:
        TextError: Says where and why it is not YAML.
    """
    try:
        return _constructed(_Loader(text))
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


_MOST_VALUES = 100_000
"""Of a document, each alias counted as all that it stands for: a few lines can stand for billions."""
_MOST_DIGITS = 1000


def _constructed(loader: _Loader) -> Any:
    """The one document's value; its aliases are looked at first.

    Raises:
        yaml.MarkedYAMLError: It is not YAML, contains itself, or stands for too many values.
    """
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count_values(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count_values(node: Any, known: dict[int, int]) -> int:
    """How many values a node stands for.

    Args:
        node: A node of the document.
        known: The counts of nodes by identity; 0 while one is being counted.
    """
    if (found := known.get(id(node))) is not None:
        if found:
            return found
        text = "a YAML alias refers to a value that contains it"
        raise yaml.composer.ComposerError(None, None, text, node.start_mark)
    known[id(node)] = 0
    parts = node.value if isinstance(node, yaml.CollectionNode) else ()
    inner = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
    total = 1 + sum(_count_values(each, known) for each in inner)
    if total > _MOST_VALUES:
        text = f"with its aliases it stands for more than {_MOST_VALUES:,} values"
        raise yaml.composer.ComposerError(None, None, text, node.start_mark)
    known[id(node)] = total
    return total


_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2 (1e-3 is a number, `on` is text), no key twice."""

    yaml_implicit_resolvers = {}

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                twice = f"the key {key.value!r} is given twice"
                raise yaml.composer.ComposerError(None, None, twice, key.start_mark)
            seen.add(key.value)
        return node


def _int_of(loader: Any, node: Any) -> int:
    text = loader.construct_scalar(node)
    if len(text) > _MOST_DIGITS:
        told = f"a whole number of {len(text):,} digits"
        raise yaml.constructor.ConstructorError(None, None, told, node.start_mark)
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
