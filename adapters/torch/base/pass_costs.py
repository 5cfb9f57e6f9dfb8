"""Costs of a training step by the shapes of its tensors: nothing is computed, and nothing allocated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.pytree import filled, leaves
from isotrain.plugin import PassCosts


def pass_costs(
    compute: Callable[[Any, Any], tuple[torch.Tensor, Any]],
    inputs: Any,
    targets: Any,
    weights: Sequence[torch.Tensor],
    others: Iterable[torch.Tensor],
) -> PassCosts:
    """Costs of the forward and the backward pass of a slice.

    Args:
        compute: Forward pass: function from inputs and targets to loss and predictions.
        inputs: Pytree of tensors, any shapes.
        targets: Pytree of tensors, any shapes.
        weights: Weights that require gradients, any shapes.
        others: Further tensors of the model, any shapes.
    """
    live = _LiveBytes()
    handles = [weight.register_hook(live.leave_out) for weight in weights]
    try:
        with private_api.fake_tensors() as mode:

            def fake(tensor: torch.Tensor) -> torch.Tensor:
                """The tensor without values, in its shape."""
                return tensor if private_api.is_fake(tensor) else mode.from_tensor(tensor)

            batch = [filled(tree, map(fake, leaves(tree))) for tree in (inputs, targets)]
            state = [fake(tensor) for tensor in (*weights, *others)]
            for tensor in (*leaves(batch), *state):
                live.leave_out(tensor)
            with live:
                loss, _ = compute(*batch)
                torch.autograd.grad(loss.sum(), weights, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return PassCosts(live.peak, live.flops, live.moved)


def costs_of(call: Callable[[], Any]) -> PassCosts:
    """Costs of the operations that a function calls, of the tensors that it makes."""
    with _LiveBytes() as live:
        call()
    return PassCosts(live.peak, live.flops, live.moved)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, until they are freed.

    Attributes:
        peak: Largest number of bytes at a time.
        flops: Floating-point operations of matrix products, convolutions and attention.
        moved: Bytes of the inputs and outputs of all operations but views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.flops = self.moved = self._current = 0
        self._sizes: dict[int, int] = {}

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Does not count a tensor of any shape any more."""
        storage = tensor.untyped_storage()
        self._add(storage, 0)
        self._current -= self._sizes[id(storage)]
        self._sizes[id(storage)] = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        results = function(*arguments, **(options or {}))
        name = function.overloadpacket.__name__.replace(
            "_for_cpu", ""
        )  # attention; GPUs' are known
        if formula := flop_registry.get(getattr(torch.ops.aten, name, None)):
            self.flops += formula(*arguments, **(options or {}), out_val=results)
        if not function.is_view:
            operands = filter(torch.is_tensor, leaves((arguments, results)))
            self.moved += sum(
                min(each.nbytes, each.untyped_storage().nbytes()) for each in operands
            )
        for result in leaves(results):
            if isinstance(result, torch.Tensor):
                storage = result.untyped_storage()
                self._add(storage, storage.nbytes())
        self.peak = max(self.peak, self._current)
        return results

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        if id(storage) not in self._sizes:
            self._sizes[id(storage)] = size
            self._current += size
            weakref.finalize(storage, self._freed, id(storage))

    def _freed(self, key: int) -> None:
        self._current -= self._sizes.pop(key)
