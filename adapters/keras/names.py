"""The names of Keras' losses and metrics, known without importing Keras, so that a plan refuses others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from isotrain.adapters.common import resolve
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
"""All but those that measure no predictions: `Mean`, `Sum` and `MeanMetricWrapper`."""
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
    """The name of the class that a name in a spec stands for: itself, in small letters, or abbreviated.

    Raises:
        SpecError: It stands for none.
    """
    classes = LOSSES if field == "loss" else METRICS
    small = {resolve.snake_case(each): each for each in classes}
    found = small.get(name) or _ABBREVIATIONS.get(name.lower(), name)
    if found not in classes:
        raise SpecError(f"{field}: {_unknown(name, field, (*small, *classes))}")
    return found


def _unknown(name: str, field: Field, known: Sequence[str]) -> str:
    """The names in small letters are enough to choose from."""
    return unknown_name(f"Keras {field} name", name, [each for each in known if each.islower()])


def require_known(spec: TrainingSpec, framework: str) -> None:
    """Makes sure that a plan's losses and metrics are there, before anything starts.

    Args:
        spec: Of the plan.
        framework: Whose entries of the spec are taken.

    Raises:
        SpecError: One is not, or the spec gives this framework none.
    """
    check_loss_table(spec, framework)
    for loss in spec.losses(framework).values():
        _require(loss, "loss")
    for metric in spec.metrics:
        _require(metric, "metrics")


def _require(given: Component, field: Field) -> None:
    if not given.is_reference:
        class_name(given.name, field)
