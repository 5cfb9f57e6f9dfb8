"""Spec sections for checkpoints (when to save, which to keep) and early stopping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from isotrain.core.spec import short_forms
from isotrain.core.spec.field_types import Count, NotNegative, Positive, Switch, Text
from isotrain.core.spec.initial_weights import Names
from isotrain.core.spec.validation import Problem, SpecModel

_LARGER_IS_BETTER = (
    *("_acc", "_accuracy", "_auc", "_precision", "_recall", "_sensitivity", "_specificity"),
    *("_f1_score", "_fbeta_score", "_iou", "_io_u", "_r2_score", "_cosine_similarity"),
    *("_correlation", "_true_positives", "_true_negatives"),
)
_SMALLER_IS_BETTER = (
    *(
        "_loss",
        "_error",
        "_crossentropy",
        "_entropy",
        "_divergence",
        "_hinge",
        "_poisson",
        "_huber",
    ),
    *("_mse", "_rmse", "_mae", "_mape", "_msle", "_kld", "_bce", "_false_positives"),
    *("_false_negatives",),
)


class MonitoredMetric(SpecModel):
    """An epoch metric and its better direction."""

    metric: Text = Field(
        default="validation_loss",
        description="Name of an epoch's metric: one of training, or validation_NAME.",
    )
    mode: Literal["min", "max"] | None = Field(
        default=None, description="Which is better; null: as the metric's name says."
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Requires `mode` for metrics whose name does not imply the direction."""
        metric = fields.get("metric", "validation_loss")
        if fields.get("mode") is None and isinstance(metric, str) and _direction(metric) is None:
            hint = f"whether a larger {metric!r} is better is not known"
            yield Problem("min or max", ("mode",), hint=hint)

    @property
    def larger_is_better(self) -> bool:
        """Whether larger values are better, by `mode` or the metric's name."""
        return (self.mode or _direction(self.metric)) == "max"


def _direction(metric: str) -> Literal["min", "max"] | None:
    """Better direction of a metric, by the end of its name; None if unknown."""
    name = f"_{metric.rstrip('0123456789').rstrip('_')}"
    if name.endswith(_SMALLER_IS_BETTER):
        return "min"
    return "max" if name.endswith(_LARGER_IS_BETTER) else None


class KeepBest(MonitoredMetric):
    """The metric by which one checkpoint is the best."""

    restore: Switch = Field(
        default=False, description="Whether the run ends with the weights of the best checkpoint."
    )


class EarlyStopping(MonitoredMetric):
    """Early stopping: ends training when a metric stops improving."""

    patience: Count = Field(
        default=3, description="Evaluations without a better value after which training ends."
    )
    min_delta: NotNegative = Field(
        default=0.0, description="By how much a value must be better to count."
    )


class CheckpointPolicy(SpecModel):
    """Intervals at which checkpoints are saved, besides at the end and on a signal; and how many are kept."""

    every_steps: Count | None = Field(default=None, description="Interval in steps.")
    every_epochs: Count | None = Field(default=None, description="Interval in epochs.")
    every_minutes: Positive | None = Field(default=None, description="Interval in minutes.")
    background: Switch = Field(
        default=True,
        description="Whether training goes on while a checkpoint is written; false: it waits until that is "
        "complete, so that a kill costs no more steps than the interval.",
    )
    keep_last: Count | None = Field(
        default=2, description="How many of the newest are kept; null for all."
    )
    keep_best: Annotated[KeepBest | None, BeforeValidator(short_forms.METRIC)] = Field(
        default=None,
        description="A metric's name, or {metric, mode, restore}: also saves one at each evaluation that is "
        "better than all before, and keeps the best.",
    )
    folder: Text | None = Field(
        default=None,
        description="Where: a folder or an fsspec URL such as s3://bucket/run; null: `checkpoints` in the "
        "run directory.",
    )
    map: Names = Field(
        default=None,
        description="Of a native model that goes on in another framework, which weight is which: as "
        "`parity --map`.",
    )
