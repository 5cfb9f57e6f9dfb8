"""Attention in float64: JAX's own takes the softmax in float32 in every precision."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras.src import backend as keras_backend

from isotrain.plugin import private_api

_OF_KERAS = keras_backend.nn.dot_product_attention


def choose_attention(precision: str) -> None:
    """Sets the attention function of Keras' attention layers in this process."""
    chosen = dot_product_attention if precision == "float64" else _OF_KERAS
    keras_backend.nn.dot_product_attention = chosen


def _is_what_keras_calls() -> None:
    query = jnp.ones((1, 2, 1, 4))
    try:
        keras_backend.nn.dot_product_attention = lambda *given, **options: jnp.zeros(())
        found = keras.ops.dot_product_attention(query, query, query)
    finally:
        choose_attention("float32")
    private_api.require(found.shape == (), "keras.ops calls backend.nn.dot_product_attention")


PROBES = (private_api.PrivateApiProbe("backend.nn.dot_product_attention", _is_what_keras_calls),)
"""Probes of undocumented parts of Keras, besides those of `keras_private`."""


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Any:
    """Attention with the signature of `keras.ops.dot_product_attention`, without a fused kernel.

    Args:
        query: Shape `[batch, targets, heads, size]`.
        key: Shape `[batch, sources, heads, size]`.
        value: Shape `[batch, sources, heads, size]`.
        bias: Added to the logits, shape `[batch, heads, targets, sources]` or one that broadcasts.
        mask: False where a target must not see a source; of the same shape.
        scale: Factor on the logits; 1 / sqrt(size) when left out.
        is_causal: Whether targets see only the sources up to their own position.
        flash_attention: Unused.
        attn_logits_soft_cap: Bound that the logits approach and do not exceed.

    Returns:
        Shape `[batch, targets, heads, size]`.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * factor
    if attn_logits_soft_cap is not None:
        logits = attn_logits_soft_cap * jnp.tanh(logits / attn_logits_soft_cap)
    if bias is not None:
        logits = logits + bias
    lowest = jnp.finfo(logits.dtype).min
    if mask is not None:
        logits = jnp.where(mask, logits, lowest)
    if is_causal:
        seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
        logits = jnp.where(seen, logits, lowest)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)
