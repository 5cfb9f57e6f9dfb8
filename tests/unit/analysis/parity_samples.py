"""A parity check with made-up figures: one run agrees with nothing, and one failed."""

from __future__ import annotations

from isotrain.analysis.parity.records import NoiseRecord, RunRecord, StepRecord
from isotrain.analysis.parity.result import Parity


def small_parity() -> Parity:
    steps = [StepRecord(0, 8, 1.0, None, 1e-6, 2.0)]
    others = [StepRecord(0, 8, 1.5, 0.3, 1e-6, 2.0, {"weight": 0.5}, {"weight": 9.0})]
    runs = [
        RunRecord("a@1", "a", 1, "data-parallel", "reference", "", steps=steps),
        RunRecord("b@1", "b", 1, "data-parallel", "difference", "it <parts>", steps=others),
        RunRecord("c@1", "c", 1, "data-parallel", "failed", "process 0 died"),
    ]
    noise = [NoiseRecord("other precision", "float64", failed="no such thing")]
    return Parity(
        "unit", "difference", "b@1 does not", {}, "a@1", 0.0, [0], noise, runs, {}, {"python": "3"}
    )
