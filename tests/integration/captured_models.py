"""Models that can be captured, and models that cannot: for `test_graph_capture.py`."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np

import isotrain

BATCH = 8
SHAPES = {"image": (6, 6, 1), "words": (5,)}


def data(kind: str = "points", length: int = 20, evaluated: int = 9) -> Any:
    """Samples, and more to evaluate on: left as it is, the last batches of both are smaller than others."""
    generator = np.random.default_rng(5)
    count = length + evaluated
    targets: Any = generator.integers(0, 4, count)
    if kind == "words":
        inputs = generator.integers(0, 7, (count, 5)).astype("int32")
        targets = generator.integers(0, 4, (count, 5))
    else:
        inputs = generator.normal(size=(count, *SHAPES.get(kind, (6,)))).astype("float32")
    if kind == "two":
        targets = {"left": inputs[:, :1], "right": inputs[:, 1:2]}
    if kind == "rare":
        inputs[length // 2] *= 100
    given: Any = {"left": inputs, "right": inputs[:, :3]} if kind == "pair" else inputs
    cut = [
        {n: v[part] for n, v in given.items()} if kind == "pair" else given[part]
        for part in (slice(length), slice(length, None))
    ]
    if kind == "two":
        parts = [
            {n: v[part] for n, v in targets.items()}
            for part in (slice(length), slice(length, None))
        ]
        return isotrain.DataSet((cut[0], parts[0]), (cut[1], parts[1]))
    return isotrain.DataSet((cut[0], targets[:length]), (cut[1], targets[length:]))


def dense() -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(4)])


def with_layer(layer: Any) -> Any:
    """A small network with a layer in the middle."""
    from keras import Input, Sequential, layers

    return Sequential([Input((6,)), layers.Dense(8), layer, layers.Dense(4)])


def dropout(seed: int | None = None) -> Any:
    from keras import layers

    return with_layer(layers.Dropout(0.5, seed=seed))


def noise() -> Any:
    """Several layers that draw from generators of their own."""
    from keras import Sequential, layers

    inner = [layers.GaussianNoise(0.5, seed=3), layers.GaussianDropout(0.25, seed=4)]
    return with_layer(Sequential([*inner, layers.Dropout(0.5)]))


def penalised() -> Any:
    from keras import Input, Sequential, layers, regularizers

    first = layers.Dense(8, kernel_regularizer=regularizers.L2(0.125))
    added = layers.ActivityRegularization(l2=0.25)
    return Sequential([Input((6,)), first, added, layers.Dense(4)])


def image(strides: int = 1) -> Any:
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((6, 6, 1)),
            layers.Conv2D(4, 3, padding="same", strides=strides),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(2),
            layers.Conv2D(6, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )


def residual() -> Any:
    """Padded and strided convolutions, each normalised, beside a shortcut; and a normalised vector."""
    from keras import Input, Model, layers

    inputs = shortcut = Input((6, 6, 1))
    for strides in (2, 1):
        x = layers.ZeroPadding2D(1)(shortcut)
        x = layers.Conv2D(4, 3, strides, use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.BatchNormalization()(layers.Conv2D(4, 1, use_bias=False)(x))
        shortcut = layers.BatchNormalization()(layers.Conv2D(4, 1, strides)(shortcut))
        shortcut = layers.ReLU()(layers.add([x, shortcut]))
    x = layers.BatchNormalization()(layers.GlobalAveragePooling2D()(shortcut))
    return Model(inputs, layers.Dense(4)(x))


def words() -> Any:
    """A class for every word; words of number 0 are masked in the loss and the metrics."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((5,), dtype="int32"),
            layers.Embedding(7, 8, mask_zero=True),
            layers.LSTM(6, return_sequences=True),
            layers.Dense(4),
        ]
    )


def attention() -> Any:
    from keras import Input, Model, layers

    given = Input((5,), dtype="int32")
    hidden = layers.Embedding(7, 8)(given)
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden))
    return Model(given, layers.Dense(4)(hidden))


def pair() -> Any:
    """Two inputs by name."""
    from keras import Input, Model, layers

    left, right = Input((6,), name="left"), Input((3,), name="right")
    both = layers.Concatenate()([layers.Dense(4)(left), layers.Dense(4)(right)])
    return Model({"left": left, "right": right}, layers.Dense(4)(both))


def called(call: Any, **attributes: Any) -> Any:
    """A network with a layer of one's own, with such attributes, that computes `call(layer, inputs)`."""
    import keras
    import torch

    class Own(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.scale = 0, 1.0
            self.options: dict[str, Any] = {"scale": 1.0, "more": [1.0]}
            self.held, self.array = torch.ones(()), np.ones((), "float32")
            for name, value in attributes.items():
                setattr(self, name, value)

        def call(self, inputs: Any) -> Any:
            return call(self, inputs)

    return with_layer(Own())


SETTINGS = {"scale": 1.0}
"""Read by a layer; nobody sees that it has changed."""


def scaled() -> Any:
    """Depends on an attribute of a layer, and on something that is none."""
    return called(lambda layer, inputs: inputs * layer.scale * SETTINGS["scale"])


def holding() -> Any:
    """Depends on what attributes of a layer hold."""

    def call(layer: Any, inputs: Any) -> Any:
        scale = layer.options["scale"] * layer.options["more"][0] * float(layer.array)
        return inputs * scale * (layer.held * 2 - 1)

    return called(call)


class Annealed:
    """A loss with an attribute that somebody changes during the run."""

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        return own_loss(y_true, y_pred) * self.weight


ANNEALED = Annealed()


def by_shape() -> Any:
    """Python that depends on shapes alone."""
    return called(lambda layer, inputs: inputs * 2 if inputs.shape[0] == BATCH else inputs)


def by_value() -> Any:
    return called(lambda layer, inputs: inputs * 2 if float(inputs.sum()) > 0 else inputs)


LEAVES: dict[str, Any] = {
    "convert_to_numpy": lambda inputs: _numpy(inputs).max() > 50,
    "asarray": lambda inputs: np.asarray(inputs.detach()).max() > 50,
    "tolist": lambda inputs: max(inputs.flatten().tolist()) > 50,
    "data": lambda inputs: inputs.data.max() > 50,
    "nonzero": lambda inputs: len((inputs > 50).nonzero()) > 0,
    "mask": lambda inputs: inputs[inputs > 50].shape[0] > 0,
}
"""Ways in which a layer's Python comes to know whether there is a number above 50."""


def _numpy(tensor: Any) -> Any:
    from keras import ops

    return ops.convert_to_numpy(tensor)


def rarely(way: str = "nonzero") -> Any:
    """Python that depends on values, which are on one side of its border in all batches but one."""
    return called(lambda layer, inputs: inputs * 0.5 if LEAVES[way](inputs) else inputs)


def by_count() -> Any:
    """What a call does depends on the calls before it."""

    def call(layer: Any, inputs: Any) -> Any:
        layer.calls += 1
        return inputs * (1 + layer.calls % 2)

    return called(call)


TOTALS = {"calls": 0}
"""Counted by a layer, as people count in a global."""


def by_variable(kind: str) -> Any:
    """What a call does depends on the calls before it, by something that is no attribute of a layer."""
    calls = 0
    TOTALS["calls"] = 0

    class Counted:
        total = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    def call(layer: Any, inputs: Any) -> Any:
        if kind == "global":
            TOTALS["calls"] += 1
        elif kind == "class":
            Counted.total += 1
        elif kind == "generator":
            return inputs * (1 + layer.draws.random())
        elif kind == "iterator":
            return inputs * next(layer.turns)
        number = count() if kind == "closure" else TOTALS["calls"] + Counted.total
        return inputs * (1.0 if number < 4 else 1.0 + number % 3)  # as ever, at first

    held = {
        "iterator": {"turns": itertools.cycle([1.0, 2.0])},
        "generator": {"draws": random.Random(3)},
    }
    return called(call, **held.get(kind, {}))


def by_random() -> Any:
    return called(lambda layer, inputs: inputs * random.random())


def by_numpy() -> Any:
    return called(lambda layer, inputs: inputs * float(np.random.rand()))


def through_numpy() -> Any:
    """Values that leave torch and come back: a record would hold those of one batch."""
    import torch

    def call(layer: Any, inputs: Any) -> Any:
        return inputs * torch.from_numpy(np.abs(inputs.detach().numpy()))

    return called(call)


def with_own_gradient() -> Any:
    """A backward pass of one's own, of which a list of operations knows nothing."""
    import torch

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, given: Any) -> Any:
            return given * 2

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            return gradient * 3

    return called(lambda layer, inputs: Doubled.apply(inputs))


def with_a_pass_without_gradients() -> Any:
    """Part of a layer takes no part in the backward pass."""
    import torch

    def call(layer: Any, inputs: Any) -> Any:
        with torch.no_grad():
            scale = inputs.abs().mean()
        return inputs / scale

    return called(call)


def hooked() -> Any:
    model = dense()
    model.layers[0].register_forward_hook(lambda layer, given, found: found * 1.5)
    return model


def of_two() -> Any:
    """Two outputs, each with a loss of its own: `left` and `right`."""
    from keras import Input, Model, layers

    given = Input((6,))
    hidden = layers.Dense(8, activation="tanh")(given)
    return Model(given, {name: layers.Dense(1)(hidden) for name in ("left", "right")})


CALLS: list[str] = []
"""Of `called_loss`."""


def called_loss(y_true: Any, y_pred: Any) -> Any:
    """A loss that counts its calls."""
    from keras import ops

    CALLS.append("")
    return ops.log1p(ops.square(y_true - y_pred))


def surprise(y_true: Any, y_pred: Any) -> Any:
    """A metric of one's own."""
    from keras import ops

    return ops.logsumexp(y_pred, axis=-1) - y_pred[:, 0]


def by_setting(y_true: Any, y_pred: Any) -> Any:
    """A metric that depends on something that nobody sees."""
    return y_pred[:, 0] * SETTINGS["scale"]


def highest() -> type:
    """A class of metrics that keep no sum."""
    from keras import metrics, ops

    class Highest(metrics.Metric):
        def __init__(self, name: str = "highest") -> None:
            super().__init__(name=name)
            self.best = self.add_variable((), "zeros", name="best")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.best.assign(ops.maximum(self.best, ops.max(y_pred)))

        def result(self) -> Any:
            return self.best.value

    return Highest


def huge(y_true: Any, y_pred: Any) -> Any:
    """A metric of numbers beside which those of others are small."""
    return 0.0 * y_pred[:, 0] + 1e6


class Counting:
    """A metric that counts its calls in Python: a record would freeze that."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        self.calls += 1
        return 0.0 * y_pred[:, 0] + self.calls


COUNTING = Counting()


def momentum(learning_rate: float) -> Any:
    """An optimizer of one's own: its update is Keras' own to the bit."""
    import keras

    return keras.optimizers.SGD(learning_rate, momentum=0.875)


def constrained() -> Any:
    """Weights that Keras changes once more after every update."""
    from keras import Input, Sequential, constraints, layers

    bound = constraints.MaxNorm(0.5)
    return Sequential([Input((6,)), layers.Dense(8, kernel_constraint=bound), layers.Dense(4)])


def squares(model: Any, batch: Any) -> Any:
    """An objective that gives a loss for every sample."""
    inputs, targets = batch
    found = model(inputs)
    return ((found.sum(-1) - targets) ** 2), found


def own_loss(y_true: Any, y_pred: Any) -> Any:
    return (y_pred.mean(-1) - y_true) ** 2
