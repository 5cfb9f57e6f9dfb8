"""The same digits with a native model per framework: a torch module, and a TensorFlow module.

    python examples/digits_native.py --backend horovod-torch --replicas 2
    python examples/digits_native.py --backend tf-multiworker --replicas 2

Native models run at their framework's own speed with its own optimizers. Data, order of samples,
learning rates and metrics are still the spec's, so backends of one framework agree to rounding.
Between frameworks only the portable model of `digits.py` does: here, torch and TensorFlow draw
other initial weights.
"""

from __future__ import annotations

import argparse
from typing import Any

from digits import data

import isotrain


def torch_model() -> Any:
    """The network of `digits.py` in `torch.nn`; it is fed what the data hold, [images, 8, 8, 1]."""
    from torch import nn

    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, 8, 8)),  # torch wants [images, channels, rows, columns]
        nn.Conv2d(1, 16, 3, padding="same"),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding="same"),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    )


def tensorflow_model() -> Any:
    """The same in plain TensorFlow."""
    import tensorflow as tf

    initial = tf.initializers.GlorotUniform(seed=0)

    class Network(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = [(3, 3, 1, 16), (3, 3, 16, 32), (4 * 4 * 32, 64), (64, 10)]
            self.kernels = [tf.Variable(initial(shape), name="kernel") for shape in shapes]
            self.biases = [tf.Variable(tf.zeros(shape[-1]), name="bias") for shape in shapes]

        def __call__(self, images: tf.Tensor) -> tf.Tensor:
            layers = list(zip(self.kernels, self.biases, strict=True))
            x = images
            for kernel, bias in layers[:2]:
                x = tf.tanh(tf.nn.conv2d(x, kernel, strides=1, padding="SAME") + bias)
            x = tf.nn.avg_pool2d(x, 2, strides=2, padding="VALID")
            x = tf.reshape(x, [-1, 4 * 4 * 32])
            (kernel, bias), (last_kernel, last_bias) = layers[2:]
            return tf.tanh(x @ kernel + bias) @ last_kernel + last_bias

    return Network()


spec = isotrain.TrainingSpec(
    name="digits-native",
    model={"torch": torch_model, "tensorflow": tensorflow_model},
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    metrics=["accuracy"],
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875},
    global_batch_size=64,
    epochs=5,
)


def main() -> None:
    """Trains under the backend that the command line names."""
    parser = argparse.ArgumentParser(description="Train a native model on handwritten digits.")
    parser.add_argument("--backend", default="torch-ddp", help="such as tf-mirrored")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=spec.epochs)
    args = parser.parse_args()

    result = isotrain.run(
        spec.replace(epochs=args.epochs), backend=args.backend, replicas=args.replicas
    )
    print(f"final loss {result.final_loss:.8f}")
    print(f"validation accuracy {result.metrics['validation_accuracy']:.4f}")


if __name__ == "__main__":
    main()
