"""Records of a parity check: the content of `parity.json`, from which every report is made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from isotrain.core.json_format import json_page

FORMAT = 1
PARITY_FILE = "parity.json"
Stage = Literal["gradient", "reduced", "weight", "optimizer", "state", "loss"]
STAGES: dict[Stage, str] = {
    "gradient": "gradient before reduction",
    "reduced": "gradient after reduction",
    "weight": "weight after the step",
    "optimizer": "optimizer state",
    "state": "non-trainable state",
    "loss": "reported loss",
}
"""The tensors compared in each step, in this order, and the name of each stage in texts."""

RunStatus = Literal["reference", "equal", "rounding", "difference", "failed"]


@dataclass(frozen=True)
class Divergence:
    """A tensor whose difference to the reference exceeds the noise floor.

    Attributes:
        step: Step index, from 0 over the run.
        stage: Kind of tensor, a key of `STAGES`.
        name: Common name of the tensor.
        difference: Norm of the difference relative to the larger of the two norms, estimated.
        floor: Noise floor of the tensor in that step: the relative difference that rounding explains.
        precision: Precision of the two runs, such as `float32`.
        bits: Number of differing bits; None where runs are compared beyond a noise floor.
    """

    step: int
    stage: Stage
    name: str
    difference: float
    floor: float
    precision: str
    bits: int | None = None


@dataclass(frozen=True)
class Cause:
    """A likely cause of a difference.

    Attributes:
        code: Identifier such as `sum-instead-of-mean`; `docs/parity.md` lists all.
        title: Cause in a few words.
        evidence: Measurements that support it, a sentence each.
        advice: Advice on how to fix it.
    """

    code: str
    title: str
    evidence: list[str]
    advice: str


@dataclass(frozen=True)
class StepRecord:
    """One traced step of one run, compared with the same step of the reference.

    Attributes:
        step: Step index, from 0 over the run.
        samples: Number of samples in the global batch.
        loss: Mean loss of the global batch.
        loss_difference: Relative difference to the reference's loss; None for the reference.
        loss_floor: Noise floor of the loss.
        gradient_norm: Euclidean norm over all gradients after the reduction.
        stages: Largest relative difference of a tensor, by stage; empty for the reference.
        excess: Largest ratio of a tensor's difference to its noise floor, by stage; above 1 the runs
            diverge.
    """

    step: int
    samples: int
    loss: float
    loss_difference: float | None
    loss_floor: float
    gradient_norm: float
    stages: dict[str, float] = field(default_factory=dict)
    excess: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """One run, compared with the reference.

    Attributes:
        name: Run name, `BACKEND[:COLLECTIVE]@REPLICAS`, with ` STRATEGY` where several are compared.
        backend: Backend as requested, `NAME` or `NAME:COLLECTIVE`.
        replicas: Number of replicas.
        strategy: Strategy as `NAME[,OPTION=VALUE...]`.
        status: `equal`: all fingerprints are equal to the bit; `rounding`: no tensor differs by more than
            the noise floor, or the runs agree in float64; `difference`; `failed`; or `reference`.
        reason: Explanation of the status in a sentence; the full error of a failed run.
        first: First step and tensor at which the run diverges from the reference; None if it does not.
        divergences: Divergences in that step and stage, largest ratio to the noise floor first.
        causes: Likely causes, the likeliest first.
        confirmed: Relative difference in float64 of the tensor that diverges first there, or, if none does,
            of the one that diverged first in the spec's precision; None if there was no float64 run.
        steps: Comparison of every traced step.
        notes: Tensors that could not be compared, and other caveats.
        plan: Plan of the run as plain values.
    """

    name: str
    backend: str
    replicas: int
    strategy: str
    status: RunStatus
    reason: str
    first: Divergence | None = None
    divergences: list[Divergence] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    confirmed: float | None = None
    steps: list[StepRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoiseRecord:
    """A rerun of the reference from which the noise floor is estimated.

    Attributes:
        source: Kind of rerun, `other precision` or `other threads`.
        about: The setting that was changed, such as `float64`.
        largest: Largest relative difference to the reference by stage, scaled to the reference's
            precision.
        failed: Error of the rerun; None if it succeeded.
    """

    source: str
    about: str
    largest: dict[str, float] = field(default_factory=dict)
    failed: str | None = None


@dataclass(frozen=True)
class ParityRecord:
    """All results of one parity check.

    Attributes:
        name: Spec name.
        verdict: `difference` if a run diverges, else `failed` if a run failed, else `agree`.
        summary: The verdict in a sentence.
        spec: Resolved spec as plain values.
        reference: Name of the run that all others are compared with.
        created: Start of the check as Unix time.
        steps: Indices of the traced steps.
        noise: Reruns of the reference from which the noise floor is estimated.
        runs: The reference, then the other runs in the requested order.
        machine: Processor, cores, memory and operating system.
        versions: Version of every package that took part, by package.
    """

    name: str
    verdict: Literal["agree", "difference", "failed"]
    summary: str
    spec: dict[str, Any]
    reference: str
    created: float
    steps: list[int]
    noise: list[NoiseRecord]
    runs: list[RunRecord]
    machine: dict[str, Any]
    versions: dict[str, str]

    def run(self, name: str) -> RunRecord:
        """The run with the given name; a `KeyError` if there is none."""
        return {run.name: run for run in self.runs}[name]

    def to_dict(self) -> dict[str, Any]:
        """The check's results as plain JSON values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """The check's results as JSON text, the content of `parity.json`."""
        return json_page(self.to_dict())
