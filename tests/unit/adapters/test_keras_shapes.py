"""Shapes of targets and predictions that Keras' own losses and metrics mean."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from isotrain.adapters.keras.shapes import fit


def taken(
    kind: str, targets: tuple[int | None, ...], predictions: tuple[int | None, ...], axis: int = -1
) -> bool:
    return fit(kind, SimpleNamespace(shape=targets), SimpleNamespace(shape=predictions), axis)


@pytest.mark.parametrize(
    ("targets", "predictions", "fits"),
    [
        ((5, 3), (5, 3), True),
        ((5,), (5, 1), True),
        ((5, 1), (5,), True),
        ((1,), (1, 1), True),
        ((1, 1), (1,), True),
        ((1,), (1,), True),
        ((None,), (None, 1), True),
        ((None, 3), (4, 3), True),
        ((2, 4, 1), (2, 4), True),
        ((3,), (3, 3), False),
        ((5, 1), (5, 3), False),
        ((1,), (1, 3), False),
        ((None,), (None, 3), False),
    ],
)
def test_numbers_are_compared_one_by_one(
    targets: tuple[int | None, ...], predictions: tuple[int | None, ...], fits: bool
) -> None:
    assert taken("MeanSquaredError", targets, predictions) is fits


@pytest.mark.parametrize(
    ("targets", "fits"), [((3,), True), ((3, 1), True), ((3, 3), False), ((1, 3), False)]
)
def test_labels_have_no_axis_of_classes(targets: tuple[int, ...], fits: bool) -> None:
    assert taken("SparseCategoricalAccuracy", targets, (3, 3)) is fits


def test_one_label_is_one_label() -> None:
    assert taken("SparseCategoricalCrossentropy", (1,), (1, 4))
    assert taken("SparseCategoricalCrossentropy", (1, 1), (1, 4))


def test_some_metrics_take_other_shapes() -> None:
    assert taken("MeanIoU", (3,), (3, 3))


def test_classes_on_another_axis_are_left_to_keras() -> None:
    labels, images = (2, 4, 4), (2, 5, 4, 4)
    assert taken("SparseCategoricalCrossentropy", labels, images, axis=1)
    assert not taken("SparseCategoricalCrossentropy", labels, images)
