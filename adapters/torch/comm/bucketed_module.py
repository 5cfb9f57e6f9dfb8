"""DistributedDataParallel for gradients without values, whose memory it would read and write itself."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from isotrain.adapters.torch.base import private_api

_MIB = 2**20


class BucketedModule(nn.Module):
    """A module whose gradients are all-reduced in the buckets that DistributedDataParallel would make.

    As there, the first all-reduce has all gradients, and the buckets of later ones have them in the order in
    which the first backward pass made them. Where gradients may be missing, the buckets have them in the
    reverse order of the parameters from the start.
    """

    def __init__(
        self, module: nn.Module, limits_mib: Sequence[float], *, in_ready_order: bool
    ) -> None:
        """Wraps a module.

        Args:
            module: Module whose gradients are to be reduced: those of its parameters that require them now.
            limits_mib: Sizes in MiB at which the first bucket, the second and so on are closed; the last one
                holds for all others.
            in_ready_order: Whether the buckets are made again after the first backward pass.
        """
        super().__init__()
        self.module = module
        self._limits = [int(limit * _MIB) for limit in limits_mib]
        self._ready: dict[int, torch.Tensor] = {}
        self._hook: tuple[Any, Callable[[Any, Any], Any]] | None = None
        weights = [each for each in module.parameters() if each.requires_grad]
        first_limits = [sys.maxsize] if in_ready_order else self._limits
        self._buckets = private_api.ddp_buckets(weights, first_limits)[::-1]
        self._may_miss = [] if in_ready_order else weights
        self._listeners = [
            each.register_post_accumulate_grad_hook(self._note_ready)
            for each in (weights if in_ready_order else ())
        ]

    def _note_ready(self, weight: torch.Tensor) -> None:
        self._ready.setdefault(id(weight), weight)

    def forward(self, *arguments: Any) -> Any:
        """Calls the module."""
        return self.module(*arguments)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate: they always do, until `all_reduce`."""
        yield

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Lets a communication hook of DistributedDataParallel reduce each bucket."""
        self._hook = state, hook

    def all_reduce(self) -> None:
        """All-reduces the gradients, which stay as they are. Collective, after the last backward pass."""
        for index, weights in enumerate(self._buckets):
            bucket = _Bucket(index, weights, index == len(self._buckets) - 1)
            if self._hook is None:
                dist.all_reduce(bucket.buffer())
            else:
                state, hook = self._hook
                hook(state, bucket).wait()
        if self._may_miss:
            dist.all_reduce(torch.zeros(len(self._may_miss), dtype=torch.int32))
        if self._listeners:
            self._buckets = private_api.ddp_buckets([*self._ready.values()], self._limits)
            for listener in self._listeners:
                listener.remove()
            self._listeners.clear()


@dataclass(frozen=True)
class _Bucket:
    """Gradients that are all-reduced as one vector, with the methods of torch's `GradBucket`.

    Attributes:
        number: Index of the bucket.
        weights: Weights of any shapes, of one dtype.
        is_last_one: Whether it is the last bucket.
    """

    number: int
    weights: Sequence[torch.Tensor]
    is_last_one: bool

    def index(self) -> int:
        """Index of the bucket."""
        return self.number

    def is_last(self) -> bool:
        """Whether it is the last bucket."""
        return self.is_last_one

    def parameters(self) -> list[torch.Tensor]:
        """The weights, any shapes."""
        return list(self.weights)

    def gradients(self) -> list[torch.Tensor]:
        """Gradients in the shapes of the weights; zeros where there is none."""
        return [torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights]

    def buffer(self) -> torch.Tensor:
        """The gradients one after the other, a vector."""
        return torch.cat([each.reshape(-1) for each in self.gradients()])
