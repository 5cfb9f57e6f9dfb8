"""Sample weights go with their samples; class weights and the validation split are made from data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.data.loader import Loader
from isotrain.core.data.pytree import Weighted
from isotrain.core.data.sources import as_source, stream
from isotrain.core.errors import DataError
from isotrain.core.session.training.dataloaders import load_data

X, Y = np.arange(20.0)[:, None], np.arange(20) % 3
W = np.arange(20) / 4


class Samples:
    """Samples that are fetched one by one."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index], W[index]


def batches() -> Iterator[Any]:
    for start in range(0, 20, 7):
        stop = start + 7
        yield X[start:stop], Y[start:stop], W[start:stop]


def spec_of(data: Any, **fields: Any) -> isotrain.TrainingSpec:
    rest = {"loss": "mse", "optimizer": "adam", "global_batch_size": 8, "epochs": 1}
    return isotrain.TrainingSpec(model="m:f", data=data, **rest, **fields)


def slices(source: Any, **options: Any) -> Iterator[Any]:
    chosen = {
        "global_batch_size": 8,
        "replicas": 3,
        "local_replicas": (0, 1, 2),
        "seed": 1,
        "epochs": 1,
    }
    chosen |= {
        "drop_remainder": False,
        "gradient_accumulation_steps": 2,
        **options,
    }
    for batch in Loader(source, **chosen):  # type: ignore[arg-type]
        yield from (micro_batch for own in batch.slices for micro_batch in own if micro_batch.count)


def doubled(inputs: Any, targets: Any, random: Any) -> Any:
    """A transform, which sees no weights."""
    assert not isinstance(targets, Weighted)
    return inputs, targets * 2


@pytest.mark.parametrize("given", [(X, Y, W), Samples(), stream(batches)])
@pytest.mark.parametrize("transform", [None, doubled])
def test_weights_go_with_their_samples(given: Any, transform: Any) -> None:
    source, factor = as_source(given), 2 if transform else 1
    seen = 0
    for micro_batch in slices(source, transform=transform):
        rows = micro_batch.inputs[:, 0].astype(int)
        np.testing.assert_array_equal(micro_batch.targets.targets, Y[rows] * factor)
        np.testing.assert_array_equal(micro_batch.targets.weights, W[rows])
        seen += micro_batch.count
    assert seen == 20


def test_class_weights_are_sample_weights() -> None:
    for given in ((X, Y), (X, np.eye(3)[Y]), (X, Y[:, None]), stream(lambda: iter([(X, Y)]))):
        data = load_data(spec_of(given, class_weight={0: 0.5, 2: 3.0}))
        micro_batches = slices(data.train)
        for micro_batch in micro_batches:
            rows = micro_batch.inputs[:, 0].astype(int)
            expected = np.array([0.5, 1.0, 3.0])[Y[rows]]
            np.testing.assert_array_equal(micro_batch.targets.weights, expected)


@pytest.mark.parametrize("given", [(X, Y, W), (X, {"a": Y, "b": Y}), (X,)])
def test_class_weights_need_classes(given: Any) -> None:
    with pytest.raises(DataError, match="class_weight: expected one array of classes"):
        load_data(spec_of(given, class_weight={0: 0.5}))


@pytest.mark.parametrize("given", [(X, Y, W), Samples()])
def test_validation_split_takes_the_last_part(given: Any) -> None:
    data = load_data(spec_of(given, validation_split=0.27))
    assert (len(data.train), len(data.validation)) == (14, 6)
    rows = np.array([0, 5])
    inputs, targets = data.validation.gather(rows)
    np.testing.assert_array_equal(inputs, X[14:][rows])
    np.testing.assert_array_equal(targets.weights, W[14:][rows])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (stream(batches), "a stream has no last part"),
        (isotrain.DataSet((X, Y), (X, Y)), "the data have a validation part"),
        ((X[:1], Y[:1]), "0 to train on and 1 to validate on"),
    ],
)
def test_data_that_cannot_be_split_is_refused(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"validation_split: .*{message}"):
        load_data(spec_of(given, validation_split=0.25))


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (np.array([[0, 2], [1, 0]]), [[0.5, 3.0], [1.0, 0.5]]),  # a class for each place
        (np.array([[1.0, 0, 0], [0, 0, 1]]), [0.5, 3.0]),
        (np.array([[2.0], [1.0]]), [3.0, 1.0]),
        (np.array([[1, 0], [0, 1]]), [[1.0, 0.5], [0.5, 1.0]]),  # as of any other integers
    ],
)
def test_values_that_are_class_labels(targets: Any, expected: Any) -> None:
    given = isotrain.DataSet((np.zeros((2, 1)), targets))
    data = load_data(spec_of(given, class_weight={0: 0.5, 2: 3.0}))
    weighted = data.train.gather(np.arange(2))[1]
    assert weighted.weights.tolist() == expected


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.array([0.25, 1]), "expected targets that are classes"),
        (np.array([[1.0, 0], [1, 1]]), "received a row without a single 1"),
    ],
)
def test_targets_that_are_no_classes_are_refused(targets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_data(spec_of(isotrain.DataSet((np.zeros((2, 1)), targets)), class_weight={0: 2.0}))
