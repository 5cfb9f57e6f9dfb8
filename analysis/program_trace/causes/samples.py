"""Causes of other samples in a step, or in evaluations."""

from __future__ import annotations

import itertools
from collections import Counter

from isotrain.analysis.parity.records import Cause
from isotrain.analysis.program_trace.case import Case
from isotrain.analysis.program_trace.reading import GlobalStep
from isotrain.core.quantities import counted


def same_samples_on_every_rank(case: Case) -> Cause | None:
    """All processes train on the same samples."""
    ranks = _rows_by_rank(case.run_step)
    if len(ranks) < 2 or any(rows != ranks[0] for rows in ranks):
        return None
    return Cause(
        "same-samples-on-every-rank",
        "every process trains on the same samples",
        [
            f"in step {case.first.step}, all {len(ranks)} processes have the same {len(ranks[0])} samples"
        ],
        "give each process its part: a DistributedSampler, or another shard or seed of the stream.",
    )


def epoch_order_repeats(case: Case) -> Cause | None:
    """Samples come in the order of an earlier epoch."""
    rows = case.run_step.rows()
    same = [run.index for _, run in case.steps[: case.index] if run.rows() == rows]
    if not same:
        return None
    return Cause(
        "order-repeats",
        "the order of the samples repeats that of an earlier epoch",
        [f"step {case.first.step} has the samples of step {same[0]}; the reference has others"],
        "call `sampler.set_epoch(epoch)` at the start of each epoch.",
    )


def samples_repeated(case: Case) -> Cause | None:
    """A step has samples more than once."""
    rows, reference = case.run_step.rows(), case.reference_step.rows()
    before = sum((run.rows() for _, run in case.steps[: case.index]), rows & reference)
    repeated = rows - reference
    if reference - rows or any(row not in before for row in repeated):
        return None
    return Cause(
        "samples-repeated",
        "samples are repeated",
        [
            f"step {case.first.step} has {counted(repeated.total(), 'sample')} more than the reference, seen"
            " in the run before"
        ],
        "a sampler fills up uneven shares: weigh the repeated samples by 0, or let shares be uneven.",
    )


def samples_missing(case: Case) -> Cause | None:
    """A step lacks samples."""
    rows, reference = case.run_step.rows(), case.reference_step.rows()
    missing = (reference - rows).total()
    if rows - reference or not missing:
        return None
    return Cause(
        "samples-dropped",
        "samples are dropped",
        [f"missing in step {case.first.step}: {missing} of {counted(reference.total(), 'sample')}"],
        "look for `drop_last`, and for shares that are cut to one length.",
    )


def resumed_elsewhere(case: Case) -> Cause | None:
    """A run that goes on from a checkpoint has samples of another step."""
    if not case.offset:
        return None
    rows = case.run_step.rows()
    same = [step.index for step in case.reference.steps if step.rows() == rows]
    where = f"; it has those of step {same[0]}" if same else ""
    return Cause(
        "other-samples-after-resume",
        "the run goes on with other samples",
        [
            f"its weights are those after step {case.offset - 1} of the reference, its samples are not those"
            f" of step {case.offset + case.first.step}{where}"
        ],
        "save and restore the position in the epoch, and the state of the shuffle.",
    )


def other_samples(case: Case) -> Cause | None:
    """Inputs that the reference has not, or another order."""
    rows, reference = case.run_step.rows(), case.reference_step.rows()
    common = (rows & reference).total()
    everything = sum((step.rows() for step in case.reference.steps), Counter[int]())
    if not rows & everything:
        return Cause(
            "other-inputs",
            "the models get other inputs",
            ["not one sample of the step is among those of the reference, byte by byte"],
            "compare preprocessing and augmentation, their seeds, and dtypes.",
        )
    return Cause(
        "other-order",
        "the samples come in another order",
        [f"{common} of {reference.total()} samples of step {case.first.step} are the same"],
        "compare the seeds of the shuffle, the sampler, and how samples are dealt to processes.",
    )


def _rows_by_rank(step: GlobalStep) -> list[Counter[int]]:
    return [
        Counter(itertools.chain.from_iterable(event["rows"] for event in rank.passes()))
        for rank in step.ranks
    ]


def evaluation_repeats(case: Case) -> Cause | None:
    """Evaluations have samples more than once."""
    reference, rows = case.evaluated_rows
    repeated = (rows - reference).total()
    if not repeated:
        return None
    return Cause(
        "evaluation-repeats-samples",
        "evaluation counts samples twice",
        [
            f"evaluated more often than in the reference: {repeated} of {counted(rows.total(), 'sample')}"
        ],
        "drop the samples with which the sampler fills up shares, as `gather_for_metrics` does.",
    )
