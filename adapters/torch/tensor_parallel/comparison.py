"""Passes of a model with cut modules, and of the uncut one, for comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from isotrain.adapters.common.outputs import as_plain_tree
from isotrain.adapters.torch.base import gpu
from isotrain.adapters.torch.base.tensors import TensorShard, shard_slices
from isotrain.plugin import SpecError, map_tree

_SEED = 1
"""Seed of the gradients by the outputs, which all processes and both models start from."""
_ROUNDING = 64
"""Rounding errors, of the largest gradient, that a gradient may have where its terms cancel."""


def uncut_copy(model: nn.Module) -> nn.Module:
    """A copy of a model without memory for its weights and buffers, which are given to each pass.

    Raises:
        SpecError: The model cannot be copied.
    """
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(each): torch.empty_like(each, device="meta") for each in tensors}
    memo |= {id(each): nn.Parameter(memo[id(each)], False) for each in model.parameters()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever attributes of a user's module raise
        raise SpecError(
            "strategy tensor: a native model that is cut is compared with the uncut one, and a copy of"
            f" this {type(model).__name__} cannot be made: {error}"
        ) from error


class Pass:
    """Outputs, draws and gradients of a forward and backward pass in training mode.

    Attributes:
        dropout_shapes: Shapes of the inputs of each Dropout, by name.
        gradients: This process's part of the gradient of each trainable weight that has one, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[Any], Any],
        weights: Mapping[str, torch.Tensor],
        frozen: Mapping[str, torch.Tensor],
        shards: Mapping[str, TensorShard],
        inputs: Any,
    ) -> None:
        """Computes the pass, and changes the `.grad` of no weight. Collective if modules are cut.

        Args:
            model: Model to compute with.
            call: Function from inputs to outputs, which calls the model.
            weights: Trainable weights, any shapes, by name; used in place of the model's.
            frozen: Other weights and buffers, any shapes, likewise; those left out are the model's.
            shards: This process's part of each weight that is cut, by name.
            inputs: Inputs of a micro-batch.
        """
        self._shards = shards
        self.dropout_shapes: dict[str, list[torch.Size]] = {}
        self.gradients: dict[str, torch.Tensor] = {}
        leaves = {name: each.detach().requires_grad_() for name, each in weights.items()}
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: self._keep(name, leaf))
        handles = [
            module.register_forward_pre_hook(
                lambda module, args, name=name: self.dropout_shapes.setdefault(name, []).append(
                    args[0].shape
                )
            )
            for name, module in model.named_modules()
            if type(module) is nn.Dropout
        ]
        module = _Computation(model, lambda inputs: self._compute(call, inputs))
        tensors = {f"model.{name}": each for name, each in (leaves | dict(frozen)).items()}
        try:
            with torch.enable_grad():
                torch.func.functional_call(module, tensors, (inputs,))
        finally:
            for handle in handles:
                handle.remove()

    def _compute(self, call: Callable[[Any], Any], inputs: Any) -> None:
        """Computes both passes; the backward one too while the weights are in place (`checkpoint`)."""
        found: list[torch.Tensor] = []
        map_tree(found.append, as_plain_tree(call(inputs)), lists=True)
        self._generator_states = [gpu.rng_state(device) for device in (gpu.CPU, *gpu.in_use())]
        self._outputs = [each.detach() for each in found]
        generator = torch.Generator().manual_seed(_SEED)
        started = [each for each in found if each.requires_grad]
        directions = [
            torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each)
            for each in started
        ]
        if started:
            torch.autograd.backward(started, directions)

    def _keep(self, name: str, leaf: torch.Tensor) -> None:
        """Adds this process's part of a new gradient to those kept, and frees it."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if isinstance(gradient, DTensor):
            assert isinstance(leaf, DTensor)
            gradient = gradient.redistribute(placements=leaf.placements).to_local()
        elif name in self._shards:
            gradient = gradient[shard_slices(self._shards[name])].clone()
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        kept = self.gradients.get(name)
        self.gradients[name] = gradient if kept is None else kept + gradient

    def difference(self, other: Pass, precision: torch.dtype | None, *, shapes: bool) -> str:
        """Difference of the other one's outputs or draws, for a message; empty if there is none.

        Args:
            other: Pass of a model that should compute the same.
            precision: Dtype in which both computed; None for that of the outputs.
            shapes: Whether to compare shapes alone.
        """
        pairs = list(zip(self._outputs, other._outputs, strict=True))
        for expected, received in pairs:
            if expected.shape != received.shape:
                return f"returns a shape {[*received.shape]}, other than {[*expected.shape]},"
        if shapes:
            return ""
        states = zip(self._generator_states, other._generator_states, strict=True)
        if not all(torch.equal(*pair) for pair in states):
            return "draws other random numbers"
        floating = [pair for pair in pairs if pair[0].is_floating_point()]
        are_close = all(_are_close(*pair, precision, floor=1.0) for pair in floating)
        return "" if are_close else "returns other numbers"

    def wrong_gradients(
        self,
        other: Pass,
        precision: torch.dtype | None,
        weights: Mapping[str, torch.Tensor],
        mean: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[str]:
        """Names of the weights whose gradients differ, on any process. Collective in the replica.

        Those of uncut weights must be equal on all processes too. That finds small ones in `precision`
        bfloat16, since processes that compute the same round in the same way.

        Args:
            other: Pass of a model that should compute the same.
            precision: Dtype in which both computed; None for that of the gradients.
            weights: This process's weights, or parts of weights, any shapes, by name.
            mean: Mean of a tensor of any shape over the processes of the replica.
        """
        largest = max((_largest(each) for each in self.gradients.values()), default=0.0)
        differ = []
        for name, weight in weights.items():
            expected, received = (
                each.gradients.get(name, torch.zeros_like(weight)) for each in (self, other)
            )
            floor = _ROUNDING * largest
            is_close = _are_close(expected, received, precision, rounded=floor)
            if name not in self._shards:
                is_close &= _are_close(mean(received), received, None, rounded=floor)
            differ.append(0.0 if is_close else 1.0)
        found = mean(next(iter(weights.values())).new_tensor(differ, dtype=torch.float64)).tolist()
        return [name for name, differs in zip(weights, found, strict=True) if differs]


class _Computation(nn.Module):
    """A model in a module that computes with it, which `functional_call` gives other tensors."""

    def __init__(self, model: nn.Module, compute: Callable[[Any], None]) -> None:
        super().__init__()
        self.model = model
        self.forward = compute


def _are_close(
    expected: torch.Tensor,
    received: torch.Tensor,
    precision: torch.dtype | None,
    *,
    floor: float = 0.0,
    rounded: float = 0.0,
) -> bool:
    """Whether two tensors of one shape differ by rounding at most.

    Args:
        expected: A tensor of any shape.
        received: The other one.
        precision: Dtype in which both were computed; None for their own.
        floor: Size of the numbers that they are computed from, if these are larger than the tensors'.
        rounded: Size of numbers of which one rounding error counts.
    """
    epsilon = torch.finfo(precision or expected.dtype).eps
    within = epsilon**0.5 * max(floor, _largest(expected)) + epsilon * rounded
    return torch.allclose(received, expected, epsilon**0.5, within, equal_nan=True)


def _largest(tensor: torch.Tensor) -> float:
    """Largest finite absolute value, of a tensor of any shape; 0 of none."""
    return float(tensor.nan_to_num(0, 0, 0).abs().max()) if tensor.numel() else 0.0
