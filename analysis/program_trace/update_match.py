"""Named updates of a spec beside the optimizers of a program: which is which, and what samples they see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from isotrain.analysis.program_trace.reading import GlobalStep, ProgramTrace
from isotrain.core.errors import IsotrainError, PlanError, first_of
from isotrain.core.spec.training_spec import TrainingSpec

Hashes = Mapping[str, Sequence[int]]
"""Hashes of the samples of one replica, by `ORDER WHAT`: the order of axes, and what is hashed."""
_SHOWN = 5


def require_optimizers(program: ProgramTrace, spec: TrainingSpec) -> None:
    """Checks that the optimizers of a program may be those of a spec.

    Raises:
        PlanError: The spec has one optimizer, and the program several; or two of the program train the same
            weights.
    """
    by_optimizer = _weights(program)
    if len(by_optimizer) > 1 and not spec.updates:
        raise PlanError(
            f"{program.folder}: expected a program with one optimizer, as the spec has, found"
            f" {len(by_optimizer)}: {_shown(by_optimizer)}. Give the spec `updates`, one for each."
        )
    _require_different(by_optimizer, f"{program.folder}: optimizers")


def require_different_updates(weights: Mapping[str, Set[str]]) -> None:
    """Checks that no two updates of a spec change the same weights, by name.

    Raises:
        IsotrainError: Two do.
    """
    _require_different(weights, "updates")


def _require_different(weights: Mapping[str, Set[str]], owners: str) -> None:
    names = list(weights)
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            if weights[name] == weights[other]:
                raise PlanError(
                    f"{owners} {name} and {other} train the same weights"
                    f" ({first_of(sorted(weights[name]), _SHOWN)}), so nothing says which of the other side"
                    " each of them is. Trace both programs, and compare the traces."
                )


def optimizer_of_updates(
    program: ProgramTrace, weights: Mapping[str, Set[str]]
) -> tuple[dict[str, int], list[str]]:
    """The program's optimizer of each update that the run has done: the one that trains the same weights.

    Args:
        program: Trace of the program.
        weights: Weights of each update, by the program's names.

    Returns:
        Indices of optimizers by update, and notes on updates that the program has not.

    Raises:
        IsotrainError: An optimizer of the program trains other weights than each update.
    """
    by_optimizer = _weights(program)
    matched = {
        update: int(optimizer)
        for update, names in weights.items()
        for optimizer, trained in by_optimizer.items()
        if names == trained
    }
    of_program = set().union(*by_optimizer.values())
    alone = {update: names for update, names in weights.items() if update not in matched}
    if len(matched) < len(by_optimizer) or any(names & of_program for names in alone.values()):
        raise IsotrainError(
            f"{program.folder}: expected an update of the spec for each optimizer of the program, with the"
            f" same weights. The optimizers train {_shown(by_optimizer)}; the updates {_shown(weights)}."
            " Change the patterns of the updates' `weights`; or name counterparts of weights with --map FILE."
        )
    return matched, [
        f"update {update} of the run is not compared: no optimizer of the program has its weights"
        for update in alone
    ]


def _weights(program: ProgramTrace) -> dict[str, set[str]]:
    """Names of the weights that each optimizer trains, by its index."""
    weights: dict[str, set[str]] = {}
    for step in program.steps:
        names = {name for group in step.first.groups for name in group["names"]}
        weights.setdefault(str(step.optimizer), set()).update(names)
    return weights


def _shown(weights: Mapping[str, Iterable[str]]) -> str:
    return "; ".join(
        f"{owner}: {first_of(sorted(names), _SHOWN)}" for owner, names in weights.items()
    )


class SampleRows:
    """Samples of the steps of named updates, as the passes of a program's modules have them.

    An objective may call parts of a model on some inputs, on targets, or on what another part returns. So the
    samples of a step agree if all of the program's that are in the data are in the step's batch.
    """

    def __init__(self, program: ProgramTrace, batches: Iterable[Sequence[Hashes]]) -> None:
        """Finds the order of axes in which the program has more of the samples.

        Args:
            program: Trace of the program.
            batches: Hashes of each traced step, by replica.
        """
        known = set().union(*(step.rows() for step in program.steps))
        by_order: dict[str, set[int]] = {}
        for replicas in batches:
            for hashes in replicas:
                for key, rows in hashes.items():
                    by_order.setdefault(key.partition(" ")[0], set()).update(rows)
        self._order = max(by_order, key=lambda order: len(by_order[order] & known))
        self._data = by_order[self._order]
        self._is_known = bool(self._data & known)

    def of_step(self, step: GlobalStep | None, replicas: Sequence[Hashes]) -> list[list[int]]:
        """The samples of a step by replica: those of the program's step if they agree, else the batch's.

        Args:
            step: The step of the program; None where it has none.
            replicas: Hashes of the step's batch.
        """
        of_program = Counter[int]() if step is None else step.rows()
        whole = [list(hashes[f"{self._order} "]) for hashes in replicas]
        if not self._is_known:
            return whole
        seen = of_program.keys() & self._data
        if not seen:
            return [[] for _ in replicas]
        everything = [
            {row for key, rows in hashes.items() if key.startswith(self._order) for row in rows}
            for hashes in replicas
        ]
        if not seen <= set().union(*everything):
            return whole
        rows: list[list[int]] = [[] for _ in replicas]
        for row, count in of_program.items():
            owner = next((i for i, each in enumerate(everything) if row in each), 0)
            rows[owner] += [row] * count
        return rows
