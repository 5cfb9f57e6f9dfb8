"""Activation checkpointing on torch: modules that the backward pass computes again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from isotrain.adapters.common.sample_draws import repeatable
from isotrain.plugin import TrainingSpec


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function in `torch.utils.checkpoint`, with the same random numbers in the recomputation.

    Early stop is off: it raises an exception inside the function, which Keras would decorate.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with set_checkpoint_early_stop(False):
            return checkpoint(repeatable(function), *args, use_reentrant=False, **kwargs)

    return call


def recompute(model: nn.Module, spec: TrainingSpec) -> None:
    """Turns on activation checkpointing for the modules that the spec's `recompute` names.

    Raises:
        SpecError: The spec names a module that does not exist.
    """
    modules = {name: each for name, each in model.named_modules() if name and _has_forward(each)}
    for name in spec.recomputed(modules, "."):
        modules[name].forward = _checkpointed_forward(modules[name])


def _has_forward(module: nn.Module) -> bool:
    """Whether a module has a `forward` of its own; `ModuleList` and the like do not."""
    return type(module).forward is not nn.Module.forward


def _checkpointed_forward(module: nn.Module) -> Callable[..., Any]:
    block = _Block(module, module.forward)

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        return recomputed(_RepeatableCall(block))(*args, **kwargs)

    return forward


class _Block(nn.Module):
    """A module with its original `forward`, which is replaced in the module itself."""

    def __init__(self, module: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.forward = compute

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators in attributes of its modules; torch's default ones are not among them."""
        values = (value for module in self.module.modules() for value in vars(module).values())
        return [value for value in values if isinstance(value, torch.Generator)]


class _RepeatableCall:
    """A call of a block that is made twice; only the first one changes buffers and generators.

    Arguments that were the same object in the first call are so in the second, as `MultiheadAttention` checks
    for self-attention with `is`.
    """

    __name__ = "forward"

    def __init__(self, block: _Block) -> None:
        self._block = block
        self._buffers = {name: each.clone() for name, each in block.named_buffers()}
        self._rng_states = [each.get_state() for each in block.generators]
        self._is_first = True
        self._first_indices: list[int] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        if self._is_first:
            self._is_first = False
            ids = list(map(id, values))
            self._first_indices = [ids.index(each) for each in ids]
            return self._block(*args, **kwargs)
        values = [values[index] for index in self._first_indices]
        args, kwargs = (
            tuple(values[: len(args)]),
            dict(zip(kwargs, values[len(args) :], strict=True)),
        )
        with _rng_states_of(dict(zip(self._block.generators, self._rng_states, strict=True))):
            return torch.func.functional_call(self._block, self._buffers, args, kwargs)


@contextmanager
def _rng_states_of(states: Mapping[torch.Generator, torch.Tensor]) -> Iterator[None]:
    """Sets generators to earlier states (uint8 vectors) within it, and restores their states afterwards."""
    present = {generator: generator.get_state() for generator in states}
    try:
        for generator, state in states.items():
            generator.set_state(state)
        yield
    finally:
        for generator, state in present.items():
            generator.set_state(state)
