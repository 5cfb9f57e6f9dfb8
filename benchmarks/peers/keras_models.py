"""The same models in Keras, as functional models; images are `[samples, rows, columns, channels]`."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from benchmarks.peers.workloads import CLASSES, VOCABULARY, Workload, start_value


def build(workload: Workload) -> keras.Model:
    """Builds a workload's model with the initial weights that all contenders start from."""
    inputs = keras.Input(workload.sample, dtype="int32" if workload.tokens else None)
    makers = {"mlp": lambda x: _mlp(x, workload.width), "cnn": _cnn, "transformer": _transformer}
    outputs = (makers | {"resnet_50": _resnet_50})[workload.function](inputs)
    model = keras.Model(inputs, outputs)
    set_weights(model)
    return model


def set_weights(model: keras.Model) -> None:
    """Sets the initial kernels of a model, by the names of its layers."""
    for variable in model.trainable_variables:
        layer, _, name = variable.path.rpartition("/")
        if name in ("kernel", "embeddings"):
            variable.assign(start_value(layer.replace("/", "_"), tuple(variable.shape)))


def _mlp(x: Any, width: int) -> Any:
    for number in range(2):
        x = layers.Dense(width, activation="relu", name=f"hidden{number}")(x)
    return layers.Dense(CLASSES, name="head")(x)


def _cnn(x: Any) -> Any:
    for number, channels in enumerate((16, 32)):
        convolution = layers.Conv2D(
            channels, 3, padding="same", activation="relu", name=f"conv{number}"
        )
        x = layers.MaxPooling2D(2)(convolution(x))
    return layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling2D()(x))


def _transformer(x: Any) -> Any:
    x = layers.Embedding(VOCABULARY, 128, name="embedding")(x)
    for number in range(2):
        x = transformer_block(x, number)
    return layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling1D()(x))


def transformer_block(x: Any, number: int) -> Any:
    """Attention of four heads and two dense layers, with width 128."""
    y = layers.LayerNormalization(epsilon=1e-5, name=f"block{number}_norm0")(x)
    x = x + layers.MultiHeadAttention(4, 32, name=f"block{number}_attention")(y, y)
    y = layers.LayerNormalization(epsilon=1e-5, name=f"block{number}_norm1")(x)
    y = layers.Dense(256, activation="relu", name=f"block{number}_dense0")(y)
    return x + layers.Dense(128, name=f"block{number}_dense1")(y)


def _resnet_50(x: Any) -> Any:
    x = _convolution(x, 64, 7, 2, "stem")
    x = layers.ReLU()(_normalised(x, "stem_norm"))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck(x, width, stride, f"stage{stage}_{block}")
    return layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling2D()(x))


def _bottleneck(x: Any, width: int, stride: int, name: str) -> Any:
    y = _convolution(x, width, 1, 1, f"{name}_conv0")
    y = layers.ReLU()(_normalised(y, f"{name}_norm0"))
    y = _convolution(y, width, 3, stride, f"{name}_conv1")
    y = layers.ReLU()(_normalised(y, f"{name}_norm1"))
    y = _normalised(_convolution(y, 4 * width, 1, 1, f"{name}_conv2"), f"{name}_norm2")
    if stride > 1 or x.shape[-1] != 4 * width:
        x = _convolution(x, 4 * width, 1, stride, f"{name}_shortcut")
        x = _normalised(x, f"{name}_shortcut_norm")
    return layers.ReLU()(layers.add([y, x]))


def _convolution(x: Any, channels: int, size: int, stride: int, name: str) -> Any:
    """Padded as torch does: the same on both sides, whatever the stride."""
    if size > 1:
        x = layers.ZeroPadding2D(size // 2)(x)
    return layers.Conv2D(channels, size, stride, use_bias=False, name=name)(x)


def _normalised(x: Any, name: str) -> Any:
    return layers.BatchNormalization(epsilon=1e-5, momentum=0.9, name=name)(x)
