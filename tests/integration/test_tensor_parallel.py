"""Strategy `tensor`: layers cut over processes compute what whole ones do, and go on from any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param

import isotrain
from isotrain.core.errors import RunFailedError, UnsupportedError
from isotrain.core.results.result import read_history

CUT = {"strategy": {"name": "tensor", "options": {"degree": 2}}}
STEPPED = {
    "optimizer": {"name": "adamw", "lr": 0.0625, "weight_decay": 0.25},
    "clip": {"global_norm": 0.5},
    "gradient_accumulation_steps": 2,
    "gradient_norm": True,
    "ema": {"decay": 0.875},
}
CELLS = [
    param("torch-ddp", 1),
    *[
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in (("torch-ddp", 2), ("tf-multiworker", 1))
    ],
    param("tf-multiworker", 2, features=True),
    *[
        param(f"horovod-{each}", count, features=True)
        for each in ("torch", "tf")
        for count in (1, 2)
    ],
]
"""Backends, and how many copies of the cut layers there are."""
EACH_FRAMEWORK = [param("torch-ddp"), param("tf-multiworker", features=True)]
SILU = {"model_args": {"activation": "silu"}}
"""TensorFlow's gelu divides by a float32 root."""


def transformer(rate: float = 0.0, width: int = 13, activation: str = "gelu") -> Any:
    import keras

    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(11, 8, name="embedding")(inputs)
    attention = keras.layers.MultiHeadAttention(4, 4, dropout=rate, seed=5, name="attention")
    x = keras.layers.LayerNormalization(name="norm")(x + attention(x, x))
    x = keras.layers.Dropout(rate, seed=4)(x)
    hidden = keras.layers.Dense(width, activation=activation, name="up")(x)
    hidden = keras.layers.Dropout(rate, seed=7)(hidden)
    x = x + keras.layers.Dense(8, name="down")(hidden)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="classes")(x))


def tokens() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 11, (22, 5), np.int32), generator.integers(0, 4, 22)


SPEC = {
    "model": transformer,
    "data": tokens,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "optimizer": {"name": "sgd", "lr": 0.0625, "momentum": 0.5},
    "global_batch_size": 8,
    "epochs": 2,
    "seed": 1,
    "precision": "float64",
    "threads": 1,
}


def trained(backend: str, replicas: int, folder: Path, name: str = "run", **fields: Any) -> Any:
    """The result of a run; options of it, such as `resume`, are told from fields by name."""
    options = {key: fields.pop(key) for key in ("resume",) if key in fields}
    spec = {**SPEC, **fields}
    output = folder / f"{name}-{backend}-{replicas}"
    return isotrain.run(
        spec, backend=backend, replicas=replicas, output=output, quiet=True, **options
    )


def assert_equal(result: Any, expected: Any, bound: float = 1e-12) -> None:
    assert result.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(result.weights[name], weight, 0, bound, err_msg=name)
    np.testing.assert_allclose(result.last_loss, expected.last_loss, 0, bound)


@pytest.mark.parametrize(("backend", "replicas"), CELLS)
def test_cut_layers_train_as_one_replica(tmp_path: Path, backend: str, replicas: int) -> None:
    expected = trained("torch-ddp", 1, tmp_path, "one", **STEPPED, **SILU)
    result = trained(backend, replicas, tmp_path, **STEPPED, **SILU, **CUT)
    assert_equal(result, expected)
    norms = [
        [*read_history(each.run_directory).scalars["gradient_norm"].values()]
        for each in (result, expected)
    ]
    np.testing.assert_allclose(*norms, 1e-12)


@pytest.mark.features
@pytest.mark.parametrize("backend", EACH_FRAMEWORK)
def test_four_parts_of_a_layer_train_as_one_replica(tmp_path: Path, backend: str) -> None:
    """A head for each process; of the 13 units one has four, of the 11 rows one has two."""
    cut = {"strategy": {"name": "tensor", "options": {"degree": 4}}}
    expected = trained("torch-ddp", 1, tmp_path, "one", **STEPPED, **SILU)
    assert_equal(trained(backend, 1, tmp_path, **STEPPED, **SILU, **cut), expected)


@pytest.mark.slow
@pytest.mark.parametrize("random_layers", ["per-replica", "per-sample"])
@pytest.mark.parametrize("backend", EACH_FRAMEWORK)
def test_dropout_drops_the_same_inside_cut_layers(
    tmp_path: Path, backend: str, random_layers: Any
) -> None:
    fields = {"model_args": {"rate": 0.25}, "random_layers": random_layers}
    expected = trained(backend, 2, tmp_path, "whole", **fields)
    assert_equal(trained(backend, 2, tmp_path, **fields, **CUT), expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend", EACH_FRAMEWORK)
def test_norms_are_those_of_whole_weights(tmp_path: Path, backend: str) -> None:
    fields = {"optimizer": {"name": "lamb", "lr": 0.0625}, "clip": {"norm": 0.25}}
    expected = trained(backend, 1, tmp_path, "one", **fields)
    assert_equal(trained(backend, 1, tmp_path, **fields, **CUT), expected)


def strategy(name: str, **options: Any) -> dict[str, Any]:
    return {"strategy": {"name": name, "options": options}}


SHARDED = strategy("sharded", stage=2)
ROUTES = {
    "data-parallel": [("torch-ddp", 1, CUT), ("torch-ddp", 2, {}), ("torch-ddp", 2, CUT)],
    "sharded": [("torch-ddp", 1, CUT), ("torch-ddp", 2, SHARDED), ("torch-ddp", 1, CUT)],
    "degree": [
        ("torch-ddp", 1, CUT),
        ("torch-ddp", 1, strategy("tensor", degree=3)),
        ("torch-ddp", 1, CUT),
    ],
    "frameworks": [("tf-multiworker", 1, CUT), ("torch-ddp", 1, CUT), ("horovod-tf", 2, CUT)],
    "tensorflow": [("torch-ddp", 1, CUT), ("tf-multiworker", 2, {}), ("tf-multiworker", 1, CUT)],
}
"""Backend, replicas and strategy of every two steps."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "route",
    [
        "data-parallel",
        "sharded",
        "degree",
        param("frameworks", features=True, exhaustive=True),
        param("tensorflow", features=True),
    ],
)
def test_a_checkpoint_goes_on_under_any_strategy(tmp_path: Path, route: str) -> None:
    fields = {**STEPPED, "epochs": None, "checkpoint": {"every_steps": 2}}
    del fields["gradient_norm"]  # sharded runs measure none
    fields |= SILU
    expected = trained("torch-ddp", 1, tmp_path, "one", **{**fields, "steps": 6})
    before = None
    for part, (backend, replicas, strategy_fields) in enumerate(ROUTES[route]):
        resume = {} if before is None else {"resume": before.run_directory}
        step_fields = {**fields, "steps": 2 * part + 2, **strategy_fields}
        before = trained(backend, replicas, tmp_path, f"part-{part}", **step_fields, **resume)
    assert_equal(before, expected)


def trained_predictions(session: isotrain.Session) -> Any:
    for batch in session.batches():
        session.step(batch)
    return session.predict(tokens()[0])


def predicting(session: isotrain.Session) -> list[Any]:
    predictions = trained_predictions(session)
    refusals = []
    for call in (
        lambda: session.call(tokens()[0]),
        lambda: session.freeze("up/*"),
    ):
        with pytest.raises(UnsupportedError) as refusal:
            call()
        refusals.append(str(refusal.value).partition(":")[0])
    return [predictions, *refusals]


@pytest.mark.slow
@pytest.mark.parametrize("backend", EACH_FRAMEWORK)
def test_all_processes_predict_and_none_alone(tmp_path: Path, backend: str) -> None:
    fields = {**SPEC, "epochs": 1}
    expected = isotrain.launch(
        trained_predictions, fields, backend=backend, replicas=1, output=tmp_path / "one"
    )[0]
    for predictions, *refusals in isotrain.launch(
        predicting, {**fields, **CUT}, backend=backend, replicas=2, output=tmp_path / "cut"
    ):
        np.testing.assert_allclose(predictions, expected, 0, 1e-12)
        assert refusals == ["session.call", "session.freeze"]


def test_a_layer_needs_a_unit_for_each_part(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"up, down: expected 2 units or more"):
        trained("torch-ddp", 1, tmp_path, model_args={"width": 1}, **CUT)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nope", "no layer has such a name"), ("norm", "stays whole. These can be cut: two Dense")],
)
def test_a_name_of_no_layer_to_cut_is_refused_with_those_that_can(
    tmp_path: Path, name: str, reason: str
) -> None:
    names = r"can be cut here: up, down, attention, embedding, classes\."
    with pytest.raises(RunFailedError, match=f"'{name}': {reason}.* {names}"):
        trained("torch-ddp", 1, tmp_path, **strategy("tensor", layers=[name]))


def tied() -> Any:
    """A model whose last layer computes with the weight of its first one."""
    import keras

    class Scores(keras.layers.Layer):
        def __init__(self, embedding: Any) -> None:
            super().__init__()
            self.embedding = embedding

        def call(self, inputs: Any) -> Any:
            return keras.ops.matmul(inputs, keras.ops.transpose(self.embedding.embeddings))

    inputs = keras.Input((5,), dtype="int32")
    embedding = keras.layers.Embedding(11, 8, name="embedding")
    x = keras.layers.GlobalAveragePooling1D()(embedding(inputs))
    x = keras.layers.Dense(9, activation="relu", name="up")(x)
    x = keras.layers.Dense(8, name="down")(x)
    return keras.Model(inputs, Scores(embedding)(x))


@pytest.mark.slow
def test_a_layer_that_another_one_uses_stays_whole(tmp_path: Path) -> None:
    expected = trained("torch-ddp", 1, tmp_path, "one", model=tied)
    assert_equal(trained("torch-ddp", 1, tmp_path, model=tied, **CUT), expected)


def with_callers_besides() -> Any:
    """A model two of whose pairs of Dense layers stay whole: of another caller, and of a regularizer."""
    import keras

    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(11, 8, name="embedding")(inputs)
    x = keras.layers.GlobalAveragePooling1D()(x)
    hidden = keras.layers.Dense(6, activation="relu")
    pair = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(8)])
    x = pair(x) + keras.ops.mean(hidden(x), -1, keepdims=True)
    regularized = keras.layers.Activation("tanh", activity_regularizer=keras.regularizers.L2(0.25))
    return keras.Model(inputs, keras.layers.Dense(4)(regularized(keras.layers.Dense(6)(x))))


def ids_from_the_end() -> tuple[np.ndarray, np.ndarray]:
    return tokens()[0] - 11, tokens()[1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", EACH_FRAMEWORK)
def test_layers_that_others_see_stay_whole_and_ids_count_from_the_end(
    tmp_path: Path, backend: str
) -> None:
    fields = {"model": with_callers_besides, "data": ids_from_the_end}
    expected = trained(backend, 1, tmp_path, "one", **fields)
    assert_equal(trained(backend, 1, tmp_path, **fields, **CUT), expected)


@pytest.mark.features
@pytest.mark.parametrize("backend", EACH_FRAMEWORK)
@pytest.mark.parametrize("of_pair", ["up/kernel", "down/bias"])
def test_partly_frozen_layers_stay_whole(tmp_path: Path, backend: str, of_pair: str) -> None:
    """Of the pair and of the attention one weight is frozen each; the embedding is cut."""
    fields = {**SILU, "initial_weights": {"freeze": [of_pair, "attention/query/bias"]}}
    expected = trained("torch-ddp", 1, tmp_path, "one", **fields)
    assert_equal(trained(backend, 1, tmp_path, **fields, **CUT), expected)


def ids_past_the_end() -> tuple[np.ndarray, np.ndarray]:
    return tokens()[0] + 1, tokens()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        param("torch-ddp", "index out of range"),
        param("tf-multiworker", r"is not in \[0, ", features=True),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path, backend: str, reason: str) -> None:
    with pytest.raises(RunFailedError, match=reason):
        trained(backend, 1, tmp_path, data=ids_past_the_end, **CUT)


def with_scores() -> Any:
    import keras

    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(11, 8, name="embedding")(inputs)
    attention = keras.layers.MultiHeadAttention(4, 4, name="attention")
    x, scores = attention(x, x, return_attention_scores=True)
    x = keras.layers.GlobalAveragePooling1D()(x) + keras.ops.mean(scores, (1, 2, 3))[:, None]
    return keras.Model(inputs, keras.layers.Dense(4)(x))


@pytest.mark.slow
def test_attention_scores_of_some_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="attention returns attention scores"):
        trained("torch-ddp", 1, tmp_path, model=with_scores, **CUT)


def test_what_parts_cannot_compute_is_refused() -> None:
    spec = {"model": transformer, "data": tokens, "loss": "mean_squared_error", "epochs": 1}
    spec |= {"optimizer": {"name": "sgd", "lr": 0.1}, "global_batch_size": 8, **CUT}
    for fields, reason in (
        ({"precision": "float16"}, "scales no losses"),
        ({"optimizer": {"name": "muon", "lr": 0.1}}, "whole gradient of a matrix"),
        ({"recompute": ["up"]}, "would communicate again"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            isotrain.plan({**spec, **fields}, backend="torch-ddp", replicas=1)


def squared_mean(model: Any, batch: Any) -> Any:
    import keras

    return keras.ops.square(keras.ops.mean(model(batch[0], training=True), -1))


def test_the_plan_says_what_an_objective_sees_of_layers_that_are_cut() -> None:
    spec = {key: value for key, value in SPEC.items() if key != "loss"}
    for fields, count in (({"objective": squared_mean}, 1), ({"loss": "mean_squared_error"}, 0)):
        plan = isotrain.plan({**spec, **fields, **CUT}, backend="torch-ddp", replicas=1)
        assert sum("an objective may call the model" in note for note in plan.notes) == count


def pair() -> Any:
    import keras

    cut = [keras.layers.Dense(units, activation="tanh") for units in (6, 3)]
    return keras.Sequential([keras.Input((5,)), *cut, keras.layers.Dense(1)])


def points() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(22, 5)), generator.normal(size=22)


def with_slope(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """A loss with the slope of the model, so that its gradient is one of a gradient."""
    import keras

    slope = step.gradient(model, batch[0])
    return keras.ops.square(model(batch[0])[:, 0] - batch[1]) + keras.ops.sum(slope**2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", EACH_FRAMEWORK)
def test_gradients_of_gradients_are_those_of_whole_layers(tmp_path: Path, backend: str) -> None:
    fields = {"model": pair, "data": points, "objective": with_slope, "loss": None}
    expected = trained(backend, 1, tmp_path, "one", **fields)
    assert_equal(trained(backend, 1, tmp_path, **fields, **CUT), expected)


def token_stream() -> Any:
    """A stream of the batches of `tokens`, and these for validation."""
    inputs, targets = tokens()
    batches = [(inputs[begin : begin + 8], targets[begin : begin + 8]) for begin in (0, 8, 16)]
    return isotrain.DataSet(lambda: iter(batches), validation=(inputs, targets))


def trained_with_last_weights(session: isotrain.Session) -> Any:
    """Trains as a run does, but tries to save the newest weights after every step."""
    from isotrain.core.worker import entry_points

    entry_points._SAVE_INTERVAL_SECONDS = 0.0
    return entry_points.train(session)


def test_averages_of_cut_weights_stop_no_process(tmp_path: Path) -> None:
    """After an evaluation all weights are gathered, and gathering their average takes all processes."""
    spec = {**SPEC, "data": token_stream, "ema": {"decay": 0.875}, **CUT}
    output = tmp_path / "run"
    result, other = isotrain.launch(
        trained_with_last_weights, spec, backend="torch-ddp", output=output, quiet=True
    )
    assert result["data_read"]
    assert other is None
    assert (output / "weights.safetensors").is_file()
