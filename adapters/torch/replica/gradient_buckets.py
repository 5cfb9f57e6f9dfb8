"""Reduces gradients bucket by bucket during the backward pass, and frees them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from isotrain.adapters.torch.replica.replica import TorchReplica
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import Reduction


class BucketedGradients:
    """Applies a reduction (as a reduce-scatter) to each bucket of the gradients in `.grad`, and frees these.

    All replicas reduce the buckets in the same order.
    """

    def __init__(
        self, trainer: ReplicaTrainer, replica: TorchReplica, reduction: Reduction
    ) -> None:
        """Prepares the buckets.

        Args:
            trainer: Trainer whose trainable weights have the gradients.
            replica: Handle that the reduction is given.
            reduction: Buckets, and the function that reduces one.
        """
        self._weights = list(trainer.trainable.values())
        self._replica = replica
        self._reduction = reduction
        self._reduced: list[list[torch.Tensor]] = [[] for _ in reduction.buckets]

    @property
    def reduced(self) -> list[torch.Tensor]:
        """Reduced tensors, of any shapes, of all buckets in order; added up over backward passes."""
        return [tensor for bucket in self._reduced for tensor in bucket]

    @contextlib.contextmanager
    def during_backward(self) -> Iterator[None]:
        """Context for one backward pass: reduces each bucket once it and all before it are complete."""
        pending = [set(bucket) for bucket in self._reduction.buckets]
        done = 0

        def mark_ready(index: int) -> None:
            nonlocal done
            for bucket in pending:
                bucket.discard(index)
            while done < len(pending) and not pending[done]:
                self._reduce_bucket(done)
                done += 1

        with contextlib.ExitStack() as hooks:
            for index, weight in enumerate(self._weights):
                hook = weight.register_post_accumulate_grad_hook(
                    lambda _, index=index: mark_ready(index)
                )
                hooks.callback(hook.remove)
            yield
        for number in range(done, len(pending)):
            self._reduce_bucket(number)

    def reduce_all(self) -> None:
        """Reduces every bucket, after the backward pass."""
        for number in range(len(self._reduced)):
            self._reduce_bucket(number)

    def _reduce_bucket(self, number: int) -> None:
        reduction = self._reduction
        weights = [self._weights[index] for index in reduction.buckets[number]]
        gradients = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights
        ]
        for weight in weights:
            weight.grad = None
        with torch.no_grad():
            results = reduction.reduce(self._replica, gradients, static=reduction.statics[number])
        totals = self._reduced[number]
        self._reduced[number] = (
            [total.add_(result) for total, result in zip(totals, results, strict=True)]
            if totals
            else results
        )
