"""Fine-tuning: a model learns the digits 0 to 7, and what it has learnt serves for all ten.

    python examples/fine_tuning.py --backend torch-ddp --replicas 2
    python examples/fine_tuning.py --backend tf-mirrored --replicas 2

Both print the same. The second run takes the layers called `features_*` from the first, leaves them as they
are, and trains a new head on 50 images alone. The third starts from nothing with the same 50 images.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import isotrain


def model(classes: int) -> Any:
    """Layers that find features, and a head that tells so many classes by them."""
    import keras
    from keras import layers

    images = keras.Input((8, 8, 1))
    edges = layers.Conv2D(16, 3, activation="tanh", name="features_edges")(images)
    shapes = layers.Conv2D(32, 3, activation="tanh", name="features_shapes")(edges)
    pooled = layers.Flatten()(layers.AveragePooling2D(2)(shapes))
    features = layers.Dense(48, activation="tanh", name="features_summary")(pooled)
    return keras.Model(images, layers.Dense(classes, name="head")(features))


def data(classes: int, train: int | None = None) -> isotrain.DataSet:
    """The digits below `classes`: the first `train` to train on (all), and every third to validate on."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(n_class=classes, return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    held_out = np.arange(len(images)) % 3 == 0
    return isotrain.DataSet(
        train=(images[~held_out][:train], labels[~held_out][:train]),
        validation=(images[held_out], labels[held_out]),
    )


pretraining = isotrain.TrainingSpec(
    name="pretraining",
    model=model,
    model_args={"classes": 8},
    data=data,
    data_args={"classes": 8},
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    metrics=["accuracy"],
    optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875},
    global_batch_size=64,
    epochs=6,
)
from_nothing = pretraining.replace(
    name="from-nothing",
    model_args={"classes": 10},
    data_args={"classes": 10, "train": 50},
    epochs=20,
)


def fine_tuning(source: Any) -> isotrain.TrainingSpec:
    """The same with the features of another run."""
    weights = {"source": source, "include": "features_*", "freeze": "features_*"}
    return from_nothing.replace(name="fine-tuning", initial_weights=weights)


def main() -> None:
    """Trains three times under the backend that the command line names."""
    parser = argparse.ArgumentParser(description="Fine-tune a model on few images.")
    parser.add_argument("--backend", default="torch-ddp", help="such as tf-mirrored")
    parser.add_argument("--replicas", type=int, default=1)
    args = parser.parse_args()

    def accuracy(spec: isotrain.TrainingSpec) -> tuple[float, isotrain.RunResult]:
        result = isotrain.run(spec, backend=args.backend, replicas=args.replicas)
        return result.metrics["validation_accuracy"], result

    _, pretrained = accuracy(pretraining)
    tuned, result = accuracy(fine_tuning(pretrained))
    print("\n".join(line for line in result.plan["notes"] if "initial_weights" in line))
    print(f"validation accuracy {tuned:.4f} after fine-tuning")
    print(f"validation accuracy {accuracy(from_nothing)[0]:.4f} from nothing")


if __name__ == "__main__":
    main()
