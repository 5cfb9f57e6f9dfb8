"""Likely causes of a difference between two programs; each is named only if the traces show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isotrain.analysis.parity.records import Cause
from isotrain.analysis.program_trace.case import STAGES, Case
from isotrain.analysis.program_trace.causes import forward, gradients, options, samples, state

_SUSPECTS: dict[str, Sequence[Callable[[Case], Cause | None]]] = {
    "batch": (
        samples.same_samples_on_every_rank,
        samples.resumed_elsewhere,
        samples.epoch_order_repeats,
        samples.samples_repeated,
        samples.samples_missing,
        samples.other_samples,
    ),
    "initial": (options.weights_not_broadcast,),
    "options": (options.other_options,),
    "gradient": (
        gradients.not_exchanged,
        gradients.untied,
        gradients.other_turns,
        gradients.one_backward,
        forward.evaluation_mode,
        state.not_in_optimizer,
        gradients.accumulated,
        gradients.communication_state_lost,
        forward.other_targets,
        gradients.clipping,
        gradients.scaled,
        forward.host_random_numbers,
        forward.random_layers,
        forward.batch_statistics,
        forward.other_precision,
    ),
    "loss": (
        forward.evaluation_mode,
        forward.other_targets,
        forward.host_random_numbers,
        forward.random_layers,
        forward.batch_statistics,
        forward.other_precision,
    ),
    "update": (state.optimizer_state_lost, gradients.clipping, state.update_scaled),
    "optimizer": (state.optimizer_state_lost,),
    "state": (state.statistics_part,),
    "evaluation": (samples.evaluation_repeats,),
}


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
