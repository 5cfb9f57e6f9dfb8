"""Means over all replicas that are under way while their replica goes on: losses of local steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from isotrain.adapters.torch.base.private_api import without_memory
from isotrain.adapters.torch.comm.base import Wait

_MOST_UNDER_WAY = 64
"""Largest number of means under way: so many steps may a replica be ahead of the others."""


@dataclass(frozen=True)
class PendingMean:
    """Mean of a tensor over all replicas that may be waited for after collectives that were started later.

    Attributes:
        wait: Waits for the mean, and returns it. To be called once.
        is_completed: Returns whether `wait` would not wait.
        like: Tensor of the mean's dtype and device, any shape.
    """

    wait: Wait
    is_completed: Callable[[], bool]
    like: torch.Tensor

    def __call__(self) -> torch.Tensor:
        return self.wait()


def followed_by(mean: Wait, function: Callable[[torch.Tensor], torch.Tensor]) -> Wait:
    """Waits for a mean, and applies a function that keeps its dtype and device."""

    def wait() -> torch.Tensor:
        return function(mean())

    return replace(mean, wait=wait) if isinstance(mean, PendingMean) else wait


class LateMeans:
    """The means of a replica that are under way, in the order in which they were started."""

    def __init__(self) -> None:
        self._under_way: deque[LateScalar] = deque()

    def scalar(self, mean: Wait) -> torch.Tensor:
        """Scalar tensor of a mean: late if it is a `PendingMean` that is not completed. Local."""
        if not isinstance(mean, PendingMean) or mean.is_completed():
            return mean()
        under_way = self._under_way
        while under_way and (under_way[0].is_ready or len(under_way) == _MOST_UNDER_WAY):
            under_way.popleft().value()
        under_way.append(late := LateScalar.of(mean))
        return late

    def wait(self) -> None:
        """Waits for all of them. Local."""
        while self._under_way:
            self._under_way.popleft().value()


class LateScalar(torch.Tensor):
    """Scalar that may not be computed yet: the first function of torch that it is given to waits for it.

    Functions see the plain tensor with its value, and so do results. Shape, dtype and device are known
    before. It has no memory that torch could read past these functions.
    """

    _mean: PendingMean | None
    _value: torch.Tensor | None

    @classmethod
    def of(cls, mean: PendingMean) -> LateScalar:
        """The scalar of a mean."""
        late = without_memory(cls, mean.like.dtype, mean.like.device)
        late._mean, late._value = mean, None
        return late

    @property
    def is_ready(self) -> bool:
        """Whether `float` returns without waiting for other replicas."""
        return self._mean is None or self._mean.is_completed()

    def value(self) -> torch.Tensor:
        """The plain scalar. Waits for it."""
        if self._mean is not None:
            self._value, self._mean = self._mean(), None
        assert self._value is not None
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _KNOWN_BEFORE:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*_plain(args), **_plain(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls torch with the value for what it reads besides, as of a number for `torch.full`."""
        return func(*_plain(args), **_plain(kwargs or {}))


_KNOWN_BEFORE = {
    torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__,
    torch.Tensor.device.__get__,
}


def _plain(argument: Any) -> Any:
    """An argument with plain tensors in place of late ones, in tuples, lists and dicts too."""
    if isinstance(argument, LateScalar):
        return argument.value()
    if type(argument) in (tuple, list):
        return type(argument)(map(_plain, argument))
    if isinstance(argument, dict):
        return {name: _plain(value) for name, value in argument.items()}
    return argument
