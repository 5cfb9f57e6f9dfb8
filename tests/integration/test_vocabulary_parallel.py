"""Strategy `tensor` with the columns of the logits cut: losses and metrics equal those of whole logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param

import isotrain
from isotrain.core.errors import RunFailedError

CLASSES = 13
SPARSE = {"name": "sparse_categorical_crossentropy", "from_logits": True}
DENSE = {"name": "categorical_crossentropy", "from_logits": True, "label_smoothing": 0.125}
EACH_FRAMEWORK = [param("torch-ddp"), param("tf-multiworker", features=True)]


def cut(degree: int = 2, **options: Any) -> dict[str, Any]:
    return {"strategy": {"name": "tensor", "options": {"degree": degree, **options}}}


def words(tied: bool = False, masks: bool = False, one_table: bool = True) -> Any:
    """A model that predicts the next word at each of 5 positions."""
    import keras

    inputs = keras.Input((5,), dtype="int32")
    embedding = keras.layers.ReversibleEmbedding(
        CLASSES, 8, tie_weights=one_table, mask_zero=masks, name="words"
    )
    x = embedding(inputs)
    x = keras.layers.LayerNormalization(name="norm")(x)
    x = x + keras.layers.Dense(8, name="down")(keras.layers.Dense(6, "silu", name="up")(x))
    if tied:
        return keras.Model(inputs, embedding(x, reverse=True))
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="next")(x))


def texts(kind: str = "classes") -> isotrain.DataSet:
    generator = np.random.default_rng(0)
    inputs = generator.integers(0, CLASSES, (29, 5), np.int32)
    targets = generator.integers(0, CLASSES, (29, 5))
    arrays: tuple[np.ndarray, ...] = inputs, targets
    if kind == "one-hot":
        arrays = inputs, np.eye(CLASSES)[targets]
    elif kind == "weighted":
        arrays = inputs, targets, generator.uniform(0.5, 2.0, (29, 5))
    return isotrain.DataSet(
        tuple(each[:22] for each in arrays), validation=tuple(each[22:] for each in arrays)
    )


SPEC = {
    "model": words,
    "data": texts,
    "loss": SPARSE,
    "metrics": ["accuracy"],
    "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.5},
    "gradient_accumulation_steps": 2,
    "global_batch_size": 8,
    "epochs": 2,
    "seed": 1,
    "precision": "float64",
    "threads": 1,
}


def trained(backend: str, replicas: int, folder: Path, name: str = "run", **fields: Any) -> Any:
    output = folder / f"{name}-{backend}-{replicas}"
    spec = {**SPEC, **fields}
    return isotrain.run(spec, backend=backend, replicas=replicas, output=output, quiet=True)


def assert_equal(result: Any, expected: Any) -> None:
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(result.weights[name], weight, 0, 1e-12, err_msg=name)
    assert result.weights.keys() == expected.weights.keys()
    np.testing.assert_allclose(result.last_loss, expected.last_loss, 0, 1e-12)
    assert result.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        np.testing.assert_allclose(result.metrics[name], value, 0, 1e-12, err_msg=name)


CASES: dict[str, dict[str, Any]] = {
    "classes": {"metrics": ["accuracy", "sparse_categorical_accuracy"]},
    "ignored class": {
        "loss": {**SPARSE, "ignore_class": 0},
        "metrics": [{"name": "sparse_top_k_categorical_accuracy", "k": 3}],
    },
    "probabilities": {"loss": DENSE, "data_args": {"kind": "one-hot"}},
    "weights": {
        "data_args": {"kind": "weighted"},
        "metrics": ["accuracy", {"name": "accuracy", "weighted": True}],
    },
    "tied": {"model_args": {"tied": True}},
    "masked": {"model_args": {"tied": True, "masks": True}},
    "frozen bias": {"initial_weights": {"freeze": ["next/bias"]}},
    "frozen table": {
        "model_args": {"tied": True, "one_table": False},
        "initial_weights": {"freeze": ["words/reverse_embeddings"]},
    },
    "four parts": {"strategy": cut(4)["strategy"]},
}
"""Fields of specs that differ in what the loss and the metrics take."""
CELLS = [
    param("torch-ddp", "classes"),
    *(param("torch-ddp", case, features=True) for case in CASES if case != "classes"),
    *(param("tf-multiworker", case, features=True) for case in CASES),
    *(param(f"horovod-{each}", "weights", features=True) for each in ("torch", "tf")),
]


@pytest.mark.parametrize(("backend", "case"), CELLS)
def test_losses_and_metrics_are_those_of_whole_logits(
    tmp_path: Path, backend: str, case: str
) -> None:
    fields = {**cut(), **CASES[case]}
    expected = trained("torch-ddp", 1, tmp_path, "one", **{**fields, "strategy": "data-parallel"})
    assert_equal(trained(backend, 1, tmp_path, **fields), expected)


@pytest.mark.features
@pytest.mark.parametrize("backend", EACH_FRAMEWORK)
def test_replicas_average_gradients_of_columns(tmp_path: Path, backend: str) -> None:
    expected = trained("torch-ddp", 1, tmp_path, "one")
    assert_equal(trained(backend, 2, tmp_path, **cut()), expected)


def planned_and_counted(session: isotrain.Session) -> tuple[list[str], list[int]]:
    """Lines of the plan, and the bytes that a process's parts all-reduce in each step."""
    import torch.distributed as dist

    original, sizes, counted = dist.all_reduce, [], []

    def all_reduce(tensor: Any, *arguments: Any, group: Any = None, **options: Any) -> Any:
        if dist.get_world_size(group) == 2:
            sizes.append(tensor.nbytes)
        return original(tensor, *arguments, group=group, **options)

    notes = [each for each in session.setup_notes() if each.startswith("tensor: ")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        for batch in session.batches():
            sizes.clear()
            session.step(batch)
            counted.append(sum(sizes))
    return notes, counted


@pytest.mark.parametrize(
    ("metrics", "note", "numbers"),
    [
        ([], "", 0),
        pytest.param(
            *(["accuracy"], "; metrics (accuracy) exchange 2 numbers a position more", 2),
            marks=pytest.mark.features,
        ),
    ],
    ids=["loss", "accuracy"],
)
def test_the_plan_has_the_bytes_that_the_parts_exchange(
    tmp_path: Path, metrics: list[str], note: str, numbers: int
) -> None:
    spec = {**SPEC, "metrics": metrics, "epochs": None, "steps": 3, **cut(layers="next")}
    (notes, counted), _ = isotrain.launch(
        planned_and_counted, spec, backend="torch-ddp", output=tmp_path, quiet=True
    )
    expected = 5 * (3 + 8) * 8
    assert notes == [
        "tensor: next: cut next/kernel along axis 1 to [8, 6], next/bias along axis 0 to [6] here; the parts"
        " exchange 3 numbers a position forward, for the loss, in place of 13 logits, and sum 8 backward:"
        f" {expected} bytes a sample{note}"
    ]
    of_step = 8 * (expected + 5 * numbers * 8)
    assert counted[:-1] == [of_step] * 2  # after the last step all weights are gathered


def predicting(session: isotrain.Session) -> tuple[list[str], Any]:
    notes = [each for each in session.setup_notes() if each.startswith("tensor: next")]
    for batch in session.batches():
        session.step(batch)
    return notes, session.predict(texts().train[0])


WHOLE = {
    "a loss of whole logits": (
        {"loss": "mean_squared_error", "data_args": {"kind": "one-hot"}, "metrics": []},
        "every process computes all logits: the loss, mean_squared_error, takes whole ones",
    ),
    "a metric of whole logits": (
        {"metrics": [{"name": "sparse_top_k_categorical_accuracy", "k": 2}]},
        r"; metrics \(sparse_top_k_categorical_accuracy\) take whole logits: the parts sum 13 numbers",
    ),
}


@pytest.mark.features
@pytest.mark.parametrize("backend", EACH_FRAMEWORK)
@pytest.mark.parametrize("kind", WHOLE)
def test_predictions_are_whole_and_the_plan_says_what_else_is(
    tmp_path: Path, backend: str, kind: str
) -> None:
    fields, note = WHOLE[kind]
    spec = {**SPEC, **fields}
    _, expected = isotrain.launch(predicting, spec, backend="torch-ddp", output=tmp_path / "one")[0]
    for notes, predictions in isotrain.launch(
        predicting, {**spec, **cut()}, backend=backend, output=tmp_path / "cut"
    ):
        assert re.search(note, *notes)
        np.testing.assert_allclose(predictions, expected, 0, 1e-12)


def with_no_class() -> Any:
    inputs, targets = texts().train
    return inputs, np.where(targets == 3, CLASSES, targets)


@pytest.mark.features
@pytest.mark.parametrize("backend", EACH_FRAMEWORK)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"data": with_no_class},
            r"got a target that is no class; expected 0 to 12\..* Received 13",
        ),
        (cut(14, layers="next"), r"next: expected 14 classes or more .* received 13"),
        (
            {"loss": "sparse_categorical_crossentropy", **cut(layers="next")},
            r"'next': stays whole, as it computes logits: the loss, sparse_.*, takes whole ones",
        ),
    ],
    ids=["no class", "few classes", "probabilities"],
)
def test_what_columns_cannot_compute_is_refused(
    tmp_path: Path, backend: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RunFailedError, match=reason):
        trained(backend, 1, tmp_path, **{**cut(), **fields})


STYLES = {"words": "rowwise", "up": "colwise", "down": "rowwise", "next": "colwise-logits"}
SEQUENCE_STYLES = {
    "words": "rowwise-sequence",
    "norm": "sequence",
    "up": "sequence-colwise",
    "down": "rowwise-sequence",
    "next": "sequence-colwise-logits",
}


def native_words(places: str = "") -> Any:
    """A native model of the next word at each of 6 positions, which may add an embedding of these."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
            self.up, self.down, self.next = nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 12)
            if places == "embedding":
                self.places = nn.Embedding(6, 8)
            elif places:
                self.places = nn.Parameter(torch.zeros(6, 8))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens)
            if places:
                numbers = torch.arange(tokens.shape[1])[None]
                x = x + (self.places(numbers) if places == "embedding" else self.places[None])
            x = x + self.down(functional.silu(self.up(self.norm(x))))
            return self.next(x)

    return Words()


def even_texts(kind: str = "classes") -> Any:
    generator = np.random.default_rng(0)
    inputs, targets = generator.integers(0, 12, (2, 22, 6))
    if kind == "one-hot":
        return inputs, np.eye(12)[targets]
    weights = [generator.uniform(0.5, 2.0, (22, 6))] if kind == "weighted" else []
    return isotrain.DataSet((inputs, targets, *weights), validation=(inputs, targets, *weights))


NATIVE = {"model": {"torch": native_words}, "data": even_texts}
NATIVE_CASES: dict[str, dict[str, Any]] = {
    "classes": {},
    "ignored class": {
        "loss": {**SPARSE, "ignore_class": 0},
        "metrics": [{"name": "sparse_top_k_categorical_accuracy", "k": 3}],
        **cut(layers=SEQUENCE_STYLES),
    },
    "probabilities": {"loss": DENSE, "data_args": {"kind": "one-hot"}},
    "weights": {
        "data_args": {"kind": "weighted"},
        "metrics": ["sparse_categorical_accuracy", {"name": "accuracy", "weighted": True}],
    },
    "four parts": cut(4, layers={"next": "colwise-logits"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["classes", *(param(case, features=True) for case in [*NATIVE_CASES][1:])]
)
def test_losses_of_native_modules_are_those_of_whole_logits(tmp_path: Path, case: str) -> None:
    fields = {**NATIVE, **cut(layers=STYLES), **NATIVE_CASES[case]}
    expected = trained("torch-ddp", 1, tmp_path, "one", **{**fields, "strategy": "data-parallel"})
    assert_equal(trained("torch-ddp", 1, tmp_path, **fields), expected)


def predict(session: isotrain.Session) -> Any:
    return session.predict(even_texts().train[0])


@pytest.mark.features
def test_native_predictions_are_whole(tmp_path: Path) -> None:
    spec = {**SPEC, **NATIVE}
    expected = isotrain.launch(predict, spec, backend="torch-ddp", output=tmp_path / "one")[0]
    spec |= cut(layers=STYLES)
    for found in isotrain.launch(predict, spec, backend="torch-ddp", output=tmp_path / "cut"):
        np.testing.assert_allclose(found, expected, 0, 1e-12)


@pytest.mark.features
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"loss": "mean_squared_error", "data_args": {"kind": "one-hot"}},
            r"next: colwise-logits: the loss cannot take cut logits: .* Take colwise-gather\.",
        ),
        (
            cut(layers={**STYLES, "up": "colwise-logits"}),
            r"one module of logits, received up, next",
        ),
        (cut(12, layers={"next": "colwise-logits"}), r"next: .* expected 24 classes or more"),
        (
            cut(layers={"words": "rowwise", "up": "colwise-logits", "down": "rowwise"}),
            r"up: expected the model to return the outputs of this module",
        ),
        (
            {"model_args": {"places": "embedding"}, **cut(layers=SEQUENCE_STYLES)},
            r"places: expected the style rowwise-sequence, received none",
        ),
        (
            {"model_args": {"places": "parameter"}, **cut(layers=SEQUENCE_STYLES)},
            r"A parameter that the model adds there .* make it an Embedding",
        ),
    ],
    ids=["loss", "two", "few classes", "inner", "embedding", "parameter"],
)
def test_styles_of_logits_and_positions_that_do_not_fit_are_refused(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RunFailedError, match=reason):
        trained("torch-ddp", 1, tmp_path, **{**NATIVE, **cut(layers=STYLES), **fields})
