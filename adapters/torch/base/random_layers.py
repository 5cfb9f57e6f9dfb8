"""Functions of torch that drop by sample in place of torch's own random numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from isotrain.adapters.common.sample_draws import REFUSAL
from isotrain.plugin import SpecError, active_draws

_DROPOUT_ARGUMENT = 10
"""Index of the rate among the arguments of `multi_head_attention_forward`."""


def draw_by_sample(model: nn.Module) -> None:
    """Lets dropout of torch's functions and modules draw by sample in passes of a run.

    Raises:
        SpecError: A module draws inside of one of torch's kernels, or not in the shape `[batch, ...]`.
    """
    for name, module in model.named_modules():
        described = f"the module {name or 'model'} ({type(module).__name__} with dropout"
        if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
            raise SpecError(REFUSAL.format(f"{described})"))
        if (
            isinstance(module, nn.MultiheadAttention)
            and module.dropout > 0
            and not module.batch_first
        ):
            raise SpecError(REFUSAL.format(f"{described} and without batch_first=True)"))
    _replace_functions()


@functools.cache
def _replace_functions() -> None:
    """Replaces the functions once; outside of passes that draw by sample they are torch's own."""
    for name, dropped_axes in (
        ("dropout", None),
        ("dropout1d", 2),
        ("dropout2d", 2),
        ("dropout3d", 2),
    ):
        setattr(functional, name, _dropout(getattr(functional, name), dropped_axes))
    functional.scaled_dot_product_attention = _attention(functional.scaled_dot_product_attention)
    functional.multi_head_attention_forward = _refusing_weights(
        functional.multi_head_attention_forward
    )


def _dropout(original: Callable[..., torch.Tensor], axes: int | None) -> Callable[..., Any]:
    """Dropout of entries, or of everything behind the first axes."""

    @functools.wraps(original)
    def dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        draws = active_draws.get()
        if draws is None or not training or not 0 < p < 1:
            return original(input, p, training, inplace)
        sizes: Sequence[int] = input.shape
        form = (
            input if axes is None else input.new_empty((*sizes[:axes], *(1 for _ in sizes[axes:])))
        )
        mask = draws.bernoulli_like(form, 1 - p) * (1 / (1 - p))
        return input.mul_(mask) if inplace else input * mask

    return dropout


def _attention(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Scaled dot-product attention whose weights are dropped by sample, without torch's fused kernels."""

    @functools.wraps(original)
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        has_two_masks = is_causal and attn_mask is not None  # which torch refuses
        if active_draws.get() is None or not dropout_p or has_two_masks:
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if options.get("enable_gqa"):
            heads = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(heads, -3), value.repeat_interleave(heads, -3)
        scale = options.get("scale")
        if scale is None:
            scale = 1 / math.sqrt(query.shape[-1])
        scores = query @ key.transpose(-2, -1) * scale
        if is_causal:
            attn_mask = torch.ones_like(scores[0], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        is_masked = (scores == -math.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(is_masked, 0.0).softmax(-1).masked_fill(is_masked, 0.0)
        return functional.dropout(weights, dropout_p) @ value

    return scaled_dot_product_attention


def _refusing_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Multi-head attention that refuses to drop weights that it returns, of shape `[batch * heads, ...]`."""

    @functools.wraps(original)
    def multi_head_attention_forward(*args: Any, **options: Any) -> Any:
        drops = options.get("training", True) and args[_DROPOUT_ARGUMENT] > 0
        if active_draws.get() is not None and drops and options.get("need_weights", True):
            raise SpecError(REFUSAL.format("nn.MultiheadAttention without need_weights=False"))
        return original(*args, **options)

    return multi_head_attention_forward
