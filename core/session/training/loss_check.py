"""Check that the loss of a batch is the mean of the losses of its parts, as data parallelism needs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.group_hooks import Trait
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.pytree import leaves, map_parts
from isotrain.core.data.refusals import LOSS, RefusedError
from isotrain.core.data.sources import collates
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.errors import UnsupportedError
from isotrain.core.session.training.consensus import Consensus
from isotrain.core.session.training.context import SessionContext
from isotrain.core.spec.training_spec import TrainingSpec

_BATCH_LOSSES = ("circle", "dice", "tversky")
"""Keras losses that are no mean over samples: they mix the samples of a batch."""
_TOLERANCES = {"float64": 1e-6, "float32": 2e-3}
_LOW_PRECISION_TOLERANCE = 5e-2
_MAX_SAMPLES = 64
_REPEATS = 7
_DEVIATIONS = 6.0
"""Standard deviations of the mean that random losses hardly ever exceed."""
_NOT_EVALUATED = (
    "whether the loss is a mean over samples is not known, as it cannot be evaluated ({}). If it is not one,"
    f" results depend on the number of replicas. `ignore: [{LOSS}]` in the spec silences this."
)
_NORMALIZED = (
    "whether the loss is a mean over samples is not known, as the objective calls the model in training mode"
    " also where the step evaluates: {} normalizes by the statistics of each slice (ISO101), and for that"
    " alone the loss of a batch may differ from the mean of those of its parts."
    f" `ignore: [{LOSS}]` in the spec silences this."
)
_STATISTICS = (Trait.LOCAL_STATISTICS, Trait.GLOBAL_STATISTICS)


_PADDED = (
    ", which are padded to widths of their own. Does the loss count padding, or does padding reach other"
    " predictions? Losses with ignore_class, masks or isotrain.weighted leave it out; or pad to one length"
)


def is_known_mean(spec: TrainingSpec, framework: str) -> bool:
    """Whether all losses for the framework are built-in ones that are a mean over samples."""
    losses = spec.losses(framework).values()
    return bool(losses) and not any(
        loss.is_reference or "reduction" in loss.options or str(loss.name).lower() in _BATCH_LOSSES
        for loss in losses
    )


class LossCheck:
    """Compares the loss of a batch with the mean over its parts. Collective.

    Attributes:
        is_due: Whether the check is to run before the first step.
    """

    def __init__(self, session_context: SessionContext, reporter: Reporter) -> None:
        spec, plan = session_context.spec, session_context.plan
        self._group, self._strategy = session_context.group, session_context.strategy
        self._reporter = reporter
        self._loaders = session_context.loaders
        train = self._loaders.data.train
        self._is_collated = collates(train) and not isinstance(train, BatchStream)
        self._is_mean = not self._is_collated and all(
            is_known_mean(each, plan.framework) for each in spec.update_specs.values()
        )
        self._tolerance = _TOLERANCES.get(spec.precision, _LOW_PRECISION_TOLERANCE)
        is_divided = plan.replicas > 1 or spec.gradient_accumulation_steps > 1
        self.is_due = is_divided and not self._is_mean and not spec.silences(LOSS)

    def require_mean(self, batch: Batch) -> None:
        """Checks, before the first step, that the loss of a batch is the mean over its parts.

        Raises:
            RefusedError: It is not.
        """
        self.is_due = False
        with self._reporter.doing("try loss"):
            try:
                difference = self.difference(batch)
            except UnsupportedError as error:
                if self._reporter.rank == 0:
                    self._reporter.warn(str(error))
                return
            if difference is not None:
                raise RefusedError(LOSS, difference)

    def difference(self, batch: Batch) -> str | None:
        """Describes how the loss of a batch differs from the mean over its parts; None if it does not.

        The training state stays as it was. The loss is computed in evaluation mode: no dropout, no batch
        normalization over the batch, unless the objective itself calls the model in training mode. On a
        difference it is evaluated several times, so that a loss that draws random numbers counts as different
        only if it differs by more than it varies.

        Raises:
            UnsupportedError: The loss cannot be evaluated, or by a normalization over the batch only.
        """
        if self._is_mean:
            return None
        count = min(self._loaders.samples_per_epoch or 0, _MAX_SAMPLES)
        is_collated = self._is_collated and count > 1
        whole, parts = (
            self._collated_batches(batch, count)
            if is_collated
            else _trial_batches(self._group, batch)
        )
        with self._group.preserving_training_state():
            loss = self._loss([whole])
            if self._group.objective_communicates():
                return None
            mean = self._loss(parts)
            if not abs(loss - mean) > self._tolerance * max(abs(loss), abs(mean)):
                return None
            before = self._moving_state()
            losses = [loss, *(self._loss([whole]) for _ in range(_REPEATS))]
            means = [mean, *(self._loss(parts) for _ in range(_REPEATS))]
            moved = [n for n, v in self._moving_state().items() if not np.array_equal(v, before[n])]
        deviation = math.sqrt((np.var(losses) + np.var(means)) / _REPEATS)
        if not abs(np.mean(losses) - np.mean(means)) > _DEVIATIONS * deviation:
            return None
        if moved:
            raise UnsupportedError(
                _NORMALIZED.format(self._normalizing_layers() or ", ".join(moved))
            )
        difference = (
            f"the loss of a batch is {loss:.6g}, the mean of those of its two parts {mean:.6g}"
        )
        return difference + (_PADDED if is_collated else "")

    def _collated_batches(self, batch: Batch, count: int) -> tuple[Batch, tuple[Batch, Batch]]:
        """A batch of the first samples, on all replicas, and those that a third and the rest of them make."""
        cut = max(1, count // 3)
        whole, first, rest = (
            replace(
                batch, slices=((self._loaders.first_samples(*rows, count),),) * len(batch.slices)
            )
            for rows in ((0, count), (0, cut), (cut, count))
        )
        return whole, (first, rest)

    def _moving_state(self) -> dict[str, np.ndarray]:
        """Moving statistics and other non-trainable numbers, any shape, by name. Local."""
        state = self._group.read_state(("non-trainable",))
        return {name: array for name, array in state.items() if array.dtype.kind == "f"}

    def _normalizing_layers(self) -> str:
        traits = [each for each in self._group.traits() if each.trait in _STATISTICS]
        return ", ".join(f"{each.layer} ({each.kind})" for each in traits)

    def _loss(self, batches: Sequence[Batch]) -> float:
        """Mean loss in evaluation mode over all replicas' samples of the batches. Collective."""
        failure: Exception | None = None
        with self._strategy.evaluating(self._group):
            try:
                for batch in batches:
                    self._group.evaluation_step(batch)
            except Exception as error:  # a custom loss may raise anything
                failure = error
        failed = Consensus(self._group).any_process(failure is not None)
        if not failed:
            return self._group.collect_metrics("evaluation")["loss"]
        reason = "on another process" if failure is None else f"{type(failure).__name__}: {failure}"
        raise UnsupportedError(_NOT_EVALUATED.format(reason.strip()[:400])) from failure


def _trial_batches(group: ReplicaGroup, batch: Batch) -> tuple[Batch, tuple[Batch, Batch]]:
    """A batch of some samples of each local replica, and the same samples split into a third and the rest."""
    samples = [_samples(group, micro_batches[0]) for micro_batches in batch.slices]
    cuts = [max(1, each.count // 3) for each in samples]
    firsts = [_rows(each, 0, cut) for each, cut in zip(samples, cuts, strict=True)]
    rests = [_rows(each, cut, each.count) for each, cut in zip(samples, cuts, strict=True)]
    whole, first, rest = (
        replace(batch, slices=tuple((each,) for each in slices))
        for slices in (samples, firsts, rests)
    )
    return whole, (first, rest)


def _samples(group: ReplicaGroup, micro_batch: Slice) -> Slice:
    """The first samples of a micro-batch; a single sample is repeated, so that there are at least two."""
    _, first = next(leaves((micro_batch.inputs, micro_batch.targets), "samples"))
    count = min(len(first), _MAX_SAMPLES)
    if count > 1:
        return _rows(micro_batch, 0, count)

    def twice(leaf: Any) -> Any:
        array = leaf if isinstance(leaf, np.ndarray) else group.numpy(leaf)
        return group.to_device(np.repeat(array, 2, axis=0))

    return Slice(*map_parts(twice, (micro_batch.inputs, micro_batch.targets)), 2, 1.0)


def _rows(micro_batch: Slice, start: int, stop: int) -> Slice:
    """Samples `start` to `stop` of a micro-batch."""

    parts = micro_batch.inputs, micro_batch.targets
    rows = map_parts(lambda leaf: leaf[start:stop], parts)
    return Slice(*rows, stop - start, 1.0, micro_batch.first + start)
