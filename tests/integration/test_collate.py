"""Runs on samples of different lengths, whose slices are padded each to a width of its own."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param

import isotrain
from isotrain.core.worker.fit import fit
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

SAMPLES, TOKENS, PADDING = 13, 12, -1


class Texts:
    """Dicts of 2 to 8 tokens each, and of the token that follows each of them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(index)
        words = random.integers(1, TOKENS, random.integers(3, 10))
        return {"tokens": words[:-1], "labels": words[1:]}


def data() -> isotrain.DataSet:
    texts = isotrain.sources.MapStyle(Texts(), inputs="tokens", targets="labels")
    return isotrain.DataSet(texts, texts)


@dataclasses.dataclass
class Text:
    """A sample of which no text has the optional part."""

    tokens: np.ndarray
    labels: np.ndarray
    hint: float | None = None


def objects() -> isotrain.DataSet:
    samples = [Text(**Texts()[index]) for index in range(SAMPLES)]
    texts = isotrain.sources.MapStyle(samples, inputs="tokens", targets="labels")
    return isotrain.DataSet(texts, texts)


def streamed() -> Any:
    texts = Texts()
    return isotrain.sources.sample_stream(
        lambda: map(texts.__getitem__, range(SAMPLES)), "tokens", "labels", samples=SAMPLES
    )


def padded_by_torch(samples: list[dict[str, np.ndarray]]) -> Any:
    """The batch of a DataLoader's `collate_fn`."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def rows(name: str, value: int) -> Any:
        tensors = [torch.from_numpy(sample[name]) for sample in samples]
        return pad_sequence(tensors, batch_first=True, padding_value=value)

    return rows("tokens", 0), rows("labels", PADDING)


def loaders() -> isotrain.DataSet:
    from torch.utils.data import DataLoader

    loader = DataLoader(Texts(), batch_size=2, collate_fn=padded_by_torch)
    return isotrain.DataSet(loader, loader)


def model() -> Any:
    """A next-token model, of which no token depends on those after it."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((None,), dtype="int64"),
            layers.Embedding(TOKENS, 4),
            layers.Conv1D(6, 3, padding="causal", activation="tanh"),
            layers.Dense(TOKENS),
        ]
    )


def weighted_loss(model: Any, batch: Any) -> Any:
    """Losses of tokens, in which padding has the weight 0."""
    import keras

    inputs, targets = batch
    is_token = keras.ops.cast(targets != PADDING, "float64")
    losses = keras.losses.sparse_categorical_crossentropy(
        keras.ops.maximum(targets, 0), model(inputs), from_logits=True
    )
    return isotrain.weighted(losses, is_token)


LOSS = {"name": "sparse_categorical_crossentropy", "from_logits": True, "ignore_class": PADDING}
SPEC = {
    "model": model,
    "data": data,
    "collate": {"pad": {"tokens": 0, "labels": PADDING}},
    "loss": LOSS,
    "optimizer": {"name": "sgd", "lr": 0.5},
    "global_batch_size": 5,
    "epochs": 2,
    "precision": "float64",
    "device": "cpu",
    "threads": 1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "longest": {},
    "multiple": {"collate": {**SPEC["collate"], "to": "multiple-of-4"}},
    "fixed": {"collate": {**SPEC["collate"], "to": 11}},
    "function": {"collate": padded_by_torch, "gradient_accumulation_steps": 2},
    "loader": {"collate": None, "data": loaders},
    "dataclasses": {"data": objects},
    "workers": {"loader": {"workers": 2}, "gradient_accumulation_steps": 2},
    "weighted": {"loss": None, "objective": weighted_loss},
}
CELLS = {
    **{("torch-ddp", replicas): tuple(VARIANTS) for replicas in (1, 3)},
    ("tf-mirrored", 2): ("longest", "weighted", "dataclasses"),
    ("tf-multiworker", 2): ("longest", "function"),
    ("horovod-torch", 2): ("longest", "function"),
    ("horovod-tf", 2): ("longest",),
}
"""Variants by backend and replicas: what makes batches is the same on all; TensorFlow traces most widths."""
LENGTHS = [len(Texts()[index]["tokens"]) for index in range(SAMPLES)]


def fitted(session: isotrain.Session, name: str) -> dict[str, Any]:
    metrics = fit(session)
    predictions = session.predict()
    return {"loss": session.last_loss, **metrics, "predictions": predictions}


@functools.cache
def results(backend: str, replicas: int) -> dict[str, dict[str, Any]]:
    """Results of every variant, in one run."""
    specs = {name: SPEC | VARIANTS[name] for name in CELLS[backend, replicas]}
    return launched_in_turn(specs, fitted, backend, replicas)[0]


@pytest.mark.parametrize(
    ("backend", "replicas", "variant"),
    [param(*cell, variant) for cell, variants in CELLS.items() for variant in variants],
)
def test_padding_changes_no_result(backend: str, replicas: int, variant: str) -> None:
    seen, expected = results(backend, replicas)[variant], results("torch-ddp", 1)["longest"]
    for name in ("loss", "validation_loss"):
        assert seen[name] == pytest.approx(expected[name], abs=1e-12, rel=0), name
    for row, reference, tokens in zip(
        seen["predictions"], expected["predictions"], LENGTHS, strict=True
    ):
        np.testing.assert_allclose(row[:tokens], reference[:tokens], rtol=0, atol=1e-12)


COUNTS_PADDING = {
    "padding": {"loss": {"name": "sparse_categorical_crossentropy", "from_logits": True}},
    "function": {
        "collate": padded_by_torch,
        "loss": None,
        "objective": lambda model, batch: model(batch[0]).mean((1, 2)),
    },
}


@pytest.mark.parametrize("case", COUNTS_PADDING)
def test_a_loss_that_counts_padding_is_refused_on_several_replicas(
    case: str, tmp_path: Path
) -> None:
    collate = {"pad": {"tokens": 0, "labels": 0}}
    spec = SPEC | {"collate": collate} | COUNTS_PADDING[case] | {"steps": 2, "epochs": None}
    with pytest.raises(isotrain.RunFailedError, match=r"(?s)padded to widths of their own.*ISO301"):
        isotrain.run(spec, backend="torch-ddp", replicas=2, output=tmp_path / "refused")
    for changes, replicas in (({}, 1), ({"ignore": ["ISO301"]}, 2)):
        isotrain.run(
            spec | changes,
            backend="torch-ddp",
            replicas=replicas,
            output=tmp_path / str(replicas),
            on_event=lambda _: None,
        )


def module_of_static_lengths() -> Any:
    """A module whose Python computes with the length of the tokens."""
    import tensorflow as tf

    class Tokens(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = tf.Variable(np.linspace(-1, 1, TOKENS * TOKENS).reshape(TOKENS, -1))

        def __call__(self, tokens: Any) -> Any:
            length = int(tokens.shape[1])
            return tf.reshape(tf.gather(self.table, tokens), (-1, length, TOKENS))

    return Tokens()


TRACES: list[int] = []


def traced_loss(model: Any, batch: Any) -> Any:
    """A loss of which Python is called once for each trace."""
    TRACES.append(1)
    return weighted_loss(model, batch)


def trace_count(session: isotrain.Session, name: str) -> tuple[int, float | None]:
    TRACES.clear()
    for batch in session.batches():
        session.step(batch)
    return len(TRACES), session.last_loss


def test_tensorflow_traces_a_few_times_for_any_number_of_lengths() -> None:
    base = SPEC | {"loss": None, "objective": traced_loss, "global_batch_size": 2}
    fixed = {"collate": {**SPEC["collate"], "to": 11}}
    native = {"model": {"tensorflow": module_of_static_lengths}}
    specs = {"any": base, "one": base | fixed, "static": base | native}
    specs["static, one"] = base | native | fixed
    specs["stream"] = base | {"data": streamed}
    seen = launched_in_turn(specs, trace_count, "tf-mirrored", 1)[0]
    assert seen["any"][0] <= 3 * seen["one"][0], seen
    assert seen["stream"][0] <= 3 * seen["one"][0], seen
    for name, other in (("any", "one"), ("static", "static, one")):
        assert seen[name][1] == pytest.approx(seen[other][1], abs=1e-12), name


WIDTHS = np.array([[5, 7, 7, 9], [5, 5, 5, 5]])
"""Widths of the batches of two replicas: one traces for axes of any length at its second step."""


def texts_of_widths() -> isotrain.DataSet:
    samples = [(np.arange(width) % TOKENS, np.arange(width)) for width in WIDTHS.T.flat]
    return isotrain.DataSet(isotrain.sources.MapStyle(samples))


def loss_with_a_sum_of_part(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    from keras import ops

    outputs = model(batch[0])
    part = step.sum(ops.reshape(outputs, (-1,))[:4])
    return ops.mean(outputs[:, :2] ** 2, (1, 2)) + ops.sum(part**2)


def losses_of_steps(session: isotrain.Session, name: str) -> list[float]:
    return [float(session.step(batch)) for batch in session.batches()]


def test_sums_of_one_shape_take_widths_that_differ_between_replicas() -> None:
    changes = {"data": texts_of_widths, "loss": None, "objective": loss_with_a_sum_of_part}
    changes |= {"global_batch_size": 2, "epochs": 1, "order": "sequential"}
    changes["collate"] = {"pad": {"inputs": 0, "targets": 0}}
    changes["ignore"] = ["ISO301"]  # the loss is of two tokens, which all samples have
    specs = {"sum": SPEC | changes}
    expected, seen = (
        launched_in_turn(specs, losses_of_steps, backend, 2)[0]["sum"]
        for backend in ("torch-ddp", "tf-multiworker")
    )
    np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-12)


WORDS = np.array([["to", "be"], ["or", "not"], ["to", "be"], ["that", "is"], ["the", "question"]])


def words() -> Any:
    return WORDS, np.arange(5) % 2


def lookup_model() -> Any:
    from keras import Input, Sequential, layers

    lookup = layers.StringLookup(vocabulary=sorted(set(WORDS.ravel())))
    layer = [layers.Embedding(9, 4), layers.Flatten(), layers.Dense(2)]
    return Sequential([Input((2,), dtype="string"), lookup, *layer])


TEXT_SPEC = {
    **{
        name: SPEC[name]
        for name in ("optimizer", "global_batch_size", "epochs", "device", "threads")
    },
    "model": lookup_model,
    "data": words,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "global_batch_size": 2,
}


SENTENCES = np.array([" ".join(row) for row in WORDS])


def sentences() -> Any:
    return SENTENCES[:, None], np.arange(5) % 2


def vectorizing_model() -> Any:
    from keras import Input, Sequential, layers

    words = sorted(set(WORDS.ravel()))
    vectorize = layers.TextVectorization(vocabulary=words, output_sequence_length=2)
    layer = [layers.Embedding(len(words) + 2, 4), layers.Flatten(), layers.Dense(2)]
    return Sequential([Input((1,), dtype="string"), vectorize, *layer])


TEXT_SPECS = {
    "StringLookup": TEXT_SPEC,
    "TextVectorization": TEXT_SPEC | {"model": vectorizing_model, "data": sentences},
}


def of_text(session: isotrain.Session, name: str) -> Any:
    fit(session)
    return session.predict((TEXT_SPECS[name]["data"]()[0],))


@functools.cache
def predictions_of_text(backend: str, replicas: int) -> list[dict[str, Any]]:
    return launched_in_turn(TEXT_SPECS, of_text, backend, replicas)


@pytest.mark.parametrize(
    ("backend", "replicas", "layer"),
    [
        param(*cell, layer)
        for cell in (("tf-mirrored", 2), ("tf-multiworker", 2), ("horovod-tf", 2))
        for layer in TEXT_SPECS
    ],
)
def test_tensorflow_takes_text(backend: str, replicas: int, layer: str) -> None:
    expected = predictions_of_text("tf-mirrored", 1)[0][layer]
    np.testing.assert_array_equal(expected[0], expected[2])  # the same words
    assert len(np.unique(expected, axis=0)) == 4
    for of_rank in predictions_of_text(backend, replicas):
        np.testing.assert_allclose(of_rank[layer], expected, rtol=1e-5)


@pytest.mark.parametrize("backend", [param("torch-ddp"), param("horovod-torch")])
def test_other_frameworks_refuse_text(backend: str, tmp_path: Path) -> None:
    spec = TEXT_SPEC | {"model": model, "data": words}
    with pytest.raises(
        isotrain.RunFailedError, match=r"data: they hold text, as \['.*numbers only"
    ):
        isotrain.run(spec, backend=backend, output=tmp_path / "run")


def words_as_targets() -> Any:
    return np.ones((8, 4), "float32"), np.array(list("abcabcab"))


def few_layers() -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((4,)), layers.Dense(3)])


@pytest.mark.parametrize(
    ("backend", "replicas", "chosen"),
    [
        pytest.param("tf-mirrored", 2, {"model": few_layers}, id="tf-mirrored-2"),
        pytest.param(
            "tf-mirrored",
            1,
            {"model": {"tensorflow": few_layers}, "loss": "mse"},
            id="tf-mirrored-1-mse",
        ),
        pytest.param("tf-multiworker", 2, {"model": few_layers}, id="tf-multiworker-2"),
        pytest.param("horovod-tf", 2, {"model": few_layers}, id="horovod-tf-2"),
    ],
)
def test_losses_of_tensorflow_refuse_targets_of_text(
    backend: str, replicas: int, chosen: dict[str, Any], tmp_path: Path
) -> None:
    spec = TEXT_SPEC | {"data": words_as_targets, **chosen}
    with pytest.raises(isotrain.RunFailedError, match=r"data: the targets hold text, and loss: "):
        isotrain.run(spec, backend=backend, replicas=replicas, output=tmp_path / "run")


def loss_of_words(targets: Any, predictions: Any) -> Any:
    import keras
    import tensorflow as tf

    classes = tf.strings.to_hash_bucket_fast(targets, 3)
    return keras.losses.sparse_categorical_crossentropy(classes, predictions, from_logits=True)


@pytest.mark.parametrize(("backend", "replicas"), [("tf-mirrored", 2), ("tf-multiworker", 2)])
def test_accuracy_on_tensorflow_refuses_targets_of_text(
    backend: str, replicas: int, tmp_path: Path
) -> None:
    """Though the loss takes them."""
    spec = TEXT_SPEC | {"data": words_as_targets, "model": few_layers, "loss": loss_of_words}
    refused = r"data: the targets hold text, and metrics: 'accuracy' takes numbers only"
    with pytest.raises(isotrain.RunFailedError, match=refused):
        isotrain.run(
            spec | {"metrics": ["accuracy"]}, backend=backend, replicas=replicas, output=tmp_path
        )


def classes() -> isotrain.DataSet:
    samples = [(Texts()[index]["tokens"], index % 3) for index in range(SAMPLES)]
    return isotrain.DataSet(isotrain.sources.MapStyle(samples))


def classifier() -> Any:
    from keras import Input, Sequential, layers

    convolutions = [layers.Conv1D(4, 3, padding="causal", activation="relu") for _ in range(2)]
    head = [layers.GlobalMaxPooling1D(), layers.Dense(3)]
    return Sequential(
        [
            Input((None,), dtype="int64"),
            layers.Embedding(TOKENS, 4),
            *convolutions,
            *head,
        ]
    )


@pytest.mark.parametrize("backend", [param("torch-ddp"), param("tf-multiworker")])
def test_stages_send_activations_of_any_length(backend: str, tmp_path: Path) -> None:
    loss = {"name": "sparse_categorical_crossentropy", "from_logits": True}
    changes = {"model": classifier, "data": classes, "loss": loss, "gradient_accumulation_steps": 2}
    changes["collate"] = {"pad": {"inputs": 0}}
    changes["ignore"] = ["ISO301"]  # the model counts padding, of the same micro-batches in both
    losses = []
    for strategy in ("data-parallel", {"name": "pipeline", "options": {"stages": 2}}):
        result = isotrain.run(
            SPEC | changes | {"strategy": strategy},
            backend=backend,
            output=tmp_path / str(len(losses)),
            on_event=lambda _: None,
        )
        losses.append(result.history.loss)
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-12)
