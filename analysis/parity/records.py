"""What a check of parity found, as plain records: what `parity.json` holds and every report reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from isotrain.core.json_format import json_page

FORMAT = 1
PARITY_FILE = "parity.json"
Stage = Literal["gradient", "reduced", "weight", "slot", "state", "loss"]
STAGES: dict[Stage, str] = {
    "gradient": "gradient before reduction",
    "reduced": "gradient after reduction",
    "weight": "weight after the step",
    "slot": "optimizer slot",
    "state": "non-trainable state",
    "loss": "reported loss",
}
"""What is compared in each step, in this order, and what people call it."""

RunStatus = Literal["reference", "equal", "rounding", "difference", "failed"]


@dataclass(frozen=True)
class Divergence:
    """One tensor that is further from the reference than rounding explains.

    Attributes:
        step: Counted from 0 over the run.
        stage: Which of the step's tensors; a key of `STAGES`.
        name: The tensor's common name.
        difference: Norm of the difference, relative to the larger of the two norms.
        floor: The noise floor there: what rounding explains.
        precision: Of the two runs in which it was measured.
    """

    step: int
    stage: Stage
    name: str
    difference: float
    floor: float
    precision: str


@dataclass(frozen=True)
class Cause:
    """A likely cause of a difference.

    Attributes:
        code: Such as `sum-instead-of-mean`; `docs/parity.md` lists all.
        title: The cause in a few words.
        evidence: What was measured that speaks for it.
        advice: What to do.
    """

    code: str
    title: str
    evidence: list[str]
    advice: str


@dataclass(frozen=True)
class StepRecord:
    """One traced step of one run beside the reference's.

    Attributes:
        step: Counted from 0 over the run.
        samples: In the global batch.
        loss: The mean loss of the global batch.
        loss_difference: Relative to the reference's; None for the reference.
        loss_floor: What rounding explains of it.
        gradient_norm: Euclidean norm of all gradients after the reduction together.
        stages: Per stage the largest relative difference of a tensor; empty for the reference.
        excess: Per stage the largest ratio of a tensor's difference to its floor: above 1 it parts.
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
        name: `BACKEND[:COLLECTIVE]@REPLICAS[ STRATEGY]`; the strategy where there are several.
        backend: As it was asked for.
        replicas: How many.
        strategy: `NAME[,OPTION=VALUE...]`.
        status: `equal` to the bit, as far as fingerprints tell; `rounding`: no tensor parts by more
            than the noise floor, or the runs agree in float64; `difference`; `failed`; or `reference`.
        reason: Why it has that status, in a sentence; of a failed run all that it said.
        first: The first step and tensor at which it parts from the reference; None where it does not.
        divergences: Every tensor that parts in that step and stage, the furthest first.
        causes: What is likely to be the cause, the likeliest first.
        confirmed: How far the runs are apart in float64, where the first tensor of the plain runs
            divergences; None where that was not tried.
        steps: Step by step.
        notes: What could not be compared, and other things worth knowing.
        plan: The plan it followed.
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
    """One run of the reference that the noise floor rests on.

    Attributes:
        source: `other precision` or `other threads`.
        about: How it differs from the reference, such as `float64`.
        largest: Per stage the largest difference to the reference that was seen, scaled to the
            reference's precision.
        failed: Why there is none; None where it went well.
    """

    source: str
    about: str
    largest: dict[str, float] = field(default_factory=dict)
    failed: str | None = None


@dataclass(frozen=True)
class ParityRecord:
    """Everything that one check of parity found.

    Attributes:
        name: The spec's name.
        verdict: `agree`, `difference`, or `failed` where a run failed and no other parts.
        summary: The verdict in a sentence.
        spec: The resolved spec as plain values.
        reference: Name of the run that all others are compared with.
        created: Unix time of its start.
        steps: Which steps were traced.
        noise: What the noise floor rests on.
        runs: The reference, then the others in the order they were asked for.
        machine: Processor, cores, memory, system.
        versions: Of every package that took part.
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
        """The run of that name.

        Raises:
            KeyError: There is none.
        """
        for found in self.runs:
            if found.name == name:
                return found
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """Everything as one JSON object: what `parity.json` holds."""
        return json_page(self.to_dict())
