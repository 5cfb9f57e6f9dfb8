"""Text of `isotrain checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.core.quantities import counted
from isotrain.core.reporting.tables import facts, number, paragraph, size, table, text_of


def contents(report: Mapping[str, Any]) -> str:
    """The contents of a checkpoint: facts, and a table of tensors."""
    rows = [("checkpoint", report["location"])]
    rows += [
        (name, text_of(report[name]))
        for name in ("step", "backend", "replicas", "strategy", "versions")
        if report[name]
    ]
    tensors = [
        (section["name"], tensor["name"], _shape(tensor["shape"]), tensor["dtype"], tensor)
        for section in report["sections"]
        for tensor in section["tensors"]
    ]
    rows.append(("tensors", f"{len(tensors)}, {size(report['bytes'])}"))
    cells = [(*row, size(tensor["bytes"]), str(tensor["parts"])) for *row, tensor in tensors]
    columns = ("section", "tensor", "shape", "dtype", "size", "parts")
    return "\n".join([facts(None, rows), table(columns, cells)])


def differences(report: Mapping[str, Any]) -> str:
    """The differences between two checkpoints: facts, and a table of differing tensors."""
    locations = [each["location"] for each in report["checkpoints"]]
    rows = list(zip(("one", "other"), locations, strict=True))
    differing = report["tensors"]
    rows.append(
        ("in both", f"{counted(report['compared'], 'tensor')}; that differ: {len(differing)}")
    )
    parts = [facts(None, rows)]
    if differing:
        columns = ("section", "tensor", "numbers", "that differ", "by at most", "relative")
        parts.append(table(columns, [_difference(each) for each in differing]))
    for key, heading in (("only_in_one", "only in one"), ("only_in_other", "only in other")):
        if report[key]:
            parts.append(facts(heading, [("-", name) for name in report[key]]))
    return "\n".join(parts)


def _difference(tensor: Mapping[str, Any]) -> tuple[str, ...]:
    types = [
        f"{dtype} of {_shape(shape)}"
        for shape, dtype in zip(tensor["shapes"], tensor["dtypes"], strict=True)
    ]
    if tensor["numbers"] is None:
        return tensor["section"], tensor["name"], " and ".join(types), "-", "-", "-"
    count = number(tensor["differing"])
    if types[0] != types[1]:
        count += f" ({tensor['dtypes'][0]} and {tensor['dtypes'][1]})"
    relative = "-" if tensor["relative"] is None else f"{tensor['relative']:.3g}"
    largest = f"{tensor['largest']:.3g}"
    return tensor["section"], tensor["name"], number(tensor["numbers"]), count, largest, relative


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def verified(report: Mapping[str, Any]) -> str:
    """Text of a verification: whether each checkpoint is sound, one per line."""
    return "".join(
        paragraph(f"{each['location']}: sound" if each["sound"] else f"damaged: {each['fault']}")
        for each in report["checkpoints"]
    )


def pruned(report: Mapping[str, Any]) -> str:
    """The steps whose checkpoints were removed, and those that are left."""
    removed = f"steps {text_of(report['removed'])}" if report["removed"] else "nothing"
    return facts(
        None,
        [
            ("folder", report["folder"]),
            ("removed", removed),
            ("left", f"steps {text_of(report['kept'])}"),
        ],
    )
