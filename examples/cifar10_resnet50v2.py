"""ResNet50V2 (or ResNet152V2) of keras.applications on CIFAR-10, under any backend.

    python examples/cifar10_resnet50v2.py --data ~/cifar-10-batches-bin --backend torch-ddp --replicas 2

The images stay in memory as they are on disk, bytes of 32 x 32 pixels; the model enlarges them to
128 x 128 on its device. Batch size and epochs are options, and the learning rate follows the batch.

A network this deep amplifies float32 rounding: losses of two backends part at the percent level
within the first steps, as they do in one framework with another number of threads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import cifar10_data
import numpy as np

import isotrain


def model(depth: int, image_size: int) -> Any:
    """A ResNet V2 on images of 32 x 32 bytes, which it enlarges to `image_size` pixels a side."""
    import keras
    from keras import layers

    network = getattr(keras.applications, f"ResNet{depth}V2")(
        weights=None,
        input_shape=(image_size, image_size, 3),
        classes=cifar10_data.CLASSES,
        classifier_activation=None,
    )
    return keras.Sequential(
        [
            keras.Input((32, 32, 3), dtype="uint8"),
            layers.Rescaling(1 / 127.5, offset=-1),
            layers.Resizing(image_size, image_size),
            network,
        ]
    )


def data(folder: str) -> isotrain.DataSet:
    """CIFAR-10 from a folder: trains on its training images, validates on its test images."""
    train, test = cifar10_data.load(folder)
    return isotrain.DataSet(train, test)


def flipped(images: np.ndarray, labels: np.ndarray, random: Any) -> tuple[np.ndarray, np.ndarray]:
    """Mirrors half of the images `[batch, rows, columns, 3]`, by seed, epoch and image alone."""
    mirror = random.bernoulli(0.5)[:, None, None, None]
    return np.where(mirror, images[:, :, ::-1], images), labels


def spec_for(args: argparse.Namespace) -> isotrain.TrainingSpec:
    """The training spec for the options of the command line."""
    return isotrain.TrainingSpec(
        name=f"cifar10-resnet{args.depth}v2",
        model=model,
        model_args={"depth": args.depth, "image_size": args.image_size},
        data=data,
        data_args={"folder": str(args.data.resolve())},
        transform=flipped,
        loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
        metrics=["accuracy"],
        optimizer={"name": "sgd", "lr": 0.125, "momentum": 0.875, "nesterov": True},
        scaling={"rule": "linear", "base_batch_size": 256},
        schedule={"name": "cosine", "warmup_steps": 500},
        global_batch_size=args.batch,
        precision=args.precision,
        epochs=args.epochs,
        timeouts={"progress": 1800.0},
    )


def options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a ResNet on CIFAR-10 under any backend.")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds CIFAR-10")
    parser.add_argument("--backend", default="torch-ddp", help="such as tf-mirrored")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--batch", type=int, default=256, help="images per step, all replicas")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--depth", type=int, choices=(50, 152), default=50)
    parser.add_argument("--image-size", type=int, default=128, help="pixels a side (default 128)")
    parser.add_argument("--precision", default="float32", help="such as bfloat16, on GPUs")
    args = parser.parse_args()
    try:
        cifar10_data.form_of(args.data)
    except cifar10_data.Cifar10Error as error:
        parser.exit(2, f"--data: {error}\n")
    return args


def main() -> None:
    """Trains under the backend that the command line names."""
    args = options()
    result = isotrain.run(spec_for(args), backend=args.backend, replicas=args.replicas)
    print(f"final loss {result.final_loss:.8f}")
    print(f"validation accuracy {result.metrics['validation_accuracy']:.4f}")
    print(f"{result.timings.get('samples_per_s', 0):.1f} images/s")


if __name__ == "__main__":
    main()
