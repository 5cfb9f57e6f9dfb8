"""The same models in Keras, and their objectives in TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from benchmarks.peers.keras_models import set_weights, transformer_block
from benchmarks.peers.workloads import EMBEDDING, NOISE, TEMPERATURE, VOCABULARY, Workload


def build(workload: Workload) -> dict[str, keras.Model]:
    """Builds a workload's models with the initial weights that all contenders start from."""
    makers = {
        "dcgan": {"generator": _generator, "discriminator": _discriminator},
        "clip": {"images": _image_encoder, "texts": _text_encoder},
    }
    models = {name: make() for name, make in makers[workload.name].items()}
    for model in models.values():
        set_weights(model)
    return models


def _generator() -> keras.Model:
    inputs = keras.Input((NOISE,))
    x = layers.Reshape((1, 1, NOISE))(inputs)
    for number, channels in enumerate((128, 64, 32)):
        up = layers.Conv2DTranspose(
            channels,
            4,
            2 if number else 1,
            "same" if number else "valid",
            use_bias=False,
            name=f"up{number}",
        )
        norm = layers.BatchNormalization(epsilon=1e-5, momentum=0.9, name=f"norm{number}")
        x = layers.ReLU()(norm(up(x)))
    return keras.Model(
        inputs, layers.Conv2DTranspose(3, 4, 2, "same", activation="tanh", name="up3")(x)
    )


def _discriminator() -> keras.Model:
    x = inputs = keras.Input((32, 32, 3))
    for number, channels in enumerate((32, 64, 128)):
        x = layers.Conv2D(channels, 4, 2, "same", name=f"down{number}")(x)
        x = layers.LeakyReLU(0.2)(x)
    return keras.Model(inputs, layers.Flatten()(layers.Conv2D(1, 4, name="head")(x)))


def _image_encoder() -> keras.Model:
    x = inputs = keras.Input((32, 32, 3))
    for number, channels in enumerate((32, 64)):
        x = layers.Conv2D(channels, 3, padding="same", activation="relu", name=f"conv{number}")(x)
        x = layers.MaxPooling2D(2)(x)
    return keras.Model(inputs, _embedded(layers.GlobalAveragePooling2D()(x)))


def _text_encoder() -> keras.Model:
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(VOCABULARY, 128, name="embedding")(inputs)
    x = transformer_block(x, 0)
    return keras.Model(inputs, _embedded(layers.GlobalAveragePooling1D()(x)))


def _embedded(x: Any) -> Any:
    return layers.UnitNormalization()(layers.Dense(EMBEDDING, name="head")(x))


def discriminator_loss(models: Any, batch: Any) -> tf.Tensor:
    """Losses `[samples]` of pairs of a generated and a real image, told apart."""
    noise, real = batch
    generated = tf.stop_gradient(models["generator"](noise))
    logits = models["discriminator"](tf.concat([generated, real], 0))
    of_generated, of_real = tf.split(logits[:, 0], 2)
    return tf.nn.softplus(of_generated) + tf.nn.softplus(-of_real)


def generator_loss(models: Any, batch: Any) -> tf.Tensor:
    """Losses `[samples]` of generated images, taken for real ones."""
    generated = models["generator"](batch[0])
    return tf.nn.softplus(-models["discriminator"](generated)[:, 0])


def contrastive_loss(models: Any, batch: Any, step: Any) -> tf.Tensor:
    """Losses `[samples]` of pairs of an image and a text among all of the global batch."""
    pairs = tf.concat([models["images"](batch[0]), models["texts"](batch[1])], 1)
    all_pairs, first = step.all_gather(pairs)
    images, texts = tf.split(pairs, 2, 1)
    all_images, all_texts = tf.split(all_pairs, 2, 1)
    labels = tf.cast(first, tf.int32) + tf.range(tf.shape(pairs)[0])
    losses = [
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels, tf.matmul(queries, keys, transpose_b=True) / TEMPERATURE
        )
        for queries, keys in ((images, all_texts), (texts, all_images))
    ]
    return (losses[0] + losses[1]) / 2
