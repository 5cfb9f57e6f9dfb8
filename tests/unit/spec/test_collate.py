"""The field `collate`: padding, or a callable."""

from __future__ import annotations

from typing import Any

import pytest

from isotrain.core.errors import SpecError
from isotrain.core.spec.collate import Pad
from isotrain.core.spec.training_spec import TrainingSpec


def _collate(samples: list[Any]) -> Any: ...


def _spec(collate: Any, **fields: Any) -> TrainingSpec:
    defaults: dict[str, Any] = {
        "model": _collate,
        "data": _collate,
        "loss": "mean_squared_error",
        "optimizer": "adam",
        "global_batch_size": 8,
        "steps": 2,
    }
    return TrainingSpec(**{**defaults, **fields, "collate": collate})


@pytest.mark.parametrize(
    ("to", "length", "multiple"),
    [("longest", None, 1), ("multiple-of-64", None, 64), (512, 512, 1)],
)
def test_padding_has_a_length(to: Any, length: int | None, multiple: int) -> None:
    spec = _spec({"pad": {"tokens": 0}, "to": to})
    assert spec.collate == Pad(pad={"tokens": 0.0}, to=to)
    assert (spec.collate.length, spec.collate.multiple) == (length, multiple)
    assert spec.to_dict()["collate"] == {"pad": {"tokens": 0.0}, "to": to}
    assert _spec({"pad": {"tokens": 0}}).collate.to == "longest"


def test_a_callable_makes_batches() -> None:
    assert _spec(_collate).collate is _collate
    assert _spec("package.module:collate").collate == "package.module:collate"


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (
            {"pad": {"tokens": 0}, "to": "multiple-of-0"},
            "collate.to: .*expected longest, multiple-of-N",
        ),
        ({"pad": {"tokens": 0}, "to": 0}, "collate.to"),
        ({"pad": {"tokens": 0}, "to": True}, "collate.to"),
        ({"pad": {}}, "collate.pad"),
        ({"pad": {"tokens": "zero"}}, "collate.pad.tokens"),
        ({"to": 3}, "collate.pad: missing"),
        ("longest", "collate"),
    ],
)
def test_other_values_are_refused(collate: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _spec(collate)


def test_it_needs_data() -> None:
    with pytest.raises(SpecError, match=r"data: .*collate needs them"):
        _spec({"pad": {"tokens": 0}}, data=None)
