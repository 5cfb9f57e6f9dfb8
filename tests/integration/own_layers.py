"""Layers as people write them, each with a weight of 1 MiB or more, to plan without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

WIDTH = 512


def _layer(call: Callable[..., Any], **weights: Any) -> Any:
    """A layer `call(layer, x, training)`: a weight `kernel`, others by shape and initializer."""
    import keras

    class Own(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight((shape[-1], WIDTH), name="kernel")
            for name, (of_weight, initial) in weights.items():
                weight = self.add_weight(of_weight, initializer=initial, name=name)
                setattr(self, name, weight)

        def call(self, x: Any, training: bool = False) -> Any:
            return call(self, x, training)

        def compute_output_shape(self, shape: Any) -> Any:
            return (*shape[:-1], WIDTH)

    return Own()


def norm(layer: Any, x: Any, training: bool) -> Any:
    from keras import ops

    x = x * ops.rsqrt(ops.mean(ops.square(x), -1, keepdims=True) + 1e-6)
    return (1 + layer.scale) * ops.matmul(x, layer.kernel)


def scaled(layer: Any, x: Any, training: bool) -> Any:
    from keras import ops

    kernel = 2 * layer.kernel / (1e-6 + ops.norm(layer.kernel, axis=0))
    return layer.alpha * (x @ (1 - kernel)) - (-layer.alpha) ** 2


def masked(layer: Any, x: Any, training: bool) -> Any:
    from keras import ops

    x = ops.matmul(x, layer.kernel)
    scores = ops.einsum("bik,bjk->bij", x, x) / WIDTH**0.5
    places = ops.arange(scores.shape[-1])
    allowed = places[:, None] >= places[None, :]
    return ops.einsum("bij,bjk->bik", ops.softmax(ops.where(allowed, scores, -1e9)), x)


def summed(layer: Any, x: Any, training: bool) -> Any:
    from keras import ops

    return ops.cumsum(ops.einsum("...i,ij->...j", x, layer.kernel), axis=1)


def gathered(layer: Any, x: Any, training: bool) -> Any:
    from keras import ops

    x = ops.matmul(x, layer.kernel)
    rows = ops.take(layer.kernel, ops.argmax(x, -1) % layer.kernel.shape[0], axis=0)
    return (
        ops.take(x, [1, 0, 3, 2, 5, 4, 7, 6], axis=1) + ops.take(x, ops.array([0]), axis=1) + rows
    )


def noisy(layer: Any, x: Any, training: bool) -> Any:
    import keras
    from keras import ops

    x = ops.matmul(x, layer.kernel)
    if training:
        x = x + 0.1 * keras.random.normal(ops.shape(x), dtype=x.dtype, seed=7)
    return x


def cached(layer: Any, x: Any, training: bool) -> Any:
    from keras import ops

    keys = values = ops.zeros_like(x[:, :0] @ layer.kernel)
    for place in range(x.shape[1]):
        new = x[:, place : place + 1] @ layer.kernel
        keys = ops.concatenate([keys, new], axis=1)
        values = ops.concatenate([values, ops.relu(new)], axis=1)
    return ops.softmax(keys @ ops.transpose(keys, (0, 2, 1))) @ values


def cast(layer: Any, x: Any, training: bool) -> Any:
    from keras import ops

    kernel = ops.cast(ops.cast(layer.kernel, "bfloat16"), "float32")
    whole = ops.cast(ops.round(x), "int32") % 7
    return ops.cast(ops.equal(whole, 0), x.dtype) @ kernel + ops.cast(whole, x.dtype) @ kernel


def placed(layer: Any, x: Any, training: bool) -> Any:
    return x @ layer.kernel + layer.places[: x.shape[1]]


def sines(shape: Any, dtype: Any = None) -> Any:
    """Initial values of a table of places, by NumPy."""
    return np.sin(np.arange(shape[0])[:, None] / 10_000 ** (np.arange(shape[1]) / shape[1]))


LAYERS: dict[str, Callable[[], Any]] = {
    "norm": lambda: _layer(norm, scale=((WIDTH,), "zeros")),
    "scaled": lambda: _layer(scaled, alpha=((), "ones")),
    "masked": lambda: _layer(masked),
    "summed": lambda: _layer(summed),
    "gathered": lambda: _layer(gathered),
    "noisy": lambda: _layer(noisy),
    "cached": lambda: _layer(cached),
    "cast": lambda: _layer(cast),
    "placed": lambda: _layer(placed, places=((WIDTH, WIDTH), sines)),
}
PARAMETERS = (64 // 8 + 1) * WIDTH + (len(LAYERS) + 1) * WIDTH**2 + WIDTH + 1 + 10 * (WIDTH + 1)
"""Number of weights of a model of all layers."""


def model(names: Any) -> Any:
    """Blocks of these layers, with residual connections; inputs `[samples, 64]`, 10 classes."""
    import keras

    inputs = keras.Input((64,))
    x = keras.layers.Dense(WIDTH)(keras.layers.Reshape((8, 8))(inputs))
    for name in names:
        x = x + LAYERS[name]()(x)
    x = keras.layers.Lambda(lambda tensor: 2 * tensor[:, 0] - 1)(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))
