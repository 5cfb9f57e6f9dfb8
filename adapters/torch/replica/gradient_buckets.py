"""Gradients that are taken over bucket by bucket while a backward pass makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from isotrain.adapters.torch.replica.handle import TorchReplica
from isotrain.adapters.torch.trainer.base import ReplicaTrainer
from isotrain.plugin import Reduction


class BucketedGradients:
    """What a reduction keeps of the gradients in `.grad`, which it lets go bucket by bucket."""

    def __init__(
        self, trainer: ReplicaTrainer, replica: TorchReplica, reduction: Reduction
    ) -> None:
        """Keeps nothing yet."""
        self._weights = list(trainer.trainable.values())
        self._replica = replica
        self._reduction = reduction
        self._kept: list[list[torch.Tensor]] = [[] for _ in reduction.buckets]

    @property
    def kept(self) -> list[torch.Tensor]:
        """What was kept of all buckets, in their order."""
        return [tensor for kept in self._kept for tensor in kept]

    @contextlib.contextmanager
    def during_backward(self) -> Iterator[None]:
        """Within it, a backward pass has each bucket taken as soon as it and those before it are complete."""
        waiting = [set(bucket) for bucket in self._reduction.buckets]
        taken = 0

        def note(place: int) -> None:
            nonlocal taken
            for bucket in waiting:
                bucket.discard(place)
            while taken < len(waiting) and not waiting[taken]:
                self._take(taken)
                taken += 1

        with contextlib.ExitStack() as hooks:
            for place, weight in enumerate(self._weights):
                hook = weight.register_post_accumulate_grad_hook(lambda _, place=place: note(place))
                hooks.callback(hook.remove)
            yield
        for number in range(taken, len(waiting)):
            self._take(number)

    def reduce_all(self) -> None:
        """Takes every bucket."""
        for number in range(len(self._kept)):
            self._take(number)

    def _take(self, number: int) -> None:
        reduction = self._reduction
        weights = [self._weights[place] for place in reduction.buckets[number]]
        gradients = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights
        ]
        for weight in weights:
            weight.grad = None
        with torch.no_grad():
            found = reduction.reduce(self._replica, gradients, static=reduction.statics[number])
        before = self._kept[number]
        self._kept[number] = (
            [one.add_(other) for one, other in zip(before, found, strict=True)] if before else found
        )
