"""Training and evaluation metrics of one torch replica, and its evaluation loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from isotrain.adapters.common import spec_components
from isotrain.adapters.torch.base.tensors import to_numpy
from isotrain.adapters.torch.metrics.base import MeasuredPredictions, Metric, collect
from isotrain.adapters.torch.replica.loss_weighting import EvaluationLoss
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import Phase, Slice, unweighted


class MetricCollection:
    """Metric accumulators of one replica; knows nothing of other replicas.

    Attributes:
        training: Metrics of the training phase.
    """

    def __init__(self, trainer: ReplicaTrainer, losses: int, device: torch.device) -> None:
        """Starts with no samples.

        Args:
            trainer: Trainer of the replica.
            losses: Number of losses that the spec has.
            device: Device of the accumulators.
        """
        self._trainer = trainer
        self.training = trainer.build_metrics("train")
        self._evaluation = trainer.build_metrics("evaluation")
        self._evaluation_loss = EvaluationLoss(losses, device)

    def train(self, micro_batch: Slice, predictions: Any) -> None:
        """Adds the predictions for a slice that was trained on to the training metrics."""
        if self.training:
            _update(self.training, micro_batch, predictions)

    def evaluate(self, micro_batch: Slice) -> None:
        """Computes loss and predictions of a slice in evaluation mode, and adds them.

        A placeholder, a slice of count 0, is computed only where metrics build their sums from the first
        predictions they see, or where the objective may communicate.
        """
        objective = self._trainer.objective
        is_computed = micro_batch.count or (objective is not None and objective.step is not None)
        if not is_computed and not any(metric.is_unbuilt for metric in self._evaluation):
            return
        loss, predictions = self._trainer.evaluate(micro_batch.inputs, micro_batch.targets)
        if micro_batch.count:
            self._evaluation_loss.add(loss, micro_batch.count)
        _update(self._evaluation, micro_batch, predictions)

    def collect(
        self, phase: Phase, total: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, float]:
        """Metrics of a phase over the samples of all replicas; resets the accumulators. Collective.

        Args:
            phase: Phase of the metrics.
            total: All-reduce sum, of a tensor of any shape, over all replicas.
        """
        if phase == "train":
            return collect(self.training, total)
        return {"loss": self._evaluation_loss.pop_mean(total)} | collect(self._evaluation, total)

    def pop_sums(self) -> np.ndarray:
        """Sums of the training metrics as one float64 vector; resets them."""
        for metric in self.training:
            metric.require_sums()
        sums = [to_numpy(total).ravel() for total in self.sums()]
        for metric in self.training:
            metric.reset()
        return np.concatenate([np.zeros(0), *sums]).astype(np.float64)

    def add_sums(self, sums: np.ndarray) -> None:
        """Adds a vector from `pop_sums` of another replica to the sums of the training metrics."""
        start = 0
        for total in self.sums():
            addend = torch.from_numpy(sums[start : start + total.numel()]).to(total)
            total += addend.reshape(total.shape)
            start += total.numel()

    def sums(self, phase: Phase = "train") -> list[torch.Tensor]:
        """Accumulators of a phase, of any shapes: those of the metrics, and of the evaluation loss."""
        losses = [] if phase == "train" else [self._evaluation_loss.sums]
        return losses + [total for metric in self._of_phase(phase) for total in metric.sums]

    def _of_phase(self, phase: Phase) -> list[Metric]:
        return self.training if phase == "train" else self._evaluation

    @contextlib.contextmanager
    def measuring(self, phase: Phase) -> Iterator[Callable[[], list[torch.Tensor]]]:
        """Context that leaves the accumulators of a phase as they were.

        Its function returns what was added to them since the context began, or since its last call.
        """
        totals = self.sums(phase)
        before = [(total, total.clone()) for total in totals]
        for total in totals:
            total.zero_()
        is_built = not any(metric.is_unbuilt for metric in self._of_phase(phase))

        def added() -> list[torch.Tensor]:
            nonlocal totals
            if not is_built:  # looking them up takes longer than copying them
                totals = self.sums(phase)
            copies = [total.clone() for total in totals]
            for total in totals:
                total.zero_()
            return copies

        try:
            yield added
        finally:
            for total, value in before:
                total.copy_(value)


def _update(metrics: Sequence[Metric], micro_batch: Slice, predictions: Any) -> None:
    if isinstance(predictions, MeasuredPredictions):
        if micro_batch.count:
            with torch.no_grad():
                predictions.add_to(metrics)
        metrics, predictions = predictions.others(metrics), predictions.predictions
    spec_components.require_predictions(metrics, predictions)
    plain, _ = unweighted(micro_batch.targets)
    with torch.no_grad():
        for metric in metrics:
            targets = micro_batch.targets if metric.takes_weights else plain
            if micro_batch.count:
                metric.update(targets, predictions, micro_batch.count)
            elif metric.is_unbuilt:
                metric.ensure_built(targets, predictions)
