"""Whether the loss of a batch is the mean of the losses of its parts, as several replicas need it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.pytree import leaves, map_tree
from isotrain.core.data.refusals import LOSS, RefusedError
from isotrain.core.errors import UnsupportedError
from isotrain.core.session.training.consensus import Consensus
from isotrain.core.session.training.context import SessionContext
from isotrain.core.spec.training_spec import TrainingSpec

_OVER_THE_BATCH = ("circle", "dice", "tversky")
"""Losses of Keras that mix the samples of a batch."""
_TOLERANCES = {"float64": 1e-6, "float32": 2e-3}
_ROUGH = 5e-2
_MOST_ROWS = 64
_REPEATS = 7
_DEVIATIONS = 6.0
"""Of the mean of several evaluations, which random numbers hardly ever reach."""
_UNTRIED = (
    "whether the loss is a mean over samples is not known, as it cannot be evaluated ({}). If it is none,"
    f" results depend on the number of replicas. `ignore: [{LOSS}]` in the spec silences this."
)


def is_known_mean(spec: TrainingSpec, framework: str) -> bool:
    """Whether the losses for a framework are named ones, each a mean over samples."""
    losses = spec.losses(framework).values()
    return bool(losses) and not any(
        loss.is_reference
        or "reduction" in loss.options
        or str(loss.name).lower() in _OVER_THE_BATCH
        for loss in losses
    )


class LossCheck:
    """Evaluates the loss of a batch as a whole and in parts; every process calls it alike."""

    def __init__(self, session_context: SessionContext, reporter: Reporter) -> None:
        spec, plan = session_context.spec, session_context.plan
        self._group, self._strategy = session_context.group, session_context.strategy
        self._reporter = reporter
        self._is_known = is_known_mean(spec, plan.framework)
        self._tolerance = _TOLERANCES.get(spec.precision, _ROUGH)
        is_divided = plan.replicas > 1 or spec.gradient_accumulation_steps > 1
        self.is_due = is_divided and not self._is_known and not spec.silences(LOSS)

    def require_mean(self, batch: Batch) -> None:
        """Makes sure, before the first step, that the parts of a batch make up its loss.

        Raises:
            RefusedError: They do not.
        """
        self.is_due = False
        with self._reporter.doing("try loss"):
            try:
                found = self.difference(batch)
            except UnsupportedError as error:
                if self._reporter.rank == 0:
                    self._reporter.warn(str(error))
                return
            if found is not None:
                raise RefusedError(LOSS, found)

    def difference(self, batch: Batch) -> str | None:
        """Says how the loss of a batch differs from the mean over its parts; leaves everything as it was.

        Losses are those of evaluation mode, where layers neither drop units nor normalise over the batch. A
        loss that draws random numbers is evaluated several times, and differs only by more than it varies.

        Raises:
            UnsupportedError: The loss cannot be evaluated.
        """
        if self._is_known:
            return None
        whole, parts = _trial_batches(self._group, batch)
        with self._group.preserving_training_state():
            one, other = self._loss([whole]), self._loss(parts)
            if not abs(one - other) > self._tolerance * max(abs(one), abs(other)):
                return None
            wholes = [one, *(self._loss([whole]) for _ in range(_REPEATS))]
            means = [other, *(self._loss(parts) for _ in range(_REPEATS))]
        deviation = math.sqrt((np.var(wholes) + np.var(means)) / _REPEATS)
        if not abs(np.mean(wholes) - np.mean(means)) > _DEVIATIONS * deviation:
            return None
        return f"the loss of a batch is {one:.6g}, the mean of those of its two parts {other:.6g}"

    def _loss(self, batches: Sequence[Batch]) -> float:
        """The evaluated loss over all replicas' samples of some batches."""
        failure: Exception | None = None
        with self._strategy.evaluating(self._group):
            try:
                for batch in batches:
                    self._group.evaluation_step(batch)
            except Exception as error:  # a person's functions raise anything
                failure = error
        failed = Consensus(self._group).any_process(failure is not None)
        if not failed:
            return self._group.collect_metrics("evaluation")["loss"]
        reason = "on another process" if failure is None else f"{type(failure).__name__}: {failure}"
        raise UnsupportedError(_UNTRIED.format(reason.strip()[:400])) from failure


def _trial_batches(group: ReplicaGroup, batch: Batch) -> tuple[Batch, tuple[Batch, Batch]]:
    """Samples of each replica here as a batch, and the same in two batches, of a third and the rest."""
    own = [_samples(group, pieces[0]) for pieces in batch.slices]
    cuts = [max(1, each.count // 3) for each in own]
    firsts = [_rows(each, 0, cut) for each, cut in zip(own, cuts, strict=True)]
    rests = [_rows(each, cut, each.count) for each, cut in zip(own, cuts, strict=True)]
    whole, first, rest = (
        replace(batch, slices=tuple((each,) for each in pieces)) for pieces in (own, firsts, rests)
    )
    return whole, (first, rest)


def _samples(group: ReplicaGroup, piece: Slice) -> Slice:
    """The first samples of a slice; of a single one, that one twice."""
    _, first = next(leaves((piece.inputs, piece.targets), "samples"))
    count = min(len(first), _MOST_ROWS)
    if count > 1:
        return _rows(piece, 0, count)

    def twice(leaf: Any) -> Any:
        array = leaf if isinstance(leaf, np.ndarray) else group.numpy(leaf)
        return group.to_device(np.repeat(array, 2, axis=0))

    targets = None if piece.targets is None else map_tree(twice, piece.targets)
    return Slice(map_tree(twice, piece.inputs), targets, 2, 1.0)


def _rows(piece: Slice, start: int, stop: int) -> Slice:
    def part(leaf: Any) -> Any:
        return leaf[start:stop]

    targets = None if piece.targets is None else map_tree(part, piece.targets)
    return Slice(map_tree(part, piece.inputs), targets, stop - start, 1.0)
