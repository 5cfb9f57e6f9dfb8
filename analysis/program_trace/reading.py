"""Reads the trace of a program: the steps of all its processes."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isotrain.analysis.parity.tensor_sketch import Fingerprint, from_list
from isotrain.analysis.program_trace.recorder import FORMAT
from isotrain.core.errors import IsotrainError, PlanError
from isotrain.core.quantities import counted

Tensors = Mapping[str, Fingerprint]
"""Fingerprints by the parameter's name in its model."""
TENSORS = ("gradient", "weight", "optimizer_state", "state", "initial")
"""Attributes of `Step` that hold tensors."""


@dataclass(frozen=True)
class Step:
    """One step of an optimizer in one process.

    Attributes:
        events: What happened since the step before, in order: `forward`, `loss`, `backward`, `clip`,
            `unscale` and `collective`, each with its facts.
        gradient: Gradients that the optimizer got.
        groups: Parameter groups: type of the optimizer, dtype, names of parameters, options.
        weight: Weights after the step.
        optimizer_state: Optimizer state after the step, by `PARAMETER/NAME`.
        state: Buffers after the step.
        initial: Weights before the optimizer's first step; else empty.
        untrained: Parameters of the models that are not in the optimizer, at its first step.
        sharded: Parameters of the optimizer that are sharded over processes, which have no fingerprints; at
            its first step.
        compressed: Whether processes exchange gradients in 16 bits.
        comm_hook: Name of the function by which `DistributedDataParallel` exchanges them; empty for its own.
        shapes: Shapes of weights and buffers, with axes in torch's order, at the optimizer's first step.
    """

    events: Sequence[Mapping[str, Any]]
    gradient: Tensors
    groups: Sequence[Mapping[str, Any]]
    weight: Tensors
    optimizer_state: Tensors
    state: Tensors
    initial: Tensors = field(default_factory=dict)
    untrained: Sequence[str] = ()
    sharded: Sequence[str] = ()
    compressed: bool = False
    comm_hook: str = ""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """The events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    def passes(self, training: bool = True) -> list[Mapping[str, Any]]:
        """The forward passes with gradients, or those without."""
        return [event for event in self.of_kind("forward") if event["gradients"] == training]

    @property
    def options(self) -> dict[str, Mapping[str, Any]]:
        """The optimizer's options for each parameter."""
        return {name: group["options"] for group in self.groups for name in group["names"]}


@dataclass(frozen=True)
class GlobalStep:
    """A step of an optimizer in all processes, by rank.

    Attributes:
        optimizer: Index of the optimizer.
        index: Index of the step, from 0.
        ranks: The step in each process.
    """

    optimizer: int
    index: int
    ranks: Sequence[Step]

    @property
    def first(self) -> Step:
        """The step of rank 0."""
        return self.ranks[0]

    def rows(self, training: bool = True) -> Counter[int]:
        """The samples of the forward passes of all processes, by their hashes."""
        return Counter(
            itertools.chain.from_iterable(
                event["rows"] for rank in self.ranks for event in rank.passes(training)
            )
        )

    @property
    def losses(self) -> list[float]:
        """The losses of all backward passes of all processes."""
        return [event["loss"] for rank in self.ranks for event in rank.of_kind("backward")]

    @property
    def mean_loss(self) -> float:
        """The mean of the losses; NaN if there are none."""
        return sum(self.losses) / len(self.losses) if self.losses else math.nan


@dataclass(frozen=True)
class ProgramTrace:
    """The trace of a program.

    Attributes:
        folder: Where it lies.
        processes: Number of processes that trained.
        steps: Steps of each optimizer, in the order in which rank 0 took them.
        ends: Events of each process after its last step.
        notes: How its tensors were matched with those of another program.
    """

    folder: Path
    processes: int
    steps: Sequence[GlobalStep]
    ends: Sequence[Sequence[Mapping[str, Any]]]
    notes: Sequence[str] = ()

    @property
    def sharded(self) -> list[str]:
        """Parameters that are sharded over processes, and not recorded."""
        return sorted({name for step in self.steps for name in step.first.sharded})

    def evaluated_rows(self, steps: Sequence[GlobalStep], *, to_the_end: bool) -> Counter[int]:
        """The samples of the forward passes without gradients, by their hashes.

        Args:
            steps: Steps of the trace, before which the passes were.
            to_the_end: Whether passes after the last step count too.
        """
        rows = sum((step.rows(training=False) for step in steps), Counter[int]())
        for event in itertools.chain.from_iterable(self.ends if to_the_end else ()):
            if event["event"] == "forward" and not event["gradients"]:
                rows.update(event["rows"])
        return rows

    def require_steps(self, count: int) -> None:
        """Checks that each optimizer has so many steps.

        Raises:
            PlanError: One has fewer.
        """
        fewest = min(Counter(step.optimizer for step in self.steps).values())
        if fewest < count:
            raise PlanError(
                f"parity --steps: expected at least {counted(count, 'step')} in {self.folder}, found"
                f" {fewest}. Give fewer --steps, or trace more with `isotrain trace --steps N`."
            )


def is_trace(path: str | Path) -> bool:
    """Whether a path is the folder of a trace."""
    return Path(path).is_dir() and any(Path(path).glob("rank-*.jsonl"))


def read_trace(folder: str | Path) -> ProgramTrace:
    """Reads the trace in a folder.

    Raises:
        IsotrainError: There is none, or it has no steps.
    """
    by_rank: dict[int, list[dict[str, Any]]] = {}
    processes = 0
    for file in sorted(Path(folder).glob("rank-*.jsonl")):
        header, *lines = _lines(file)
        if header.get("format") != FORMAT:
            raise IsotrainError(
                f"{file}: expected a trace of format {FORMAT}, found {header.get('format')}: it is of another"
                " version of isotrain."
            )
        if header["rank"] in by_rank:
            raise IsotrainError(
                f"{folder}: there are two processes of rank {header['rank']}. Trace one training at a time,"
                " without restarts; each process must know its rank by torch.distributed, tf.distribute or"
                " Horovod."
            )
        by_rank[header["rank"]], processes = lines, header["processes"]
    if len(by_rank) < processes:
        raise IsotrainError(
            f"{folder}: {len(by_rank)} of {processes} processes have a file. All hosts must see the folder,"
            " and each process must pass PYTHONPATH on to those that it starts."
        )
    ranks = [_steps(lines) for _, lines in sorted(by_rank.items())]
    keys = [key for key in (ranks[0] if ranks else ()) if all(key in rank for rank in ranks)]
    if not keys:
        raise IsotrainError(
            f"{folder}: expected a trace with steps of an optimizer, found none. Make one with"
            " `isotrain trace --output DIR -- PROGRAM`, of a program that trains with an optimizer of torch"
            " or Keras."
        )
    steps = [GlobalStep(*key, [rank[key] for rank in ranks]) for key in keys]
    ends = [
        [event for line in lines if line["kind"] == "end" for event in line["events"]]
        for lines in by_rank.values()
    ]
    return ProgramTrace(Path(folder), len(ranks), steps, ends)


def _lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, without one that its process could not write to the end."""
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [json.loads(line) for line in whole] or [{}]


def _steps(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], Step]:
    """The steps of one process, by optimizer and index."""
    return {
        (line["optimizer"], line["step"]): Step(
            events=line["events"],
            groups=line["groups"],
            untrained=line.get("untrained", ()),
            sharded=line.get("sharded", ()),
            compressed=line.get("compressed", False),
            comm_hook=line.get("comm_hook", ""),
            shapes=line.get("shapes", {}),
            **{kind: _tensors(line.get(kind, {})) for kind in TENSORS},
        )
        for line in lines
        if line["kind"] == "step"
    }


def _tensors(prints: Mapping[str, Any]) -> Tensors:
    return {name: from_list(fields) for name, fields in prints.items()}
