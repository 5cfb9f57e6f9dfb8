"""Likely causes of a difference between two programs; each is named only if the traces show it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.parity.records import Cause
from isotrain.analysis.parity.tensor_sketch import Fingerprint
from isotrain.analysis.program_trace.case import STAGES, Case, updates
from isotrain.analysis.program_trace.reading import GlobalStep, Tensors
from isotrain.core.quantities import counted

_FITS = 1e-2
"""A hypothesis explains gradients if what is left is below this fraction of their norm."""
_STATEFUL = "powerSGD"
"""Part of the names of PyTorch's communication hooks whose state changes the gradients of later steps."""
_AVERAGED = "averaged."
"""Prefix of the averages of weights among the buffers."""
_LOSS_SCALE = 2.0**7
"""A power of two from here on is taken for a loss scale."""


def likely_causes(case: Case) -> list[Cause]:
    """The causes that the traces show for the stage that differs first; else one that says what differs."""
    causes = [cause for suspect in _SUSPECTS[case.first.stage] if (cause := suspect(case))]
    return causes[:2] or [_unknown(case)]


def _unknown(case: Case) -> Cause:
    names = ", ".join(map(repr, filter(None, case.names[:4])))
    return Cause(
        f"{case.first.stage}-differs",
        f"the {STAGES[case.first.stage]} differs first",
        [f"{len(case.names)} differ there: {names}"] if names else ["everything before agrees"],
        "compare what the two programs do there; everything before it agrees.",
    )


# samples


def _same_samples_on_every_rank(case: Case) -> Cause | None:
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


def _epoch_order_repeats(case: Case) -> Cause | None:
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


def _samples_repeated(case: Case) -> Cause | None:
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


def _samples_missing(case: Case) -> Cause | None:
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


def _resumed_elsewhere(case: Case) -> Cause | None:
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


def _other_samples(case: Case) -> Cause | None:
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


# initial weights and options


def _weights_not_broadcast(case: Case) -> Cause | None:
    first, *others = (rank.initial for rank in case.run_step.ranks)
    parting = {name for other in others for name in _parting(first, other)}
    if not parting:
        return None
    return Cause(
        "weights-not-broadcast",
        "processes start with different weights",
        [f"{len(parting)} initial weights differ between the processes: {_some(parting)}"],
        "broadcast the weights of rank 0 before the first step, or seed every process alike.",
    )


def _options(case: Case) -> Cause | None:
    option = case.first.name.rpartition("/")[2]
    pairs = {
        name: (_options_of(case.reference_step, name)[option], options[option])
        for name, options in case.run_step.first.options.items()
        if f"{name}/{option}" in case.names
    }
    values = sorted({(str(a), str(b)) for a, b in pairs.values()})
    evidence = [
        f"{option} is {b}, and {a} in the reference, for"
        f" {_some([name for name, pair in pairs.items() if tuple(map(str, pair)) == (a, b)])}"
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


# gradients


def _not_exchanged(case: Case) -> Cause | None:
    first, *others = (rank.gradient for rank in case.run_step.ranks)
    parting = {name for other in others for name in _parting(first, other)}
    if not parting:
        return None
    every = parting >= {n for n, t in first.items() if t.norm}
    what = "gradients" if every else f"the gradients of {_some(parting)}"
    return Cause(
        "not-exchanged",
        f"{what} are not exchanged",
        [f"the optimizers of the processes get different gradients of {_some(parting)}"],
        "let the reduction cover every parameter, also of modules outside of the wrapper.",
    )


def _evaluation_mode(case: Case) -> Cause | None:
    modes = [{e["training"] for e in step.first.passes()} for step in _both(case)]
    if modes[0] == modes[1] or not all(modes):
        return None
    side = "it" if False in modes[1] else "the reference"
    return Cause(
        "evaluation-mode",
        "a model trains in evaluation mode",
        [f"in step {case.first.step}, {side} computes gradients in evaluation mode"],
        "call `model.train()` before the step, as after an evaluation.",
    )


def _clipping(case: Case) -> Cause | None:
    ours, theirs = ([r.of_kind("clip") for r in step.ranks] for step in _both(case))
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
    if max(norms) > (1 + _FITS) * min(norms) and max(of_reference) < (1 + _FITS) * min(
        of_reference
    ):
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


def _targets(case: Case) -> Cause | None:
    ours, theirs = (
        [event for rank in step.ranks for event in rank.of_kind("loss")] for step in _both(case)
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


def _scaled(case: Case) -> Cause | None:
    ratio, left = _ratio(case.reference_step.first.gradient, case.run_step.first.gradient)
    if left > _FITS or abs(ratio - 1) < _FITS:
        return None
    processes = case.run.processes / case.reference.processes
    passes = _passes(case.run_step) / max(1, _passes(case.reference_step))
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
        if abs(factor - 1) > _FITS and abs(ratio / factor - 1) < _FITS:
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


def _one_backward(case: Case) -> Cause | None:
    """Several optimizers that step with gradients of one backward pass, in one program alone."""
    passes = [_passes(step) for step in _both(case)]
    if all(passes) or not any(passes):
        return None
    side = passes.index(0)
    if not any(_passes(pair[side]) for pair in case.steps):
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


def _other_turns(case: Case) -> Cause | None:
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


def _accumulated(case: Case) -> Cause | None:
    before = [b for _, b in case.steps[: case.index] if b.optimizer == case.first.optimizer]
    if not before:
        return None
    summed = _combined([1.0, 1.0], case.reference_step.first.gradient, before[-1].first.gradient)
    ratio, left = _ratio(summed, case.run_step.first.gradient)
    if left > _FITS or abs(ratio - 1) > _FITS:
        return None
    return Cause(
        "gradients-not-zeroed",
        "gradients of earlier steps are still there",
        ["gradients are the reference's plus those of the step before"],
        "call `optimizer.zero_grad()` in each step.",
    )


def _communication_state_lost(case: Case) -> Cause | None:
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


def _untied(case: Case) -> Cause | None:
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


def _host_random_numbers(case: Case) -> Cause | None:
    drawn = [
        [event.get("host_random", {}) for rank in step.ranks for event in rank.passes()]
        for step in _both(case)
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


def _random_layers(case: Case) -> Cause | None:
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


def _batch_statistics(case: Case) -> Cause | None:
    sizes = [
        sorted(len(e["rows"]) for rank in step.ranks for e in rank.passes() if e["batch_norm"])
        for step in _both(case)
    ]
    if sizes[0] == sizes[1] or not all(sizes):
        return None
    return Cause(
        "batch-statistics",
        "batch normalisation is over other batches",
        [f"its passes have {sizes[1]} samples, and {sizes[0]} in the reference"],
        "use synchronised batch normalisation, or a normalisation that does not depend on the batch.",
    )


def _precision(case: Case) -> Cause | None:
    modes = [{e["autocast"] for e in step.first.passes()} for step in _both(case)]
    if modes[0] == modes[1]:
        return None
    side = "it" if True in modes[1] else "the reference"
    return Cause(
        "precision",
        "the programs compute in different precisions",
        [f"{side} trains under autocast"],
        "compare in one precision first.",
    )


# updates and state


def _not_in_optimizer(case: Case) -> Cause | None:
    missing = set(case.reference_step.first.weight) - set(case.run_step.first.weight)
    untrained = [s.first.untrained for s in case.run.steps if s.index == 0]
    missing &= set(itertools.chain.from_iterable(untrained))
    if not missing:
        return None
    return Cause(
        "not-in-optimizer",
        "parameters of the model are not in the optimizer",
        [f"the reference trains {_some(missing)}, and the run's optimizer does not have them"],
        "make the optimizer after the model is complete, with all of its parameters.",
    )


def _optimizer_state_lost(case: Case) -> Cause | None:
    ours, theirs = (step.first.optimizer_state for step in _both(case))
    steps = [name for name in theirs if name.endswith("/step") and name in ours]
    counts = {(ours[name].mean, theirs[name].mean) for name in steps}
    if not case.offset or (steps and all(a == b for a, b in counts)):
        return None
    shown = ", ".join(f"{b:g}, and {a:g} in the reference" for a, b in sorted(counts)[:1])
    return Cause(
        "optimizer-state-lost",
        "the run goes on without the optimizer's state",
        [
            f"its first weights are those after step {case.offset - 1} of the reference",
            *([f"the optimizer's count of steps is {shown}"] if shown else []),
        ],
        "save `optimizer.state_dict()`, and load it before the first step.",
    )


def _statistics_part(case: Case) -> Cause | None:
    first, *others = (rank.state for rank in case.run_step.ranks)
    parting = {name for other in others for name in _parting(first, other)}
    if not parting:
        return None
    if all(name.startswith(_AVERAGED) for name in parting):
        return Cause(
            "average-not-synced",
            "each process has an average of weights of its own",
            [f"averages differ between the processes: {_some(parting)}"],
            "update the average once the processes have exchanged their weights.",
        )
    return Cause(
        "statistics-not-synced",
        "each process has moving statistics of its own",
        [f"buffers differ between the processes: {_some(parting)}"],
        "broadcast or average buffers, or use synchronised batch normalisation.",
    )


def _update_scaled(case: Case) -> Cause | None:
    reference, run = (updates(case.steps, case.index, side) for side in (0, 1))
    ratio, left = _ratio(reference, run)
    if left > _FITS or abs(ratio - 1) < _FITS:
        return None
    return Cause(
        "update-scaled",
        f"updates are {ratio:.4g} times those of the reference",
        ["gradients and options agree, and all weights move by a constant factor"],
        "look for a rate that is applied elsewhere.",
    )


def _evaluation_repeats(case: Case) -> Cause | None:
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


_SUSPECTS: dict[str, Sequence[Callable[[Case], Cause | None]]] = {
    "batch": (
        _same_samples_on_every_rank,
        _resumed_elsewhere,
        _epoch_order_repeats,
        _samples_repeated,
        _samples_missing,
        _other_samples,
    ),
    "initial": (_weights_not_broadcast,),
    "options": (_options,),
    "gradient": (
        _not_exchanged,
        _untied,
        _other_turns,
        _one_backward,
        _evaluation_mode,
        _not_in_optimizer,
        _accumulated,
        _communication_state_lost,
        _targets,
        _clipping,
        _scaled,
        _host_random_numbers,
        _random_layers,
        _batch_statistics,
        _precision,
    ),
    "loss": (
        _evaluation_mode,
        _targets,
        _host_random_numbers,
        _random_layers,
        _batch_statistics,
        _precision,
    ),
    "update": (_optimizer_state_lost, _clipping, _update_scaled),
    "optimizer": (_optimizer_state_lost,),
    "state": (_statistics_part,),
    "evaluation": (_evaluation_repeats,),
}


def _both(case: Case) -> tuple[GlobalStep, GlobalStep]:
    return case.reference_step, case.run_step


def _passes(step: GlobalStep) -> int:
    """Number of backward passes of a process."""
    return len(step.first.of_kind("backward"))


def _parting(one: Tensors, other: Tensors) -> set[str]:
    """Names of tensors that differ between two processes by more than their kernels' rounding."""
    return {
        name
        for name, tensor in one.items()
        if name in other and tensor_sketch.difference(tensor, other[name]) > _FITS
    }


def _combined(factors: list[float], one: Tensors, other: Tensors) -> Tensors:
    return {
        name: tensor_sketch.combination(factors, [tensor, other[name]])
        for name, tensor in one.items()
        if name in other
    }


def _ratio(reference: Tensors, run: Tensors) -> tuple[float, float]:
    """The factor between tensors, by least squares, and what is left relative to the run's norm."""
    names = [name for name in run if name in reference]
    one = np.concatenate([reference[name].sketch for name in names] or [(0.0,)])
    other = np.concatenate([run[name].sketch for name in names] or [(0.0,)])
    size, whole = float(one @ one), float(np.linalg.norm(other))
    if not size or not whole or not math.isfinite(size + whole):
        return 1.0, math.inf
    ratio = float(one @ other) / size
    return ratio, float(np.linalg.norm(other - ratio * one)) / whole


def _some(names: Sequence[str] | set[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if ordered[3:] else "")
