"""How do I load images in several processes?

`loader: {workers: N}` has N processes on each host decode and augment samples, for all replicas of the host.
Crops and flips by `random` are the same for any number of workers and replicas.

    python examples/by_need/image_workers.py
"""

from __future__ import annotations

import functools
import io
import random
from typing import Any

import numpy as np

import isotrain

CLASSES = 3


def model() -> Any:
    """A small convolutional classifier of 12 x 12 images into 3 classes."""
    import keras

    return keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            keras.layers.Conv2D(4, 3, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


@functools.cache
def jpeg(number: int) -> bytes:
    """A file of 16 x 16 pixels, brighter in one color by its class; yours are read from a disk."""
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 128, (16, 16, 3))
    pixels[:, :, number % CLASSES] += 100
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()


class Images:
    """A map-style data set: decodes, crops and flips one image for each index."""

    def __len__(self) -> int:
        """Number of images."""
        return 24

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Pixels from 0 to 1, float32 [12, 12, 3], and the class."""
        from PIL import Image

        image = Image.open(io.BytesIO(jpeg(index)))
        left, top = random.randrange(4), random.randrange(4)
        image = image.crop((left, top, left + 12, top + 12))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(image, np.float32) / 255, index % CLASSES


spec = isotrain.TrainingSpec(
    name="image-workers",
    model=model,
    data=Images,
    loader={"workers": 2},
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=8,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
