"""What is computed again in the backward pass on torch, so that nothing of it is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from isotrain.plugin import TrainingSpec


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a backward pass computes again, with the random numbers that torch drew first.

    To the end: what stops early raises, and Keras would explain that at length.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with set_checkpoint_early_stop(False):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    return call


def recompute(model: nn.Module, spec: TrainingSpec) -> None:
    """Has modules computed again in the backward pass, where the spec asks for it.

    Raises:
        SpecError: The spec names a module that is not there.
    """
    modules = {name: each for name, each in model.named_modules() if name and _can_be_called(each)}
    for name in spec.recomputed(modules, "."):
        modules[name].forward = _recomputed(modules[name])


def _can_be_called(module: nn.Module) -> bool:
    """Whether it computes something itself; lists of modules do not."""
    return type(module).forward is not nn.Module.forward


def _recomputed(module: nn.Module) -> Callable[..., Any]:
    block = _Block(module, module.forward)

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        return recomputed(_Twice(block))(*args, **kwargs)

    return forward


class _Block(nn.Module):
    """A module's own computation, apart from the module's `forward`, which is another by now."""

    def __init__(self, module: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.forward = compute

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that it draws by, but for torch's own."""
        values = (value for module in self.module.modules() for value in vars(module).values())
        return [value for value in values if isinstance(value, torch.Generator)]


class _Twice:
    """One call of a block that comes twice; what the block moves, it moves at the first time.

    What was given it twice is so again, by which attention sees that it is of an input to itself.
    """

    __name__ = "forward"

    def __init__(self, block: _Block) -> None:
        self._block = block
        self._buffers = {name: each.clone() for name, each in block.named_buffers()}
        self._drawn = [each.get_state() for each in block.generators]
        self._is_first = True
        self._given: list[int] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if self._is_first:
            self._is_first = False
            objects = list(map(id, given))
            self._given = [objects.index(one) for one in objects]
            return self._block(*args, **kwargs)
        given = [given[place] for place in self._given]
        args, kwargs = tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))
        with _put_back(dict(zip(self._block.generators, self._drawn, strict=True))):
            return torch.func.functional_call(self._block, self._buffers, args, kwargs)


@contextmanager
def _put_back(states: Mapping[torch.Generator, torch.Tensor]) -> Iterator[None]:
    """Has generators where they were, and afterwards where they are."""
    now = {generator: generator.get_state() for generator in states}
    try:
        for generator, state in states.items():
            generator.set_state(state)
        yield
    finally:
        for generator, state in now.items():
            generator.set_state(state)
