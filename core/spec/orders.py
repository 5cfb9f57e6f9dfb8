"""Orders of the samples: the fields of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal

from pydantic import Field

from isotrain.core.spec import import_strings
from isotrain.core.spec.field_types import Column, Count, Reference, Switch, require_name
from isotrain.core.spec.validation import Problem, SpecModel


class OrderSection(SpecModel):
    """Base of the orders."""

    @property
    def options(self) -> dict[str, Any]:
        """Fields beside the name, with references resolved."""
        fields = {each: getattr(self, each) for each in type(self).model_fields if each != "name"}
        return {each: _resolved(value) for each, value in fields.items()}


def _resolved(value: Any) -> Any:
    is_reference = isinstance(value, str) and ":" in value
    return import_strings.resolve(value) if is_reference else value


class SequentialOrder(OrderSection, json_schema_extra=require_name):
    """The order of the data set, in every epoch."""

    name: Literal["sequential"] = "sequential"


class ShuffledOrder(OrderSection, json_schema_extra=require_name):
    """A new permutation of all samples in every epoch."""

    name: Literal["shuffled"] = "shuffled"


class WeightedOrder(OrderSection, json_schema_extra=require_name):
    """Samples drawn with probabilities proportional to their weights."""

    name: Literal["weighted"] = "weighted"
    weights: Column = Field(
        description="Weight of each sample, 0 or more: a column of the data, or a callable columns -> array."
    )
    samples: Count | None = Field(
        default=None,
        description="Samples of an epoch; null: as many as the data set has, or without replacement those"
        " whose weight is not 0.",
    )
    replacement: Switch = Field(
        default=True, description="Whether a sample may be drawn again in the same epoch."
    )


class BalancedOrder(OrderSection, json_schema_extra=require_name):
    """All classes equally often, spread evenly; each class is shuffled, and begun again at its end."""

    name: Literal["balanced"] = "balanced"
    by: Column = Field(
        default="targets",
        description="Class of each sample: a column of the data, or a callable columns -> array.",
    )
    samples: Count | None = Field(
        default=None, description="Samples of an epoch; null: as many as the data set has."
    )


class RepeatedOrder(OrderSection, json_schema_extra=require_name):
    """Shuffled, each sample several times in its global batch, with random numbers of its own each."""

    name: Literal["repeated"] = "repeated"
    times: Count = Field(description="Occurrences of a sample; a divisor of the global batch.")


class ByLengthOrder(OrderSection, json_schema_extra=require_name):
    """Global batches of samples of similar length, shuffled."""

    name: Literal["by-length"] = "by-length"
    lengths: Column = Field(
        description="Length of each sample: a column of lengths, or of entries that have one, or a callable"
        " columns -> array."
    )
    buckets: tuple[Count, ...] | None = Field(
        default=None,
        description="Largest lengths of the buckets, ascending; null: eight of equally many samples.",
    )
    tokens: Count | None = Field(
        default=None,
        description="Most tokens of a global batch, padded to its bucket; then global_batch_size is the most"
        " samples. null: global_batch_size samples in each.",
    )

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Requires ascending buckets."""
        buckets = fields.get("buckets")
        if isinstance(buckets, list | tuple) and (
            not buckets or any(not first < second for first, second in pairwise(buckets))
        ):
            yield Problem("lengths in ascending order", ("buckets",), buckets)


class CallableOrder(OrderSection):
    """An order of your own: a pure function, which every process calls once per epoch."""

    name: ClassVar[str] = "call"
    call: Reference = Field(
        description="Callable (seed, epoch, length, columns) -> positions, whole numbers from 0 to length -"
        " 1, equally many in every epoch."
    )
