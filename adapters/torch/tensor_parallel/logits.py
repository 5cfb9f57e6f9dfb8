"""Losses and metrics of a native model's logits, of which each part of a replica has some columns.

Vocabulary-parallel cross-entropy: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3. It is not
torch's `loss_parallel`, to which a target that is no class is one with a loss of 0, and which takes neither
target probabilities nor label smoothing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from isotrain.adapters.common import class_targets
from isotrain.adapters.keras.tensor_parallel.whole_logits import (
    SPARSE,
    gathering_metrics,
    named_loss,
)
from isotrain.adapters.torch.base.require_all import require_all
from isotrain.adapters.torch.loss.functional import Masked
from isotrain.adapters.torch.loss.per_output import NamedLoss
from isotrain.adapters.torch.loss.total import TotalLoss
from isotrain.adapters.torch.metrics.base import inferred_accuracy
from isotrain.adapters.torch.tensor_parallel.parts import TorchParts
from isotrain.plugin import SpecError, TrainingSpec


class CutLogits:
    """The logits of a native model, of which this process has the columns of some classes."""

    def __init__(self, spec: TrainingSpec, module: str, count: int, parts: TorchParts) -> None:
        """Takes a spec whose loss does not need whole logits.

        Args:
            spec: Training spec.
            module: Name of the module of the logits, for messages.
            count: Number of classes of each process.
            parts: The parts of the replica.
        """
        self._spec = spec
        self._module = module
        self._parts = parts
        self._count = count
        self._start, self._classes = count * parts.index, count * parts.degree
        self._are_measured_whole = bool(gathering_metrics(spec))

    def compute(self, loss: TotalLoss) -> None:
        """Lets a loss compute from this process's columns."""
        (named,), (name, options) = loss.per_output, named_loss(self._spec, "torch")
        assert isinstance(named, NamedLoss)
        if name == SPARSE:
            named.compute_by(functools.partial(self._of_classes, options.get("ignore_class")))
        else:
            smoothing = options.get("label_smoothing", 0.0)
            named.compute_by(functools.partial(self._of_probabilities, smoothing))

    def measured(self, predictions: Any) -> Any:
        """Predictions for metrics: the columns, or whole logits without gradients. Collective."""
        return self.gather(predictions.detach()) if self._are_measured_whole else predictions

    def gather(self, predictions: Any) -> Tensor:
        """The whole logits, shape `[..., classes]`. Collective.

        Args:
            predictions: What the model returned: logits of this process's classes, shape `[..., count]`.

        Raises:
            SpecError: The model returned something else.
        """
        if not isinstance(predictions, Tensor) or predictions.shape[-1] != self._count:
            received = getattr(predictions, "shape", type(predictions).__name__)
            raise SpecError(
                f"strategy tensor: layers: {self._module}: expected the model to return the outputs of this"
                f" module, {self._count} numbers a position on each process, received {received}. Take"
                " colwise-gather."
            )
        after = self._classes - self._start - self._count
        return self._parts.sum(functional.pad(predictions, (self._start, after)))

    def accuracy(self, targets: Tensor, logits: Tensor) -> Tensor:
        """Accuracy per position, as `inferred_accuracy` has it, shape `[...]`. Collective for columns.

        Args:
            targets: Classes, shape `[...]` or `[..., 1]`, or probabilities, shape `[..., classes]`.
            logits: Logits of this process's classes, shape `[..., count]`, or of all of them.
        """
        if logits.shape[-1] == self._classes:
            return inferred_accuracy(targets, logits)
        own, index = logits.detach().max(-1)
        is_highest = own == self._parts.max(own)
        rank = torch.where(
            is_highest, self._classes - self._start - index, 0
        )  # of equal ones the first
        predicted = self._classes - self._parts.max(rank)
        if targets.dim() < logits.dim() or targets.shape[-1] == 1:
            expected = _classes(targets, logits)
        else:
            expected = targets.argmax(-1)
        return (predicted == expected).to(torch.float32)

    def _of_classes(self, ignored: int | None, targets: Tensor, columns: Tensor) -> Tensor | Masked:
        """Cross-entropy with target classes, shape `[...]`. Collective.

        Args:
            ignored: Class of targets that do not count; None: all count.
            targets: Classes, shape `[...]` or `[..., 1]`.
            columns: Logits of this process's classes, shape `[..., count]`.
        """
        classes = _classes(targets, columns)
        counts = (
            torch.ones_like(classes, dtype=torch.bool) if ignored is None else classes != ignored
        )
        classes = classes.where(counts, 0)
        require_all(
            (classes >= 0) & (classes < self._classes),
            classes,
            class_targets.expectation("loss", SPARSE, self._classes),
        )
        shifted = self._shifted(torch.where(counts.unsqueeze(-1), columns, 0.0))
        is_local = (classes >= self._start) & (classes < self._start + self._count)
        index = torch.where(is_local, classes - self._start, 0)
        chosen = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        total, score = self._sums(shifted, chosen.where(is_local, 0.0))
        values = total.log() - score
        return values if ignored is None else Masked(values.where(counts, 0.0), counts)

    def _of_probabilities(self, smoothing: float, targets: Tensor, columns: Tensor) -> Tensor:
        """Cross-entropy with target probabilities, shape `[...]`. Collective.

        Args:
            smoothing: Fraction of the probability that is spread over all classes.
            targets: Probabilities, shape `[..., classes]`.
            columns: Logits of this process's classes, shape `[..., count]`.
        """
        expected = (*columns.shape[:-1], self._classes)
        if targets.shape != expected:
            raise SpecError(
                f"loss: categorical_crossentropy: expected targets of shape {[*expected]}, as the logits,"
                f" received {[*targets.shape]}."
            )
        targets = targets.to(columns.dtype)
        if smoothing:
            targets = targets * (1.0 - smoothing) + smoothing / self._classes
        shifted = self._shifted(columns)
        local = targets.narrow(-1, self._start, self._count)
        total, score = self._sums(shifted, (local * shifted).sum(-1))
        return total.log() * targets.sum(-1) - score

    def _shifted(self, columns: Tensor) -> Tensor:
        """Logits of this process's classes less the largest one of all classes. Collective."""
        return columns - self._parts.max(columns.amax(-1)).unsqueeze(-1)

    def _sums(self, shifted: Tensor, score: Tensor) -> tuple[Tensor, ...]:
        """Sums over all classes, shape `[...]`: of exponentials of `shifted`, and of scores. Collective."""
        return self._parts.sum(torch.stack([shifted.exp().sum(-1), score])).unbind()


def _classes(targets: Tensor, logits: Tensor) -> Tensor:
    """Targets, shape `[...]` or `[..., 1]`, as int64 `[...]`, for logits of shape `[..., count]`.

    Raises:
        SpecError: They have another shape.
    """
    if targets.dim() == logits.dim() and targets.shape[-1] == 1:
        targets = targets.squeeze(-1)
    if targets.shape != logits.shape[:-1]:
        raise SpecError(
            f"loss or metric: expected a class for each position, shape {[*logits.shape[:-1]]}, received"
            f" targets of shape {[*targets.shape]}. Change the shape in the data or at the end of the model."
        )
    return targets.long()
