"""Causes of other gradients, after a forward pass that is alike: their exchange, scale, clipping, order."""

from __future__ import annotations

import math

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.parity.records import Cause
from isotrain.analysis.parity.tensor_sketch import Fingerprint
from isotrain.analysis.program_trace.case import Case
from isotrain.analysis.program_trace.causes.evidence import (
    FITS,
    backward_passes,
    both,
    combined,
    listed,
    parting_names,
    ratio_of,
)

_STATEFUL = "powerSGD"
"""Part of the names of PyTorch's communication hooks whose state changes the gradients of later steps."""

_LOSS_SCALE = 2.0**7
"""A power of two from here on is taken for a loss scale."""


def not_exchanged(case: Case) -> Cause | None:
    """Processes have gradients of their own."""
    first, *others = (rank.gradient for rank in case.run_step.ranks)
    parting = {name for other in others for name in parting_names(first, other)}
    if not parting:
        return None
    every = parting >= {n for n, t in first.items() if t.norm}
    what = "gradients" if every else f"the gradients of {listed(parting)}"
    return Cause(
        "not-exchanged",
        f"{what} are not exchanged",
        [f"the optimizers of the processes get different gradients of {listed(parting)}"],
        "let the reduction cover every parameter, also of modules outside of the wrapper.",
    )


def clipping(case: Case) -> Cause | None:
    """Gradients are clipped otherwise, at another time, or in one program alone."""
    ours, theirs = ([r.of_kind("clip") for r in step.ranks] for step in both(case))
    clips, others = ours[0], theirs[0]
    if not clips and not others:
        return None
    if bool(clips) != bool(others):
        who = "the reference" if clips else "the run"
        return Cause(
            "clipping-differs",
            "only one of the programs clips gradients",
            [f"{who} clips in step {case.first.step}"],
            "clip in both, to the same norm.",
        )
    norms = [rank[-1]["norm"] for rank in theirs if rank]
    of_reference = [rank[-1]["norm"] for rank in ours if rank]
    if max(norms) > (1 + FITS) * min(norms) and max(of_reference) < (1 + FITS) * min(of_reference):
        shown = ", ".join(f"{norm:.4g}" for norm in norms)
        return Cause(
            "clipping-before-reduction",
            "each process clips before gradients are reduced",
            [
                f"norms before clipping are {shown} on the processes; after a reduction they are equal"
            ],
            "reduce first, then clip.",
        )
    if norms[0] > _LOSS_SCALE * of_reference[0]:
        return Cause(
            "clipped-while-scaled",
            "gradients are clipped while they are multiplied by the loss scale",
            [
                f"the norm before clipping is {norms[0]:.4g}, and {of_reference[0]:.4g} in the reference"
            ],
            "call `scaler.unscale_(optimizer)` before clipping.",
        )
    if clips[-1]["limit"] != others[-1]["limit"]:
        return Cause(
            "clipping-differs",
            "gradients are clipped to another norm",
            [f"the limit is {others[-1]['limit']:g}, and {clips[-1]['limit']:g} in the reference"],
            "clip to the same norm.",
        )
    return None


def scaled(case: Case) -> Cause | None:
    """Gradients are those of the reference times a factor."""
    ratio, left = ratio_of(case.reference_step.first.gradient, case.run_step.first.gradient)
    if left > FITS or abs(ratio - 1) < FITS:
        return None
    processes = case.run.processes / case.reference.processes
    passes = backward_passes(case.run_step) / max(1, backward_passes(case.reference_step))
    evidence = [f"gradients are {ratio:.6g} times those of the reference, in all tensors alike"]
    for code, factor, title, advice in (
        (
            "sum-instead-of-mean",
            processes,
            "gradients are summed over the processes, not averaged",
            f"divide by the {case.run.processes} processes, once.",
        ),
        (
            "accumulation-not-divided",
            passes,
            "gradients of micro-batches are summed, not averaged",
            "divide the loss of a micro-batch by the number of micro-batches.",
        ),
        (
            "divided-twice",
            1 / processes,
            "gradients are divided by the number of processes twice",
            "divide once: in the loss or in the reduction.",
        ),
        (
            "accumulation-divided-twice",
            1 / passes,
            "gradients of micro-batches are divided by their number twice",
            "divide once.",
        ),
    ):
        if abs(factor - 1) > FITS and abs(ratio / factor - 1) < FITS:
            return Cause(code, title, evidence, advice)
    if ratio >= _LOSS_SCALE and abs(ratio / 2.0 ** round(math.log2(ratio)) - 1) < 1e-4:
        return Cause(
            "loss-scale",
            "gradients are multiplied by a loss scale",
            evidence,
            "let the scaler take the step, or unscale before it.",
        )
    return Cause(
        "gradients-scaled",
        f"gradients are multiplied by {ratio:.4g}",
        evidence,
        "look for a factor in the loss: a sum in place of a mean, a weight, a division.",
    )


def one_backward(case: Case) -> Cause | None:
    """Several optimizers that step with gradients of one backward pass, in one program alone."""
    passes = [backward_passes(step) for step in both(case)]
    if all(passes) or not any(passes):
        return None
    side = passes.index(0)
    if not any(backward_passes(pair[side]) for pair in case.steps):
        return None  # backward passes are not recorded
    return Cause(
        "one-backward-for-several",
        "one program computes the gradients of several optimizers before the first of them steps",
        [
            f"in {('the reference', 'it')[side]}, there is no backward pass between step {case.first.step} of"
            f" optimizer {case.first.optimizer} and the step of the optimizer before it"
        ],
        "compute the gradients of each with the weights that the one before left, as a spec's updates do; or"
        " give the spec one optimizer, with `groups`.",
    )


def other_turns(case: Case) -> Cause | None:
    """Several optimizers that step in another order."""
    turns = [(one.optimizer, one.index) for one, _ in case.steps]
    compared = set(turns)
    reference = [(step.optimizer, step.index) for step in case.reference.steps]
    of_reference = [turn for turn in reference if turn in compared]
    if turns[: case.index + 1] == of_reference[: case.index + 1]:
        return None
    ours, theirs = (
        ", ".join(str(optimizer) for optimizer, _ in each[: case.index + 2])
        for each in (of_reference, turns)
    )
    return Cause(
        "optimizers-in-another-order",
        "the optimizers take turns in another order",
        [f"optimizers step in the order {theirs}, and in the reference {ours}"],
        "let them step in one order; a spec's updates are done in the order in which it lists them.",
    )


def accumulated(case: Case) -> Cause | None:
    """Gradients have those of the step before in them."""
    before = [b for _, b in case.steps[: case.index] if b.optimizer == case.first.optimizer]
    if not before:
        return None
    summed = combined([1.0, 1.0], case.reference_step.first.gradient, before[-1].first.gradient)
    ratio, left = ratio_of(summed, case.run_step.first.gradient)
    if left > FITS or abs(ratio - 1) > FITS:
        return None
    return Cause(
        "gradients-not-zeroed",
        "gradients of earlier steps are still there",
        ["gradients are the reference's plus those of the step before"],
        "call `optimizer.zero_grad()` in each step.",
    )


def communication_state_lost(case: Case) -> Cause | None:
    """A resumed run lacks the state of its communication hook."""
    hook = case.run_step.first.comm_hook
    if not case.offset or case.index or _STATEFUL not in hook:
        return None
    return Cause(
        "communication-state-lost",
        "the run goes on without the state of its communication hook",
        [
            f"its first weights are those after step {case.offset - 1} of the reference",
            f"`{hook}` has the errors and matrices of the steps before in its state",
        ],
        "save the hook's state with the weights, and register the hook with it.",
    )


def untied(case: Case) -> Cause | None:
    """Weights that the reference shares are apart."""
    start, reference = case.run.steps[0].first, case.reference_step.first
    pairs = [
        (name, shared)
        for name in sorted(set(case.run_step.first.weight) - set(reference.weight))
        for shared in sorted(set(reference.weight) & set(start.initial) & set(case.names))
        if name in start.initial and _is_copy(start.initial[name], start.initial[shared])
    ]
    if not pairs:
        return None
    return Cause(
        "weights-untied",
        "weights that the reference shares are apart",
        [
            f"{name} starts as a copy of {shared}, and the reference has {shared} alone"
            for name, shared in pairs[:3]
        ],
        "tie the weights again after they are loaded, moved or sharded: each gets its own gradient now.",
    )


def _is_copy(one: Fingerprint, other: Fingerprint) -> bool:
    """Whether two tensors are equal, and not by chance as the ones of two norm layers are."""
    return len(set(one.sample)) > 1 and not tensor_sketch.difference(one, other)
