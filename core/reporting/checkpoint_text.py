"""What `isotrain checkpoint` found, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotrain.core.reporting.tables import facts, number, paragraph, size, table, text_of


def contents(found: Mapping[str, Any]) -> str:
    """What is in a checkpoint."""
    rows = [("checkpoint", found["location"])]
    rows += [
        (name, text_of(found[name]))
        for name in ("step", "backend", "replicas", "strategy", "versions")
        if found[name]
    ]
    tensors = [
        (section["name"], tensor["name"], *_kind(tensor["shape"], tensor["dtype"]), tensor)
        for section in found["sections"]
        for tensor in section["tensors"]
    ]
    rows.append(("tensors", f"{len(tensors)}, {size(found['bytes'])}"))
    cells = [(*row, size(tensor["bytes"]), str(tensor["parts"])) for *row, tensor in tensors]
    columns = ("section", "tensor", "shape", "dtype", "size", "parts")
    return "\n".join([facts(None, rows), table(columns, cells)])


def differences(found: Mapping[str, Any]) -> str:
    """In what two checkpoints differ."""
    names = [each["location"] for each in found["checkpoints"]]
    rows = [(f"{place}", name) for place, name in zip(("one", "other"), names, strict=True)]
    differing = found["tensors"]
    rows.append(("in both", f"{found['compared']} tensors, {len(differing)} of which differ"))
    parts = [facts(None, rows)]
    if differing:
        columns = ("section", "tensor", "numbers", "that differ", "by at most", "relative")
        parts.append(table(columns, [_difference(each) for each in differing]))
    for end, name in (("only_in_one", "only in one"), ("only_in_other", "only in other")):
        if found[end]:
            parts.append(facts(name, [("-", each) for each in found[end]]))
    return "\n".join(parts)


def _difference(each: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = [
        " of ".join(reversed(_kind(shape, dtype)))
        for shape, dtype in zip(each["shapes"], each["dtypes"], strict=True)
    ]
    if each["numbers"] is None:
        return each["section"], each["name"], " and ".join(kinds), "-", "-", "-"
    count = number(each["differing"])
    if kinds[0] != kinds[1]:
        count += f" ({each['dtypes'][0]} and {each['dtypes'][1]})"
    relative = "-" if each["relative"] is None else f"{each['relative']:.3g}"
    largest = f"{each['largest']:.3g}"
    return each["section"], each["name"], number(each["numbers"]), count, largest, relative


def _kind(shape: Any, dtype: str) -> tuple[str, str]:
    return "x".join(map(str, shape)) or "a number", dtype


def verified(found: Mapping[str, Any]) -> str:
    """Which checkpoints are sound, one a line."""
    return "".join(
        paragraph(f"{each['location']}: sound" if each["sound"] else f"damaged: {each['fault']}")
        for each in found["checkpoints"]
    )


def pruned(found: Mapping[str, Any]) -> str:
    """What was removed and what is left."""
    return facts(
        None,
        [
            ("folder", found["folder"]),
            ("removed", f"steps {text_of(found['removed'])}" if found["removed"] else "nothing"),
            ("left", f"steps {text_of(found['kept'])}"),
        ],
    )
