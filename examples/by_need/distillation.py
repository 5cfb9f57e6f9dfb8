"""How do I distil a teacher into a student?

`frozen` builds the teacher on every replica: in evaluation mode, without gradients, and in no checkpoint.

    python examples/by_need/distillation.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

CLASSES, TEMPERATURE = 3, 2.0


def student() -> Any:
    """A small classifier of 8 features."""
    import keras

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(CLASSES)])


def teacher() -> Any:
    """A larger classifier. A trained one: `frozen={"teacher": "runs/teacher"}`, the directory of its run."""
    import keras

    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES),
        ]
    )


def data() -> tuple[np.ndarray, np.ndarray]:
    """Clusters of 8 features, and the class of each."""
    random = np.random.default_rng(0)
    labels = random.integers(CLASSES, size=44)
    features = random.normal(size=(44, 8)) + labels[:, None]
    return features.astype("float32"), labels.astype("int32")


def distil(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """Cross-entropy of the labels and of the teacher's soft labels (Hinton et al., arXiv 1503.02531)."""
    import keras
    from keras import ops

    inputs, labels = batch
    logits, taught = model(inputs), step.frozen["teacher"](inputs)
    soft_labels = ops.softmax(taught / TEMPERATURE)
    soft_logits = ops.log_softmax(logits / TEMPERATURE)
    hard = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return {"hard": hard, "soft": -ops.sum(soft_labels * soft_logits, axis=-1) * TEMPERATURE**2}


spec = isotrain.TrainingSpec(
    name="distillation",
    model=student,
    frozen={"teacher": teacher},
    data=data,
    objective=distil,
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=16,
    epochs=2,
)

if __name__ == "__main__":
    isotrain.run(spec, backend="torch-ddp", replicas=2)
