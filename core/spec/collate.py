"""Collation of samples: how batches are made of single samples whose lengths differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema

from isotrain.core.spec.field_types import Number, Reference, Text
from isotrain.core.spec.validation import BRANCH, ExpectedText, Problem, SpecModel

_MULTIPLE = "multiple-of-"
_PATTERN = f"^{_MULTIPLE}[1-9][0-9]*$"


def _pad_length(value: Any) -> Any:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    is_named = value == "longest" or (isinstance(value, str) and re.match(_PATTERN, value))
    if not is_count and not is_named:
        raise Problem(f"longest, {_MULTIPLE}N or a length of 1 or more", received=value).error()
    return value


PadLength = Annotated[
    Any,
    AfterValidator(_pad_length),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "longest"},
                {"type": "string", "pattern": _PATTERN},
                {"type": "integer", "minimum": 1},
            ]
        }
    ),
]


class Pad(SpecModel):
    """Padding of the samples of each slice along their first axis."""

    pad: dict[Text, Number] = Field(
        description="Values to pad with: {name of a part of a sample: number}.", min_length=1
    )
    to: PadLength = Field(
        default="longest",
        description="Length: longest, that of the longest sample of the slice; multiple-of-N, the next "
        "multiple of N; or a number.",
    )

    @property
    def length(self) -> int | None:
        """Fixed length; None where it follows the longest sample."""
        return self.to if isinstance(self.to, int) else None

    @property
    def multiple(self) -> int:
        """Number of which the length of the longest sample is rounded up to a multiple."""
        is_multiple = isinstance(self.to, str) and self.to.startswith(_MULTIPLE)
        return int(self.to.removeprefix(_MULTIPLE)) if is_multiple else 1


def _branch(value: Any) -> str:
    return f"{BRANCH}{'pad' if isinstance(value, Mapping | Pad) else 'function'}"


Collate = Annotated[
    Annotated[Pad, Tag(f"{BRANCH}pad")] | Annotated[Reference, Tag(f"{BRANCH}function")],
    ExpectedText("{pad: {part: number}, to: ...} or a callable"),
    Discriminator(_branch),
]
