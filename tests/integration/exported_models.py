"""Opens exported models where there is no isotrain, and predicts: a program of its own.

    python exported_models.py FOLDER [PART/]NAME...

FOLDER has `samples.npy`, and the exported files or folders of them; the predictions of NAME go to `NAME.npy`
beside its file, or what went wrong to `NAME.fault`. The variable KERAS_BACKEND says which framework Keras
runs on.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def portable() -> Any:
    """The model that was trained, written as everybody writes it."""
    import keras
    from keras import layers

    keras.utils.clear_session()  # it numbers the generators of random layers, through all models
    inputs = keras.Input((6, 6, 1))
    found = layers.Conv2D(4, 3, activation="tanh", name="edges")(inputs)
    found = layers.Dropout(0.5, name="noise")(layers.BatchNormalization(name="norm")(found))
    return keras.Model(inputs, layers.Dense(3, name="head")(layers.Flatten()(found)))


def torch_net() -> Any:
    """A native model of torch; its samples have their channels last, as those of Keras."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edges, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            self.noise, self.head = nn.Dropout(0.5), nn.Linear(64, 3)

        def forward(self, images: Any) -> Any:
            found = self.norm(torch.tanh(self.edges(images.movedim(-1, 1))))
            return self.head(self.noise(found).flatten(1))

    return Net()


def tensorflow_net() -> Any:
    """A native model of TensorFlow."""
    import tensorflow as tf

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = tf.Variable(tf.random.normal([36, 3], stddev=0.1), name="kernel")
            self.bias = tf.Variable(tf.zeros(3), name="bias")

        def __call__(self, images: Any) -> Any:
            return tf.reshape(images, [-1, 36]) @ self.kernel + self.bias

    return Net()


def by_keras(folder: Path, samples: np.ndarray) -> Any:
    import keras

    return keras.models.load_model(folder / "model.keras").predict(samples, verbose=0)


def by_keras_weights(folder: Path, samples: np.ndarray) -> Any:
    model = portable()
    model.load_weights(folder / "model.weights.h5")
    return model.predict(samples, verbose=0)


def by_keras_on_torch(folder: Path, samples: np.ndarray) -> Any:
    return _by_state_dict(portable(), folder / "model.pt", samples)


def by_torch(folder: Path, samples: np.ndarray) -> Any:
    return _by_state_dict(torch_net(), folder / "native.pt", samples)


def _by_state_dict(module: Any, path: Path, samples: np.ndarray) -> Any:
    import torch

    module.load_state_dict(torch.load(path, weights_only=True))
    with torch.no_grad():
        return module.eval()(torch.from_numpy(samples)).numpy()


def by_tensorflow(folder: Path, samples: np.ndarray) -> Any:
    import tensorflow as tf

    model = tf.saved_model.load(str(folder / "saved"))
    return model.serve(samples).numpy()


def by_tensorflow_module(folder: Path, samples: np.ndarray) -> Any:
    import tensorflow as tf

    module = tf.saved_model.load(str(folder / "module"))
    return module.signatures["serving_default"](tf.constant(samples))["outputs"].numpy()


def by_onnx(folder: Path, samples: np.ndarray) -> Any:
    return _by_onnx(folder / "model.onnx", samples)


def by_onnx_of_torch(folder: Path, samples: np.ndarray) -> Any:
    return _by_onnx(folder / "native.onnx", samples)


def _by_onnx(path: Path, samples: np.ndarray) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: samples})[0]


WAYS: dict[str, Callable[[Path, np.ndarray], Any]] = {
    name: way for name, way in globals().items() if name.startswith("by_")
}

if __name__ == "__main__":
    for absent in (
        "isotrain",
        "sklearn",
        "matplotlib",
    ):  # to the latter two Keras gives a second each
        sys.modules[absent] = None  # type: ignore[assignment]
    where = Path(sys.argv[1])
    for wanted in map(where.joinpath, sys.argv[2:]):
        wanted.with_suffix(".fault").unlink(missing_ok=True)
        try:
            found = WAYS[wanted.name](wanted.parent, np.load(where / "samples.npy"))
        except Exception:
            wanted.with_suffix(".fault").write_text(traceback.format_exc())
        else:
            np.save(wanted.with_suffix(".npy"), found)
