"""Losses and metrics of logits of which each part of a replica has some columns: those of some classes.

Vocabulary-parallel cross-entropy: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.
Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import keras
from keras import ops

from isotrain.adapters.common import class_targets
from isotrain.adapters.common.class_targets import RequireAll
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.metrics import inferred_accuracy, require_fit
from isotrain.adapters.keras.model import LossComputer
from isotrain.adapters.keras.tensor_parallel.parts import Parts, part_bounds
from isotrain.adapters.keras.tensor_parallel.whole_logits import (
    SPARSE,
    gathering_metrics,
    named_loss,
)
from isotrain.plugin import TrainingSpec


class CutLogits:
    """The logits of a model, of which this process has the columns of some classes.

    Attributes:
        classes: Number of classes.
    """

    def __init__(
        self, spec: TrainingSpec, classes: int, parts: Parts, require_all: RequireAll
    ) -> None:
        """Takes a spec for which `why_whole` has no reason.

        Args:
            spec: Training spec.
            classes: Number of classes.
            parts: The parts of the replica.
            require_all: Check of the framework, for targets that are no class.
        """
        self.classes = classes
        self._parts = parts
        self._start, self._count = part_bounds(classes, parts)
        self._require_all = require_all
        self._are_measured_whole = bool(gathering_metrics(spec))

    def compute(self, computer: LossComputer, spec: TrainingSpec, framework: str) -> LossComputer:
        """Lets a loss computer compute with this process's columns.

        Args:
            computer: Loss computer of a model that returns this process's columns.
            spec: Training spec, for the options of the loss.
            framework: Framework whose loss is used.

        Returns:
            A loss computer whose predictions, for metrics, are the columns, or the whole logits without
            gradients where a metric takes these.
        """
        (loss,) = computer.losses.values()
        loss.loss = _CutCrossentropy(self, loss.loss, *named_loss(spec, framework))
        if not self._are_measured_whole:
            return computer

        def compute(inputs: Any, targets: Any) -> tuple[Any, Any]:
            value, logits = computer(inputs, targets)
            return value, self.gather(ops.stop_gradient(logits))

        return replace(computer, compute=compute)

    def gather(self, columns: Any) -> Any:
        """The whole logits, shape `[..., classes]`, with their mask. Collective.

        Args:
            columns: Logits of this process's classes, shape `[..., count]`.
        """
        after = self.classes - self._start - self._count
        padding = [(0, 0)] * (len(columns.shape) - 1) + [(self._start, after)]
        whole = self._parts.sum(ops.pad(columns, padding))
        keras_private.set_mask(whole, keras_private.mask_of(columns))
        return whole

    def accuracy(self, targets: Any, logits: Any) -> Any:
        """Accuracy per position, as `inferred_accuracy` has it, shape `[...]`. Collective for columns.

        Args:
            targets: Classes, shape `[...]` or `[..., 1]`, or probabilities, shape `[..., classes]`.
            logits: Logits of this process's classes, shape `[..., count]`, or of all of them.
        """
        if logits.shape[-1] == self.classes:
            return inferred_accuracy(targets, logits)
        local = ops.stop_gradient(logits)
        own = ops.max(local, axis=-1)
        highest = self._parts.max(own)
        index = ops.cast(ops.argmax(local, axis=-1), "int64") + self._start
        from_end = ops.where(ops.equal(own, highest), self.classes - index, 0)
        first = self._parts.max(ops.cast(from_end, "float64"))  # of equally high ones
        predicted = self.classes - ops.cast(first, "int64")
        is_sparse = len(targets.shape) < len(logits.shape) or targets.shape[-1] == 1
        expected = self._squeezed(targets, logits) if is_sparse else ops.argmax(targets, axis=-1)
        return ops.cast(ops.equal(predicted, ops.cast(expected, "int64")), keras.config.floatx())

    def of_classes(self, targets: Any, columns: Any, ignore_class: int | None = None) -> Any:
        """Cross-entropy with target classes, shape `[...]`, with a mask as Keras' own. Collective.

        Args:
            targets: Classes, shape `[...]` or `[..., 1]`, numbers of any dtype.
            columns: Logits of this process's classes, shape `[..., count]`.
            ignore_class: Class of targets that do not count; None: all count.
        """
        targets = ops.cast(self._squeezed(targets, columns), "int64")
        counts = None
        if ignore_class is not None:
            counts = ops.not_equal(targets, ignore_class)
            targets = ops.where(counts, targets, 0)
            columns = ops.where(ops.expand_dims(counts, -1), columns, 0)
        is_class = ops.logical_and(targets >= 0, targets < self.classes)
        expectation = class_targets.expectation("loss", SPARSE, self.classes)
        self._require_all(is_class, targets, expectation)
        shifted = self._shifted(columns)
        is_local = ops.logical_and(targets >= self._start, targets < self._start + self._count)
        index = ops.where(is_local, targets - self._start, 0)
        chosen = ops.take_along_axis(shifted, ops.expand_dims(index, -1), axis=-1)[..., 0]
        total, score = self._sums(shifted, ops.where(is_local, chosen, 0))
        losses = ops.log(total) - score
        if counts is not None:
            losses = ops.where(counts, losses, 0)
            keras_private.set_mask(losses, counts)
        return losses

    def of_probabilities(self, targets: Any, columns: Any, smoothing: float = 0.0) -> Any:
        """Cross-entropy with target probabilities, shape `[...]`. Collective.

        Args:
            targets: Probabilities, shape `[..., classes]`.
            columns: Logits of this process's classes, shape `[..., count]`.
            smoothing: Fraction of the probability that is spread over all classes.
        """
        targets = ops.cast(targets, columns.dtype)
        if smoothing:
            targets = targets * (1.0 - smoothing) + smoothing / self.classes
        local = targets[..., self._start : self._start + self._count]
        shifted = self._shifted(columns)
        total, score = self._sums(shifted, ops.sum(local * shifted, axis=-1))
        return ops.log(total) * ops.sum(targets, axis=-1) - score

    def _shifted(self, columns: Any) -> Any:
        """Logits of this process's classes less the largest one of all classes. Collective."""
        highest = self._parts.max(ops.stop_gradient(ops.max(columns, axis=-1)))
        return columns - ops.expand_dims(highest, -1)

    def _sums(self, shifted: Any, score: Any) -> list[Any]:
        """Sums over all classes, shape `[...]`: of exponentials of `shifted`, and of scores. Collective."""
        own = ops.stack([ops.sum(ops.exp(shifted), axis=-1), score])
        return list(ops.unstack(self._parts.sum(own), 2))

    @staticmethod
    def _squeezed(targets: Any, logits: Any) -> Any:
        """Classes of shape `[...]` or `[..., 1]` as `[...]`, for logits of shape `[..., count]`."""
        is_column = len(targets.shape) == len(logits.shape)
        return ops.squeeze(targets, axis=-1) if is_column else targets


class _CutCrossentropy(keras.losses.Loss):
    """A cross-entropy of Keras, from this process's columns of the logits; the same on all parts."""

    def __init__(
        self, logits: CutLogits, loss: keras.losses.Loss, name: str, options: Mapping[str, Any]
    ) -> None:
        super().__init__(name=loss.name, reduction=loss.reduction, dtype=loss.dtype)
        self._logits = logits
        self._is_sparse = name == SPARSE
        self._kind = type(loss).__name__
        self._ignored = options.get("ignore_class")
        self._smoothing = options.get("label_smoothing", 0.0)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Cross-entropy per position, from targets in Keras' form and columns `[..., count]`. Collective."""
        whole = SimpleNamespace(shape=(*y_pred.shape[:-1], self._logits.classes))
        require_fit("loss", self.name, self._kind, y_true, whole)
        if self._is_sparse:
            return self._logits.of_classes(y_true, y_pred, self._ignored)
        return self._logits.of_probabilities(y_true, y_pred, self._smoothing)
