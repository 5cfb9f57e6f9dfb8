"""`random_layers: per-sample`: results with dropout equal those of one replica, on every backend."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated

import isotrain
from isotrain.core.errors import SpecError, UnsupportedError
from isotrain.testing.native_equality import trained

pytestmark = pytest.mark.slow


def feature(*values: Any) -> Any:
    """A case of a further backend."""
    return pytest.param(*values, marks=pytest.mark.features)


SAMPLES = 26
"""Global batches of 8, 8, 8 and 2: uneven over three replicas, and the last leaves one without samples."""


def sequences() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = random.integers(3, size=SAMPLES)
    return random.normal(size=(SAMPLES, 5, 6)) + labels[:, None, None], labels


def portable() -> Any:
    import keras

    class Sampling(keras.layers.Layer):
        """Noise and random scales by `keras.random`."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.seed_generator = keras.random.SeedGenerator(5)

        def call(self, x: Any, training: bool = False) -> Any:
            if not training:
                return x
            rows = keras.ops.shape(x)[0]
            draw, seed = keras.random, self.seed_generator
            x = x + 0.1 * draw.normal(keras.ops.shape(x), dtype=x.dtype, seed=seed)
            x = x * draw.uniform((), 0.5, 1.5, dtype=x.dtype, seed=seed)
            sign = draw.randint((rows, 1, 1), 0, 2, seed=seed)
            kind = draw.categorical(keras.ops.zeros((rows, 3), x.dtype), 1, seed=seed)
            cut = draw.truncated_normal((rows, 1, 1), dtype=x.dtype, seed=seed)
            return x + 0.1 * (keras.ops.cast(sign + kind[:, :, None], x.dtype) + cut)

    layers = keras.layers
    dropout = layers.Dropout(0.25)
    inputs = keras.Input((5, 6))
    x = dropout(layers.Dense(8, activation="tanh", name="first")(inputs))
    x = layers.MultiHeadAttention(2, 4, dropout=0.125)(x, x)
    x = layers.SpatialDropout1D(0.125)(Sampling()(dropout(x)))
    x = layers.LSTM(6, dropout=0.25, recurrent_dropout=0.25)(x)
    x = layers.GaussianNoise(0.25)(layers.GaussianDropout(0.25)(x))
    return keras.Model(inputs, layers.Dense(3)(layers.AlphaDropout(0.125)(x)))


def native() -> Any:
    from torch import Tensor, nn

    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return x
            draw = isotrain.random
            x = x + draw.normal(x, std=0.25) * draw.uniform(x[:, :1], 0.5, 1.5)
            return draw.dropout(x * draw.bernoulli(x, 0.75), 0.25)

    return nn.Sequential(
        nn.Linear(6, 8),
        nn.TransformerEncoderLayer(8, 2, 8, dropout=0.25, batch_first=True),
        nn.Dropout1d(0.25),
        nn.Flatten(),
        nn.Linear(40, 4),
        Noise(),
        nn.Dropout(0.25, inplace=True),
        nn.Tanh(),
        nn.Linear(4, 3),
    )


def small() -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential(
        [keras.Input((5, 6)), layers.Flatten(), layers.Dropout(0.25), layers.Dense(3, name="head")]
    )


STAGE_3 = {"strategy": {"name": "sharded", "options": {"stage": 3}}}
SPLIT = {"gradient_accumulation_steps": 2}
MODELS: dict[str, Any] = {"portable": portable, "small": small, "native": {"torch": native}}


def spec(model: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODELS[model],
        "data": sequences,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "random_layers": "per-sample",
        "global_batch_size": 8,
        "epochs": 2,
        "seed": 3,
        "precision": "float64",
        "threads": 1,
        **fields,
    }


def test_numbers_per_replica_differ() -> None:
    """The same run without the field depends on the number of replicas: the tests can fail."""
    results = trained(spec("portable", random_layers="per-replica"), "torch-ddp", 2)
    assert not np.allclose(results["loss"], by_one_replica("portable")["loss"], rtol=1e-3)


@pytest.mark.parametrize("strategy", ["pipeline", "parameter-server"])
def test_refuses_strategies_that_compute_elsewhere(strategy: str) -> None:
    with pytest.raises(UnsupportedError, match="random_layers: per-sample"):
        isotrain.plan(spec("portable", strategy=strategy), backend="torch-ddp", replicas=2)


def test_refuses_compiled_steps() -> None:
    with pytest.raises(SpecError, match="random_layers"):
        isotrain.plan(spec("portable", compile=True), backend="torch-ddp", replicas=2)


@functools.cache
def by_one_replica(model: str) -> dict[str, Any]:
    return trained(spec(model), "torch-ddp", 1)


def assert_equals_one_replica(results: dict[str, Any], model: str) -> None:
    expected = by_one_replica(model)
    np.testing.assert_allclose(results["loss"], expected["loss"], rtol=1e-12)
    assert set(results["weights"]) == set(expected["weights"])
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(results["weights"][name], weight, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "backend", "replicas", "fields"),
    [
        ("portable", "torch-ddp", 3, {}),
        ("portable", "torch-ddp", 2, {"capture": False}),
        ("portable", "torch-ddp", 2, SPLIT | {"recompute": ["dropout", "lstm"]}),
        feature("portable", "tf-mirrored", 3, {}),
        feature("portable", "tf-multiworker", 2, SPLIT | {"recompute": ["dropout", "lstm"]}),
        feature("portable", "horovod-torch", 2, {}),
        feature("portable", "horovod-tf", 3, {}),
        ("portable", "torch-ddp", 2, STAGE_3),
        feature("portable", "tf-multiworker", 2, STAGE_3),
        ("native", "torch-ddp", 2, STAGE_3),
        ("native", "torch-ddp", 3, {}),
        feature("native", "horovod-torch", 2, SPLIT | {"recompute": ["1", "5"]}),
    ],
)
def test_equals_one_replica(
    model: str, backend: str, replicas: int, fields: dict[str, Any]
) -> None:
    """Losses and weights are those of one replica, to 1e-12."""
    assert_equals_one_replica(trained(spec(model, **fields), backend, replicas), model)


def test_frameworks_draw_the_same_bits(tmp_path: Path) -> None:
    """TensorFlow's numbers are torch's: integers and uniform ones to the bit, normal ones to rounding."""
    run_isolated(_compare_draws, spec("portable"), "tf-mirrored", tmp_path / "run")


def _compare_draws(_: isotrain.Session) -> None:
    import keras
    import tensorflow as tf
    import torch

    from isotrain.adapters.common.sample_draws import DrawKeys, active
    from isotrain.adapters.tensorflow.base.sample_draws import TensorFlowPassDraws
    from isotrain.adapters.torch.base.sample_draws import TorchPassDraws

    keys = DrawKeys(7)
    draws = TorchPassDraws(keys, torch.tensor([5, 2], dtype=torch.int32), 3, True)
    other = TensorFlowPassDraws(keys, tf.constant([5, 2], tf.uint32), 3, True)
    for shape in ((3, 5), (3,), (), (3, 2, 1)):
        assert other.integers(shape).numpy().tolist() == draws.integers(shape).tolist()
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            expected = draws.uniform(shape, dtype).double().tolist()
            assert tf.cast(other.uniform(shape, dtype), "float64").numpy().tolist() == expected
        numbers = draws.normal(shape, "float64").numpy()
        np.testing.assert_allclose(other.normal(shape, "float64").numpy(), numbers, rtol=1e-13)

    with active(other):
        classes = keras.random.categorical(tf.constant([[30, 0]] * 3, tf.bfloat16), 2000)
    assert not keras.ops.any(classes)  # a noise of infinity would win

    def traced(x: tf.Tensor) -> tf.Tensor:
        return TensorFlowPassDraws(keys, tf.constant([5, 2], tf.uint32), 3, True).normal_like(x)

    any_shape = tf.TensorSpec([None, None], tf.float64)
    function = tf.function(traced, autograph=False).get_concrete_function(any_shape)
    draws.draws = 0
    numbers = draws.normal((3, 4), "float64").numpy()
    np.testing.assert_allclose(function(tf.zeros((3, 4), tf.float64)).numpy(), numbers, rtol=1e-13)


def test_resumes_on_another_framework(tmp_path: Path) -> None:
    """A run goes on with another framework and number of replicas as if it had never stopped."""
    fields = {"checkpoint": {"every_epochs": 1}}
    quiet: Any = {"on_event": lambda event: None}
    whole = isotrain.run(
        spec("small", **fields),
        backend="torch-ddp",
        replicas=1,
        output=tmp_path / "whole",
        **quiet,
    )
    first = spec("small", **fields, epochs=1)
    isotrain.run(first, backend="torch-ddp", replicas=2, output=tmp_path / "part", **quiet)
    resumed = isotrain.resume(
        tmp_path / "part",
        spec=spec("small", **fields),
        backend="tf-mirrored",
        replicas=3,
        **quiet,
    )
    np.testing.assert_allclose(resumed.history.loss, whole.history.loss, rtol=1e-12)


def updates_in_turn(session: isotrain.Session) -> dict[str, Any]:
    """Trains on arrays of the loop, of which every process has a part, by each update."""
    inputs, targets = sequences()
    rank, processes = session.rank, len(session.plan.processes)
    losses = []
    for step in range(2):
        rows = np.array_split(np.arange(8) + 8 * step, processes)[rank]
        batch = session.batch(inputs[rows], targets[rows])
        losses += [float(session.step(batch, name)) for name in ("head", "all")]
    return {"losses": losses, "weights": session.read_state(("trainable",))}


def noisy_objective(model: Any, batch: Any) -> Any:
    """Losses with noise of the objective's own."""
    from keras import ops

    inputs, targets = batch
    logits = model(inputs)
    logits = logits + isotrain.random.normal(logits, std=0.25)
    losses = -ops.take_along_axis(ops.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    return losses, logits


def test_updates_on_batches_of_a_loop(tmp_path: Path) -> None:
    """Each update draws numbers of its own, and rows of all processes are those of one global batch."""
    updates = {
        name: {"weights": "*head*", "objective": noisy_objective} for name in ("head", "all")
    }
    changes = {"loss": None, "data": None, "epochs": None, "steps": 2, "updates": updates}
    results = [
        isotrain.launch(
            updates_in_turn,
            spec("small", **changes),
            backend=backend,
            replicas=replicas,
            output=tmp_path / backend,
            on_event=lambda event: None,
        )[0]
        for backend, replicas in (("torch-ddp", 1), ("horovod-torch", 2), ("tf-multiworker", 3))
    ]
    for other in results[1:]:
        np.testing.assert_allclose(other["losses"], results[0]["losses"], rtol=1e-12)
        for name, weight in results[0]["weights"].items():
            np.testing.assert_allclose(other["weights"][name], weight, rtol=1e-11, atol=1e-12)


def drawing_itself() -> Any:
    import tensorflow as tf

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = tf.Variable(tf.ones((30, 3), tf.float64), name="kernel")

        @property
        def input_shape(self) -> Any:
            return (None, 5, 6)

        def __call__(self, x: Any) -> Any:
            return tf.nn.dropout(tf.reshape(x, (-1, 30)), 0.25) @ self.kernel

    return Net()


def looping() -> Any:
    import keras

    class Loop(keras.layers.Layer):
        """Noise in each turn of a loop, which is traced once."""

        def __init__(self) -> None:
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(5)

        def call(self, x: Any) -> Any:
            def turn(_: Any, y: Any) -> Any:
                noise = keras.random.normal(
                    keras.ops.shape(y), dtype=y.dtype, seed=self.seed_generator
                )
                return y + noise

            return keras.ops.fori_loop(0, 3, turn, x)

    return keras.Sequential(
        [keras.Input((5, 6)), keras.layers.Flatten(), Loop(), keras.layers.Dense(3)]
    )


def shuffling() -> Any:
    import keras

    class Shuffle(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return keras.random.shuffle(x)

    return keras.Sequential(
        [keras.Input((5, 6)), keras.layers.Flatten(), Shuffle(), keras.layers.Dense(3)]
    )


@pytest.mark.parametrize(
    ("model", "backend", "culprit"),
    [
        ({"tensorflow": drawing_itself}, "tf-mirrored", "the operation .*dropout"),
        (shuffling, "torch-ddp", "keras.random.shuffle"),
        (shuffling, "tf-mirrored", "keras.random.shuffle"),
        (looping, "tf-mirrored", "a loop"),
    ],
)
def test_refuses_other_random_numbers(
    model: Any, backend: str, culprit: str, tmp_path: Path
) -> None:
    with pytest.raises(isotrain.RunFailedError, match=f"{culprit}.* not by sample"):
        isotrain.run(
            {**spec("portable"), "model": model},
            backend=backend,
            replicas=1,
            output=tmp_path / "run",
            on_event=lambda event: None,
        )
