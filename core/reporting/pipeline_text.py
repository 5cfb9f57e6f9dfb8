"""The stages of a plan as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotrain.core.reporting.tables import size

_MILLI = 1e3


def rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What each stage has and does, when it computes and waits, and what would be better."""
    stages = found["stages"]
    line = f"{found['seconds'] * _MILLI:.3g} ms a step, of which stages wait {found['bubble']:.0%}"
    return [
        *(_row(number, stage) for number, stage in enumerate(stages, 1)),
        (
            "passes",
            f"{line}; digits: forward, letters: backward, of micro-batches 0 = a, 1 = b, ...",
        ),
        *((f"stage {number}", line) for number, line in enumerate(found["drawing"], 1)),
        ("balanced", _proposal(found["balanced"])),
        (
            "best",
            f"{_proposal(found['best'])} (of all ways to cut and replicate, for as many processes)",
        ),
    ]


def _row(number: int, stage: Mapping[str, Any]) -> tuple[str, str]:
    layers = stage["layers"]
    shown = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)})"
    sent = f", sends {size(stage['sent_bytes'])}" if stage["sent_bytes"] else ""
    return (
        f"stage {number}",
        f"{shown}: forward {stage['forward'] * _MILLI:.3g} ms, backward"
        f" {stage['backward'] * _MILLI:.3g} ms a micro-batch{sent}; memory: weights"
        f" {size(stage['weight_bytes'])}, gradients {size(stage['weight_bytes'])}, slots"
        f" {size(stage['slot_bytes'])}, activations {size(stage['activation_bytes'])}",
    )


def _proposal(found: Mapping[str, Any]) -> str:
    cut = f"cut at {', '.join(found['first'])}" if found["first"] else "no cut"
    over = ", ".join(map(str, found["workers"]))
    each = "processes of each stage" if found["first"] else "processes"
    return f"{cut}; {each}: {over}; {found['seconds'] * _MILLI:.3g} ms a micro-batch"
