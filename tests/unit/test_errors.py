"""What errors say: which right name a wrong one is answered with, and what another process has raised."""

from __future__ import annotations

import pytest

from isotrain.core.errors import RunFailedError, SpecError, error_named, nearest

METRICS = (
    *("accuracy", "binary_crossentropy", "categorical_crossentropy", "f1_score", "mean_io_u"),
    *("mean_absolute_error", "mean_squared_error", "pearson_correlation", "poisson", "r2_score"),
    *("sparse_categorical_accuracy", "sparse_top_k_categorical_accuracy", "false_positives"),
)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("accurracy", "accuracy"),
        ("Accuracy", "accuracy"),
        ("mean_square_error", "mean_squared_error"),
        ("MeanSquaredError", "mean_squared_error"),
        ("pearson", "pearson_correlation"),
        ("sparse_accuracy", "sparse_categorical_accuracy"),
        ("f1", "f1_score"),
    ],
)
def test_misspelled_and_shortened_names_are_corrected(wrong: str, meant: str) -> None:
    assert nearest(wrong, METRICS) == meant


@pytest.mark.parametrize(
    "wrong", ["mean", "error", "cross_entropy", "crossentropy", "mse_loss", "loss", "rmse", ""]
)
def test_ambiguous_and_unlike_names_are_not_corrected(wrong: str) -> None:
    assert nearest(wrong, METRICS) is None


@pytest.mark.parametrize("wrong", ["", "-", "_"])
def test_names_without_letters_are_not_corrected(wrong: str) -> None:
    assert nearest(wrong, ["weights"]) is None


def test_one_letter_less_comes_before_one_word_more() -> None:
    assert nearest("epoch", ("epoch_steps", "epochs", "steps")) == "epochs"


def test_transposed_letters_are_corrected() -> None:
    assert nearest("rl", ("lr", "momentum")) == "lr"


def test_errors_of_other_processes_keep_their_class_or_its_name() -> None:
    own, others = error_named("SpecError", "no loss"), error_named("ValueError", "no loss")
    assert (type(own), str(own)) == (SpecError, "no loss")
    assert (type(others), str(others)) == (RunFailedError, "ValueError: no loss")
