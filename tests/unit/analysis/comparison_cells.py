"""Cells of a comparison with runs that are made up."""

from __future__ import annotations

from typing import Any

import numpy as np

from isotrain.analysis.compare.records import (
    Cell,
    Repeat,
)
from isotrain.analysis.compare.result import Comparison
from isotrain.analysis.compare.summary import summarize
from isotrain.analysis.compare.verdict import decide


def repeat(rate_: float, order: int = 0, blocks: int = 8, spread: float = 0.01) -> Repeat:
    """A run of 10 steps of 10 samples a block, at about so many samples per second."""
    noise = np.random.default_rng(order).normal(1, spread, blocks)
    return Repeat(
        order=order,
        started=0.0,
        block_steps=10,
        block_seconds=list(100 / rate_ * noise),
        warm_up_steps=5,
        compile_s=1.0,
        first_step_s=4.0,
        peak_memory_bytes=[100, 200],
        cpu_s=8.0,
        all_reduce_s=0.5,
        block_samples=[100] * blocks,
        run_s=10.0,
    )


def cell(name: str, *rates: float, **fields: Any) -> Cell:
    """A finished cell with a run for each rate; a pending one without."""
    backend, _, replicas = name.partition("@")
    runs = [repeat(value, order) for order, value in enumerate(rates)]
    given: dict[str, Any] = {
        "name": name,
        "backend": backend,
        "collective": "none",
        "replicas": int(replicas),
        "strategy": "data-parallel",
        "status": "finished" if rates else "skipped",
        "repeats": runs,
        "losses": [1.0, 0.5],
        "plan": {"replicas": int(replicas), "gradient_bytes": 1000},
    }
    return Cell(**{**given, **fields})


def comparison(*cells: Cell, **fields: Any) -> Comparison:
    found = summarize(cells, cells[0].name, 0)
    given: dict[str, Any] = {
        "name": "n",
        "spec": {"seed": 0},
        "reference": cells[0].name,
        "created": 1.0,
        "finished": True,
        "machine": {"cores": 2},
        "settings": {"steps": 20, "repeats": 3},
        "cells": found,
        "verdict": decide(found),
    }
    return Comparison(**{**given, **fields})
