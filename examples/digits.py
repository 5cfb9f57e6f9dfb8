"""Handwritten digits: one script, any backend.

    python examples/digits.py --backend torch-ddp --replicas 2
    python examples/digits.py --backend tf-mirrored --replicas 2

Both print the same losses. The data are the 1797 images of 8 x 8 pixels that come with
scikit-learn. `digits.yaml` is the same spec as a file, for `isotrain run`.

Three choices keep float32 rounding from growing, so that loss curves agree to about 1e-6 and not
only roughly: tanh and average pooling are smooth (at the kinks of ReLU and of max pooling, a
difference in the last bit can change a whole gradient), and the rate and momentum are sums of
powers of two, which every framework represents exactly.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import isotrain


def model() -> Any:
    """A small convolutional network in Keras 3: it runs on every framework."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="tanh"),
            layers.Conv2D(32, 3, padding="same", activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="tanh"),
            layers.Dense(10),
        ]
    )


def data() -> isotrain.DataSet:
    """1497 images to train on and 300 to validate on, float32 [images, 8, 8, 1] from 0 to 1.

    The images are ordered by who wrote them, so every sixth one is held out: each of the 13 writers
    is in both parts. (With the last 300 held out, the model would meet hands it never saw.)
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    held_out = np.arange(len(images)) % 6 == 0
    return isotrain.DataSet(
        train=(images[~held_out], labels[~held_out]),
        validation=(images[held_out], labels[held_out]),
    )


spec = isotrain.TrainingSpec(
    name="digits",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    metrics=["accuracy"],
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875},
    global_batch_size=64,  # 64 is no multiple of 3 replicas, and the last batch of an epoch has 25
    epochs=5,
)


def main() -> None:
    """Trains under the backend that the command line names."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits under any backend.")
    parser.add_argument("--backend", default="torch-ddp", help="such as tf-mirrored")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=spec.epochs)
    args = parser.parse_args()

    result = isotrain.run(
        spec.replace(epochs=args.epochs), backend=args.backend, replicas=args.replicas
    )
    print(f"final loss {result.final_loss:.8f}")
    print(f"validation accuracy {result.metrics['validation_accuracy']:.4f}")
    print(f"files in {result.run_directory}")


if __name__ == "__main__":
    main()
