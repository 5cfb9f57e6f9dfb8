"""Causes in the forward pass and the loss: mode, targets, random numbers, batch statistics, precision."""

from __future__ import annotations

from isotrain.analysis.parity.records import Cause
from isotrain.analysis.program_trace.case import Case
from isotrain.analysis.program_trace.causes.evidence import both


def evaluation_mode(case: Case) -> Cause | None:
    """A model trains in evaluation mode."""
    modes = [{e["training"] for e in step.first.passes()} for step in both(case)]
    if modes[0] == modes[1] or not all(modes):
        return None
    side = "it" if False in modes[1] else "the reference"
    return Cause(
        "evaluation-mode",
        "a model trains in evaluation mode",
        [f"in step {case.first.step}, {side} computes gradients in evaluation mode"],
        "call `model.train()` before the step, as after an evaluation.",
    )


def other_targets(case: Case) -> Cause | None:
    """The loss is over other targets, or over unequal numbers that count alike."""
    ours, theirs = (
        [event for rank in step.ranks for event in rank.of_kind("loss")] for step in both(case)
    )
    if not ours or not theirs:
        return None
    counts, of_reference = ([e["targets"] for e in events] for events in (theirs, ours))
    if sum(counts) != sum(of_reference):
        return Cause(
            "ignored-targets-counted",
            "the loss is taken over another number of targets",
            [
                f"{sum(counts)} targets count in step {case.first.step}, and {sum(of_reference)} in the"
                " reference"
            ],
            "mask padding in both programs, as by `ignore_index`.",
        )
    if {e["reduction"] for e in ours} != {e["reduction"] for e in theirs}:
        return None
    if (
        len(set(counts)) > 1
        and theirs[0]["reduction"] == "mean"
        and len(counts) > len(of_reference)
    ):
        shown = ", ".join(map(str, counts))
        return Cause(
            "mean-of-means",
            "means over unequal numbers of targets are averaged",
            [
                f"the losses of step {case.first.step} are means over {shown} targets, which count alike"
            ],
            "divide the sum of the losses by the number of targets of the global batch.",
        )
    return None


def host_random_numbers(case: Case) -> Cause | None:
    """A forward pass draws from NumPy or Python, in another state."""
    drawn = [
        [event.get("host_random", {}) for rank in step.ranks for event in rank.passes()]
        for step in both(case)
    ]
    names = {name for states in drawn for by_name in states for name in by_name}
    if not names or len(drawn[0]) != len(drawn[1]) or drawn[0] == drawn[1]:
        return None
    named = " and ".join(f"`{name}`" for name in sorted(names))
    return Cause(
        "host-random-numbers",
        f"the model draws other numbers from {named}",
        [f"the state of {named} moves in forward passes, and is another one than in the reference"],
        "seed it alike in both programs, or draw from the framework's generator.",
    )


def random_layers(case: Case) -> Cause | None:
    """Random layers draw in another state of the generator, or alike on all processes."""
    passes = [rank.passes()[0] for rank in case.run_step.ranks if rank.passes()]
    if not passes or not all(event["dropout"] and event["training"] for event in passes):
        return None
    states = {str(event["random"]) for event in passes}
    of_reference = {
        str(rank.passes()[0]["random"]) for rank in case.reference_step.ranks if rank.passes()
    }
    if len(passes) > 1 and len(states) == 1 and len(of_reference) > 1:
        return Cause(
            "same-random-numbers-on-every-rank",
            "random layers draw the same numbers in every process",
            [f"all {len(passes)} processes have the same state of the random generator"],
            "add the rank to the seed once the weights are made.",
        )
    if states == of_reference:
        return None
    return Cause(
        "random-layers",
        "random layers draw other numbers",
        [
            "the model has dropout, and the random generator is in another state than in the reference"
        ],
        "seed alike; over another number of processes, dropout draws other numbers anyway.",
    )


def batch_statistics(case: Case) -> Cause | None:
    """Batch normalisation is over other numbers of samples."""
    sizes = [
        sorted(len(e["rows"]) for rank in step.ranks for e in rank.passes() if e["batch_norm"])
        for step in both(case)
    ]
    if sizes[0] == sizes[1] or not all(sizes):
        return None
    return Cause(
        "batch-statistics",
        "batch normalisation is over other batches",
        [f"its passes have {sizes[1]} samples, and {sizes[0]} in the reference"],
        "use synchronised batch normalisation, or a normalisation that does not depend on the batch.",
    )


def other_precision(case: Case) -> Cause | None:
    """One program trains under autocast."""
    modes = [{e["autocast"] for e in step.first.passes()} for step in both(case)]
    if modes[0] == modes[1]:
        return None
    side = "it" if True in modes[1] else "the reference"
    return Cause(
        "precision",
        "the programs compute in different precisions",
        [f"{side} trains under autocast"],
        "compare in one precision first.",
    )
