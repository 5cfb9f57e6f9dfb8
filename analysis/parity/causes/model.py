"""Causes in the model's computation: precision, random numbers, batch statistics."""

from __future__ import annotations

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.parity.case import DivergenceCase
from isotrain.analysis.parity.records import Cause
from isotrain.analysis.parity.run_trace import RunTrace
from isotrain.analysis.parity.tensor_sketch import difference

FLOAT32_ROUNDING = (2.0**-30, 2.0**-17)
"""Range of relative differences that float32 rounding causes within a few steps."""


def computed_in_float32(case: DivergenceCase) -> Cause | None:
    """Float64 run whose difference has the size of float32 rounding."""
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
            rounding = difference(
                tensor, case.reference_step.tensors[case.first.stage][case.first.name]
            )
            evidence.append(
                f"the reference itself in float32 is {rounding:.1g} away from float64 there"
            )
    return Cause(
        "float64-in-float32",
        "float64 computed in float32",
        evidence,
        "look for an operation, a constant or a cast that falls back to float32 on this backend.",
    )


def random_streams(case: DivergenceCase) -> Cause | None:
    """Random model whose first gradients differ as much as two draws of its random numbers."""
    if case.first.stage != "gradient" or case.index != 0:
        return None
    spread = _spread(case.reference, case.first.name) or _spread(case.run, case.first.name)
    if spread < 10 * case.first.floor or not 0.1 < case.first.difference / spread < 10.0:
        return None
    evidence = [
        "the same batch computed twice, with the random streams where the first time left them, gives"
        f" gradients that differ by {spread:.2g} in {case.first.name!r}: the model draws random numbers",
        f"the runs differ there by {case.first.difference:.2g}, which is as much as other draws make",
        *case.evaluation(),
    ]
    return Cause(
        "dropout-streams",
        "dropout (or other random layers) draws other random numbers",
        evidence,
        "compare with `random_layers: per-sample`; without it every framework, and every number of replicas,"
        " draws its own numbers. Two runs of one backend and one number of replicas should draw the same.",
    )


def _spread(run: RunTrace, name: str) -> float:
    """Change of a tensor's first gradient when the random streams move on."""
    again = run.again.get(name)
    return 0.0 if again is None else difference(again, run.steps[0].tensors["gradient"][name])


def statistics(case: DivergenceCase) -> Cause | None:
    """Causes in the statistics of batch normalisation, the more specific first."""
    return statistics_not_synced(case) or local_batch_statistics(case)


def local_batch_statistics(case: DivergenceCase) -> Cause | None:
    """Unequal local batches, in a model that normalises by statistics of its local batch."""
    moving = _moving_statistics(case.reference)
    stages = ("gradient", "state")
    if (
        case.first.stage not in stages
        or not moving
        or case.run_step.local_batch_sizes == case.reference_step.local_batch_sizes
    ):
        return None
    evidence = [
        f"the model has moving statistics ({', '.join(moving[:2])}{', ...' if moving[2:] else ''}): it"
        " normalises by the statistics of the batch that one replica sees",
        f"the runs split the {case.run_step.samples} samples of the step differently:"
        f" {case.run_step.local_batch_sizes} against {case.reference_step.local_batch_sizes}",
        *case.evaluation(),
    ]
    return Cause(
        "batch-norm-not-synced",
        "batch-norm statistics are not synced: each replica normalises by its local batch",
        evidence,
        "set batch_norm: global or ghost, or use a normalisation that does not depend on the batch (layer or"
        " group norm), or compare runs with equal numbers of replicas.",
    )


def _moving_statistics(run: RunTrace) -> list[str]:
    """Names of the floating-point state that changes in a step."""
    after = run.steps[0].tensors["state"]
    return [
        name
        for name, tensor in run.start["state"].items()
        if tensor.floating and name in after and after[name].sketch != tensor.sketch
    ]


def statistics_not_synced(case: DivergenceCase) -> Cause | None:
    """Non-trainable state that differs between the replicas of one run."""
    copies = case.run_step.copies["state"]
    if case.first.stage != "state" or len(copies) < 2:
        return None
    name = case.first.name
    spread = max(difference(copy[name], copies[0][name]) for copy in copies[1:])
    if spread <= case.floor.at(case.index, "state", name):
        return None
    mean = tensor_sketch.mean([copy[name] for copy in copies])
    left = difference(mean, case.reference_step.tensors["state"][name])
    return Cause(
        "batch-norm-not-synced",
        "batch-norm statistics are not synced: every replica keeps its own",
        [
            "gradients, weights and optimizer state agree; only non-trainable state differs",
            f"replicas of the run disagree about {name!r} by {spread:.2g}",
            f"the mean over the replicas is {left:.1g} away from the reference",
        ],
        "average the moving statistics over all replicas after every step.",
    )
