"""Causes of other initial weights and options of optimizers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from isotrain.analysis.parity.records import Cause
from isotrain.analysis.program_trace.case import Case
from isotrain.analysis.program_trace.causes.evidence import listed, parting_names
from isotrain.analysis.program_trace.reading import GlobalStep


def weights_not_broadcast(case: Case) -> Cause | None:
    """Processes start with weights of their own."""
    first, *others = (rank.initial for rank in case.run_step.ranks)
    parting = {name for other in others for name in parting_names(first, other)}
    if not parting:
        return None
    return Cause(
        "weights-not-broadcast",
        "processes start with different weights",
        [f"{len(parting)} initial weights differ between the processes: {listed(parting)}"],
        "broadcast the weights of rank 0 before the first step, or seed every process alike.",
    )


def other_options(case: Case) -> Cause | None:
    """The optimizer has another option, such as a learning rate."""
    option = case.first.name.rpartition("/")[2]
    pairs = {
        name: (_options_of(case.reference_step, name)[option], options[option])
        for name, options in case.run_step.first.options.items()
        if f"{name}/{option}" in case.names
    }
    values = sorted({(str(a), str(b)) for a, b in pairs.values()})
    evidence = [
        f"{option} is {b}, and {a} in the reference, for"
        f" {listed([name for name, pair in pairs.items() if tuple(map(str, pair)) == (a, b)])}"
        for a, b in values[:3]
    ]
    if option == "lr":
        return _rate(case, evidence)
    return Cause(
        "optimizer-options",
        f"the optimizers' {option} differs",
        evidence,
        "compare the options of the optimizers and their parameter groups.",
    )


def _rate(case: Case, evidence: list[str]) -> Cause:
    name = case.first.name.rpartition("/")[0]
    rate = case.run_step.first.options[name]["lr"]
    ahead = [
        step.index
        for step in case.reference.steps
        if step.optimizer == case.first.optimizer
        and math.isclose(_options_of(step, name).get("lr", math.nan), rate, rel_tol=1e-6)
    ]
    step = case.reference_step.index
    ends = [index for index in ahead if index > step and index == step * case.run.processes]
    if ends and case.run.processes > 1:
        evidence.append(
            f"the rate of step {step} is that of step {ends[0]} of the reference: it moves"
            f" {case.run.processes} times as fast, once for each process"
        )
        return Cause(
            "schedule-per-process",
            "the learning rate schedule moves once for each process",
            evidence,
            "step the schedule once per step of the optimizer, or count its steps in global steps.",
        )
    return Cause(
        "learning-rate",
        "learning rates differ",
        evidence,
        "compare the rates, their schedule and warm-up, and how they scale with the batch.",
    )


def _options_of(step: GlobalStep, name: str) -> Mapping[str, Any]:
    """Options of a parameter; those of the first one if the step has none of that name."""
    by_name = step.first.options
    return by_name.get(name) or next(iter(by_name.values()))
