"""Text of the pipeline stages of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotrain.core.reporting.tables import size

_MILLI = 1e3


def rows(pipeline: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows (name, text) of a plan: its stages, their timeline, and better partitions."""
    stages = pipeline["stages"]
    passes = f"{pipeline['seconds'] * _MILLI:.3g} ms a step, of which stages wait {pipeline['bubble']:.0%}"
    return [
        *(_row(number, stage) for number, stage in enumerate(stages, 1)),
        (
            "passes",
            f"{passes}; digits: forward, letters: backward, of micro-batches 0 = a, 1 = b, ...",
        ),
        *((f"stage {number}", line) for number, line in enumerate(pipeline["drawing"], 1)),
        ("balanced", _proposal(pipeline["balanced"])),
        (
            "best",
            f"{_proposal(pipeline['best'])} (of all ways to cut and replicate, for as many processes)",
        ),
    ]


def _row(number: int, stage: Mapping[str, Any]) -> tuple[str, str]:
    layers = stage["layers"]
    names = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)})"
    sent = f", sends {size(stage['sent_bytes'])}" if stage["sent_bytes"] else ""
    return (
        f"stage {number}",
        f"{names}: forward {stage['forward'] * _MILLI:.3g} ms, backward"
        f" {stage['backward'] * _MILLI:.3g} ms a micro-batch{sent}; memory: weights"
        f" {size(stage['weight_bytes'])}, gradients {size(stage['weight_bytes'])}, slots"
        f" {size(stage['slot_bytes'])}, activations {size(stage['activation_bytes'])}",
    )


def _proposal(proposal: Mapping[str, Any]) -> str:
    cut = f"cut at {', '.join(proposal['first'])}" if proposal["first"] else "no cut"
    counts = ", ".join(map(str, proposal["workers"]))
    label = "processes of each stage" if proposal["first"] else "processes"
    return f"{cut}; {label}: {counts}; {proposal['seconds'] * _MILLI:.3g} ms a micro-batch"
