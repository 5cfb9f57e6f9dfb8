"""Names likely causes of a difference, each from what was measured; `docs/parity.md` explains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from isotrain.core.parity import fingerprints
from isotrain.core.parity.clipping import clipped
from isotrain.core.parity.fingerprints import difference
from isotrain.core.parity.noise import Floor
from isotrain.core.parity.records import STAGES, Cause, Parting
from isotrain.core.parity.runs import RunTrace, StepTrace, Tensors, relative
from isotrain.core.parity.updates import placement_of_epsilon
from isotrain.core.spec.training_spec import TrainingSpec

FITS = 1e-3
"""A hypothesis explains a tensor when what is left unexplained is below this part of it."""
FLOAT32_ROUNDING = (2.0**-30, 2.0**-17)
"""Relative differences that computing in float32 makes in a few steps."""


@dataclass(frozen=True)
class Case:
    """A run that parts from the reference.

    Attributes:
        spec: What was trained.
        run: The run.
        reference: What it is compared with.
        floor: The noise floor around the reference.
        parted: What parts at the first step and stage, the furthest first.
        other_precision: The reference in another precision, where there is such a run.
    """

    spec: TrainingSpec
    run: RunTrace
    reference: RunTrace
    floor: Floor
    parted: Sequence[Parting]
    other_precision: RunTrace | None

    @property
    def first(self) -> Parting:
        """Where it parts, and furthest there."""
        return self.parted[0]

    @property
    def index(self) -> int:
        """The place of that step among the traced ones."""
        return next(i for i, s in enumerate(self.run.steps) if s.step == self.first.step)

    @property
    def here(self) -> StepTrace:
        """That step of the run."""
        return self.run.steps[self.index]

    @property
    def there(self) -> StepTrace:
        """That step of the reference."""
        return self.reference.steps[self.index]

    @property
    def are_gradients(self) -> bool:
        """Whether it parts in the gradients."""
        return self.first.stage in ("gradient", "reduced")


def likely_causes(case: Case) -> list[Cause]:
    """Every cause that the measurements speak for, the likeliest first."""
    found = [cause for suspect in _SUSPECTS if (cause := suspect(case)) is not None]
    return found or [_unknown(case)]


def computed_in_float32(case: Case) -> Cause | None:
    """In a float64 run: the difference is what float32 would make."""
    low, high = FLOAT32_ROUNDING
    if case.run.precision != "float64" or not low < case.first.difference < high:
        return None
    evidence = [
        f"the run is in float64, and the relative difference, {case.first.difference:.1g}, is that of"
        f" float32 rounding (float64's: {2.0**-52:.1g})"
    ]
    if case.other_precision is not None:
        step = case.other_precision.steps[case.index]
        tensor = step.tensors.get(case.first.stage, {}).get(case.first.name)
        if tensor is not None:
            own = difference(tensor, case.there.tensors[case.first.stage][case.first.name])
            evidence.append(f"the reference itself in float32 is {own:.1g} away from float64 there")
    return Cause(
        "float64-in-float32",
        "float64 computed in float32",
        evidence,
        "look for an operation, a constant or a cast that falls back to float32 on this backend.",
    )


def random_streams(case: Case) -> Cause | None:
    """The model is random, and the very first gradients differ as two draws of it do."""
    if case.first.stage != "gradient" or case.index != 0:
        return None
    spread = _spread(case.reference, case.first.name) or _spread(case.run, case.first.name)
    if spread < 10 * case.first.floor or not 0.1 < case.first.difference / spread < 10.0:
        return None
    evidence = [
        "the same batch computed twice, with the random streams where the first time left them, gives"
        f" gradients that differ by {spread:.2g} in {case.first.name!r}: the model draws random numbers",
        f"the runs differ there by {case.first.difference:.2g}, which is as much as other draws make",
        *_evaluation(case),
    ]
    return Cause(
        "dropout-streams",
        "dropout (or other random layers) draws other random numbers",
        evidence,
        "compare with dropout set to 0; every framework, and every number of replicas, draws its own"
        " numbers for one seed. Two runs of one backend and one number of replicas should draw the same.",
    )


def _spread(run: RunTrace, name: str) -> float:
    """How much a tensor's first gradient changes when the random streams move on."""
    again = run.again.get(name)
    return 0.0 if again is None else difference(again, run.steps[0].tensors["gradient"][name])


def _evaluation(case: Case) -> list[str]:
    """Whether the models agree in evaluation mode, as a piece of evidence."""
    one, other = case.run.evaluation_loss, case.reference.evaluation_loss
    apart = relative(one, other)
    if apart > case.floor.at(0, "loss", "loss"):
        return []
    return [f"in evaluation mode the two losses agree (relative difference {apart:.1g})"]


def statistics(case: Case) -> Cause | None:
    """What is wrong with the statistics of batch normalisation."""
    return statistics_not_synced(case) or local_batch_statistics(case)


def local_batch_statistics(case: Case) -> Cause | None:
    """Other numbers of replicas, and a model that normalises by statistics of its local batch."""
    moving = _moving_statistics(case.reference)
    stages = ("gradient", "state")
    if case.first.stage not in stages or not moving or case.here.shares == case.there.shares:
        return None
    evidence = [
        f"the model has moving statistics ({', '.join(moving[:2])}{', ...' if moving[2:] else ''}): it"
        " normalises by the statistics of the batch that one replica sees",
        f"the runs split the {case.here.samples} samples of the step differently: {case.here.shares}"
        f" against {case.there.shares}",
        *_evaluation(case),
    ]
    return Cause(
        "batch-norm-not-synced",
        "batch-norm statistics are not synced: each replica normalises by its local batch",
        evidence,
        "compare runs with equal numbers of replicas, or use a normalisation that does not depend on the"
        " batch (layer or group norm), or synchronised batch normalisation.",
    )


def _moving_statistics(run: RunTrace) -> list[str]:
    """The floating-point state that a step moves."""
    after = run.steps[0].tensors["state"]
    return [
        name
        for name, tensor in run.start["state"].items()
        if tensor.floating and name in after and after[name].sketch != tensor.sketch
    ]


def statistics_not_synced(case: Case) -> Cause | None:
    """Only the non-trainable state parts, and replicas disagree about it."""
    copies = case.here.copies["state"]
    if case.first.stage != "state" or len(copies) < 2:
        return None
    name = case.first.name
    apart = max(difference(own[name], copies[0][name]) for own in copies[1:])
    if apart <= case.floor.at(case.index, "state", name):
        return None
    mean = fingerprints.mean([own[name] for own in copies])
    left = difference(mean, case.there.tensors["state"][name])
    return Cause(
        "batch-norm-not-synced",
        "batch-norm statistics are not synced: every replica keeps its own",
        [
            "gradients, weights and optimizer slots agree; only non-trainable state parts",
            f"replicas of the run disagree about {name!r} by {apart:.2g}",
            f"the mean over the replicas is {left:.1g} away from the reference",
        ],
        "average the moving statistics over all replicas after every step.",
    )


def wrong_exchange(case: Case) -> Cause | None:
    """What is wrong with how replicas' gradients become one: the most special explanation."""
    for suspect in (clipped_before_reduction, wrong_weights_of_replicas, duplicated_padding):
        found = suspect(case)
        if found is not None:
            return found
    return None


def clipped_before_reduction(case: Case) -> Cause | None:
    """The reduced gradients are the mean of gradients that were clipped one by one."""
    clip = case.spec.clip
    replicas = case.here.copies["gradient"]
    if clip is None or case.first.stage not in ("reduced", "weight") or len(replicas) < 2:
        return None
    predicted = _mean_of([clipped(own, clip) for own in replicas])
    actual = case.here.update
    left = _misfit(actual, predicted)
    right = _misfit(actual, _mean_of(replicas))
    if left > max(FITS, 0.1 * right):
        return None
    kind = next(
        name for name in ("value", "norm", "global_norm") if getattr(clip, name) is not None
    )
    return Cause(
        "clipping-before-reduction",
        "gradients are clipped on each replica before they are reduced",
        [
            "gradients before the reduction agree",
            f"clipping each replica's gradients ({kind}: {getattr(clip, kind):g}) and then taking the mean"
            f" gives the reduced gradients up to {left:.1g}",
            f"the mean of the gradients as they are is {right:.2g} away from them",
        ],
        "reduce first, then clip; an optimizer that clips must be given gradients that are reduced.",
    )


def _mean_of(replicas: Sequence[Tensors]) -> Tensors:
    return {name: fingerprints.mean([own[name] for own in replicas]) for name in replicas[0]}


def _misfit(actual: Tensors, predicted: Tensors) -> float:
    """How far all tensors together are from a prediction, relative to their norm.

    Tensors whose prediction is only known at sampled places are compared there.
    """
    left: list[float] = []
    whole: list[float] = []
    for name, tensor in actual.items():
        other = predicted[name]
        one, two = tensor.sketch, other.sketch
        if not two:
            one, two = tensor.sample, other.sample
        left += [a - b for a, b in zip(one, two, strict=True)]
        whole += one
    scale = fingerprints.length(whole)
    return fingerprints.length(left) / scale if scale else 0.0


def wrong_weights_of_replicas(case: Case) -> Cause | None:
    """The reduced gradients are a sum of the replicas' own with the wrong factors."""
    replicas = case.here.copies["gradient"]
    if case.first.stage != "reduced":
        return None
    columns = [_stacked(own) for own in replicas]
    target = _stacked(case.here.update)
    factors, *_ = np.linalg.lstsq(np.stack(columns, axis=1), target, rcond=None)
    left = np.linalg.norm(target - np.stack(columns, axis=1) @ factors) / np.linalg.norm(target)
    mean = np.mean(columns, axis=0)
    ratio = float(target @ mean / (mean @ mean))
    along = float(np.linalg.norm(target - ratio * mean) / np.linalg.norm(target))
    if along < FITS:
        return _scaled(case, ratio, along, len(replicas))
    return None if left > FITS else _of_some(case, [float(f) for f in factors], float(left))


def _stacked(tensors: Tensors) -> np.ndarray:
    return np.concatenate([tensor.sketch for tensor in tensors.values()])


def _scaled(case: Case, ratio: float, left: float, replicas: int) -> Cause:
    evidence = [
        "gradients before the reduction agree",
        f"the reduced gradients are {ratio:.6g} times the mean over the {replicas} replicas, in all"
        f" tensors alike (what is left: {left:.1g})",
    ]
    if abs(ratio - replicas) < FITS * replicas:
        return Cause(
            "sum-instead-of-mean",
            "gradients are summed over the replicas, not averaged",
            evidence,
            f"divide by the {replicas} replicas, once: in the loss or in the reduction.",
        )
    if abs(ratio * replicas - 1) < FITS:
        return Cause(
            "divided-twice",
            "gradients are divided by the number of replicas twice",
            evidence,
            "divide once: in the loss or in the reduction.",
        )
    return Cause(
        "gradients-scaled",
        f"gradients are multiplied by {ratio:.4g}",
        evidence,
        "look for a factor in the loss or in the reduction.",
    )


def _of_some(case: Case, factors: list[float], left: float) -> Cause:
    shown = ", ".join(f"{factor:.3g}" for factor in factors)
    evidence = [
        "gradients before the reduction agree",
        f"the reduced gradients are the replicas' own times {shown} (what is left: {left:.1g}); the mean"
        f" takes each times {1 / len(factors):.3g}",
        f"the replicas have {', '.join(map(str, case.here.shares))} samples",
    ]
    if not case.here.even:
        return _padding(evidence)
    if len([f for f in factors if abs(f) < FITS]) == len(factors) - 1:
        return Cause(
            "not-reduced",
            "gradients are not exchanged: the first replica uses its own",
            evidence,
            "see that the reduction covers every weight.",
        )
    return Cause(
        "replicas-weighted",
        "replicas do not count equally",
        evidence,
        "every replica's gradient counts by its share of the samples.",
    )


def _padding(evidence: list[str]) -> Cause:
    return Cause(
        "duplicated-padding",
        "samples are counted twice where the global batch does not divide by the replicas",
        evidence,
        "weigh each replica by the samples that it really has; do not repeat samples to fill up a batch.",
    )


def duplicated_padding(case: Case) -> Cause | None:
    """Even steps agree, and the first uneven one parts."""
    if not case.are_gradients or case.here.even or len(case.here.shares) < 2:
        return None
    before = [step for step in case.run.steps[: case.index] if step.even]
    if not before:
        return None
    most, least = max(case.here.shares), min(case.here.shares)
    return _padding(
        [
            f"all {len(before)} steps before, whose samples divide by {len(case.here.shares)} replicas,"
            " agree",
            f"step {case.first.step} has {case.here.samples} samples, the first number that does not:"
            f" replicas have from {least} to {most}",
            f"{STAGES[case.first.stage]} differs by {case.first.difference:.2g}; one sample in"
            f" {case.here.samples} is {1 / case.here.samples:.2g}",
        ]
    )


def epsilon(case: Case) -> Cause | None:
    """Gradients agree, updates do not, and the epsilon in another place explains it."""
    if case.first.stage not in ("weight", "slot"):
        return None
    ours, theirs = (
        placement_of_epsilon(case.spec, run, case.index) for run in (case.run, case.reference)
    )
    if ours is None or theirs is None or ours.formula == theirs.formula:
        return None
    return Cause(
        "epsilon-elsewhere",
        "the optimizer adds its epsilon in another place",
        [
            "gradients before and after the reduction agree",
            f"this run's updates are those of {ours.formula} (off by {ours.error:.1g};"
            f" the reference's formula: {ours.errors[theirs.formula]:.1g})",
            f"the reference's are those of {theirs.formula} (off by {theirs.error:.1g};"
            f" this run's formula: {theirs.errors[ours.formula]:.1g})",
        ],
        "use the same form of the optimizer, or an epsilon so small that it does not matter for these"
        " gradients.",
    )


def scaled_update(case: Case) -> Cause | None:
    """Gradients agree, and every weight moves by a constant times what it should."""
    if case.first.stage != "weight":
        return None
    moved, wanted = (_stacked(_moved(run, case.index)) for run in (case.run, case.reference))
    if not np.any(moved) or not np.any(wanted):
        return None
    ratio = float(moved @ wanted / (wanted @ wanted))
    left = float(np.linalg.norm(moved - ratio * wanted) / np.linalg.norm(moved))
    if left > 10 * FITS or abs(ratio - 1) < 2 * left:
        return None
    return Cause(
        "learning-rate",
        f"the learning rate is {ratio:.4g} times the reference's",
        [
            "gradients before and after the reduction agree",
            f"every weight moves {ratio:.4g} times as far (what is left: {left:.1g})",
        ],
        "compare how the rate, its scaling and its schedule reach the optimizer.",
    )


def _moved(run: RunTrace, index: int) -> Tensors:
    """What a step adds to the weights."""
    after, before = run.steps[index].tensors["weight"], run.before(index, "weight")
    return {n: fingerprints.combination([1.0, -1.0], [after[n], before[n]]) for n in sorted(after)}


def _unknown(case: Case) -> Cause:
    stage = case.first.stage
    title, advice = _GENERAL[stage]
    names = ", ".join(repr(parting.name) for parting in case.parted[:3])
    evidence = [
        f"{len(case.parted)} tensors part there: {names}{', ...' if case.parted[3:] else ''}"
    ]
    return Cause(f"{stage}-differs", title, evidence + _evaluation(case), advice)


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
    "slot": (
        "weights agree so far, and the optimizer's memory does not",
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

_SUSPECTS: tuple[Callable[[Case], Cause | None], ...] = (
    computed_in_float32,
    random_streams,
    statistics,
    wrong_exchange,
    epsilon,
    scaled_update,
)
