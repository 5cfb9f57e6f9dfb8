"""Names of Keras' losses and metrics, so that a plan can refuse unknown ones without importing Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from isotrain.adapters.common import spec_components
from isotrain.adapters.common.outputs import check_loss_table
from isotrain.plugin import SpecError, unknown_name

if TYPE_CHECKING:
    from isotrain.plugin import Component, TrainingSpec

Field = Literal["loss", "metrics"]

LOSSES = (
    *("BinaryCrossentropy", "BinaryFocalCrossentropy", "CTC", "CategoricalCrossentropy"),
    *(
        "CategoricalFocalCrossentropy",
        "CategoricalGeneralizedCrossEntropy",
        "CategoricalHinge",
        "Circle",
        "CosineSimilarity",
        "Dice",
    ),
    *("Hinge", "Huber", "KLDivergence", "LogCosh", "MeanAbsoluteError"),
    *("MeanAbsolutePercentageError", "MeanSquaredError", "MeanSquaredLogarithmicError", "Poisson"),
    *("SparseCategoricalCrossentropy", "SquaredHinge", "Tversky"),
)
METRICS = (
    *(
        "AUC",
        "Accuracy",
        "BinaryAccuracy",
        "BinaryCrossentropy",
        "BinaryIoU",
        "CategoricalAccuracy",
    ),
    *("CategoricalCrossentropy", "CategoricalHinge", "ConcordanceCorrelation", "CosineSimilarity"),
    *("F1Score", "FBetaScore", "FalseNegatives", "FalsePositives", "Hinge", "IoU", "KLDivergence"),
    *("LogCoshError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanIoU"),
    *("MeanSquaredError", "MeanSquaredLogarithmicError", "OneHotIoU", "OneHotMeanIoU"),
    *("PearsonCorrelation", "Poisson", "Precision", "PrecisionAtRecall", "R2Score", "Recall"),
    *("RecallAtPrecision", "RootMeanSquaredError", "SensitivityAtSpecificity"),
    *("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"),
    *("SparseTopKCategoricalAccuracy", "SpecificityAtSensitivity", "SquaredHinge"),
    *("TopKCategoricalAccuracy", "TrueNegatives", "TruePositives"),
)
"""Metrics of predictions: all but `Mean`, `Sum` and `MeanMetricWrapper`."""
ACCURACIES = ("accuracy", "acc", "sparse_categorical_accuracy")
"""Names of accuracies in a spec that compare the class of the highest score with that of the target."""
_ABBREVIATIONS = {
    "acc": "Accuracy",
    "bce": "BinaryCrossentropy",
    "kld": "KLDivergence",
    "mae": "MeanAbsoluteError",
    "mape": "MeanAbsolutePercentageError",
    "mse": "MeanSquaredError",
    "msle": "MeanSquaredLogarithmicError",
}


def class_name(name: str, field: Field) -> str:
    """Class name for a name in a spec: the class name itself, snake case, or an abbreviation such as `mse`.

    Raises:
        SpecError: The name is unknown.
    """
    classes = LOSSES if field == "loss" else METRICS
    by_snake_case = {spec_components.snake_case(each): each for each in classes}
    cls = by_snake_case.get(name) or _ABBREVIATIONS.get(name.lower(), name)
    if cls not in classes:
        raise SpecError(f"{field}: {_unknown(name, field, (*by_snake_case, *classes))}")
    return cls


def _unknown(name: str, field: Field, known: Sequence[str]) -> str:
    """Message for an unknown name; it offers the snake-case names only."""
    return unknown_name(f"Keras {field} name", name, [each for each in known if each.islower()])


def require_known(spec: TrainingSpec, framework: str) -> None:
    """Checks the names of a spec's losses and metrics, before any process starts.

    Args:
        spec: Training spec to check.
        framework: Framework whose losses are checked, where the spec has them per framework.

    Raises:
        SpecError: A name is unknown, or the spec has no loss for this framework.
    """
    check_loss_table(spec, framework)
    for loss in spec.losses(framework).values():
        _require(loss, "loss")
    for metric in spec.metrics:
        _require(metric, "metrics")


def _require(component: Component, field: Field) -> None:
    if not component.is_reference:
        class_name(component.name, field)
