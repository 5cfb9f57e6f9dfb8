"""Diagnosis of likely causes of a divergence from measurements; `docs/parity.md` explains each cause."""

from __future__ import annotations

from collections.abc import Callable

from isotrain.analysis.parity.case import DivergenceCase
from isotrain.analysis.parity.causes.communication import wrong_reduction
from isotrain.analysis.parity.causes.model import computed_in_float32, random_streams, statistics
from isotrain.analysis.parity.causes.optimizer import epsilon, scaled_update
from isotrain.analysis.parity.records import Cause
from isotrain.core.quantities import counted

_SUSPECTS: tuple[Callable[[DivergenceCase], Cause | None], ...] = (
    computed_in_float32,
    random_streams,
    statistics,
    wrong_reduction,
    epsilon,
    scaled_update,
)

_GENERAL = {
    "gradient": (
        "from the same weights and samples, the model gives other gradients",
        "compare the loss, the layers' options (epsilons, padding, activations), what is done to the"
        " samples, and the numeric precision of single operations.",
    ),
    "reduced": (
        "the exchange does not give the mean of the gradients",
        "compare what is exchanged, when, and in which precision.",
    ),
    "weight": (
        "from the same gradients, the optimizer makes other updates",
        "compare the optimizer's form and hyperparameters, weight decay, clipping and learning rate.",
    ),
    "optimizer": (
        "weights agree so far, and the optimizer's state does not",
        "compare the optimizer's form and hyperparameters.",
    ),
    "state": (
        "only state that is not trained differs",
        "compare how moving statistics are updated: momentum, biased or unbiased variance, and the mean"
        " over the replicas.",
    ),
    "loss": (
        "training is the same, and the loss that is reported is not",
        "compare how the loss is averaged over the replicas.",
    ),
}


def likely_causes(case: DivergenceCase) -> list[Cause]:
    """All causes that the measurements support, the likeliest first."""
    causes = [cause for suspect in _SUSPECTS if (cause := suspect(case)) is not None]
    return causes or [_unknown(case)]


def _unknown(case: DivergenceCase) -> Cause:
    stage = case.first.stage
    title, advice = _GENERAL[stage]
    names = ", ".join(repr(divergence.name) for divergence in case.divergences[:3])
    evidence = [
        f"in {counted(len(case.divergences), 'tensor')}: {names}{', ...' if case.divergences[3:] else ''}"
    ]
    return Cause(f"{stage}-differs", title, evidence + case.evaluation(), advice)
