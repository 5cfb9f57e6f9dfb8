"""How do I fine-tune with LoRA, and export the adapters alone?

Enable the adapters in the model function: the other weights of these layers are then frozen.
(Hu et al., "LoRA: Low-rank adaptation of large language models", ICLR 2022.)

    python examples/by_need/lora.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import isotrain

RANK = 2


def model() -> Any:
    """A classifier whose hidden layers have adapters; give its own weights by `initial_weights`."""
    import keras

    network = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh", name="hidden_1"),
            keras.layers.Dense(16, activation="tanh", name="hidden_2"),
            keras.layers.Dense(3, name="head"),
        ]
    )
    for layer in network.layers[:2]:
        layer.enable_lora(RANK)
    return network


def data() -> isotrain.DataSet:
    """Points of three clusters."""
    random = np.random.default_rng(0)
    labels = random.integers(3, size=90)
    points = (random.normal(size=(90, 8)) + labels[:, None]).astype("float32")
    return isotrain.DataSet((points, labels))


spec = isotrain.TrainingSpec(
    name="lora",
    model=model,
    data=data,
    loss={"name": "sparse_categorical_crossentropy", "from_logits": True},
    optimizer={"name": "adam", "lr": 0.0078125},
    initial_weights={"freeze": ["*/bias"]},
    global_batch_size=32,
    epochs=2,
)


def export_adapters(result: isotrain.RunResult, path: Path) -> Path:
    """Writes the adapters and the trained head, without the weights that stayed as they were."""
    return result.export(path, include=["*lora_*", "*head/kernel"])


if __name__ == "__main__":
    trained = isotrain.run(spec, backend="torch-ddp", replicas=2)
    print(export_adapters(trained, Path("adapters.safetensors")))
