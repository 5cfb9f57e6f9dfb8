"""Objectives of two and of three parameters, and what they return."""

from __future__ import annotations

from typing import Any

import pytest

from isotrain.adapters.common.objective import MAX_LOSSES, Objective
from isotrain.core.contracts.backend.step_context import called_collectives, takes_step
from isotrain.core.errors import SpecError


def _two(model: Any, batch: Any) -> Any: ...
def _two_and_a_default(model: Any, batch: Any, margin: float = 0.5) -> Any: ...
def _three(model: Any, batch: Any, step: Any) -> Any: ...
def _step_with_default(model: Any, batch: Any, step: Any = None) -> Any: ...


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (_two, False),
        (_two_and_a_default, False),
        (_three, True),
        (_step_with_default, True),
        (dict, False),
    ],
)
def test_a_third_parameter_without_default_or_named_step_is_the_step(
    objective: Any, expected: bool
) -> None:
    assert takes_step(objective) is expected


def test_named_losses_keep_their_names() -> None:
    objective = Objective(_two, None)
    result = objective.result(({"a": 1.0, "b": 2.0}, "predictions"))
    assert (dict(result.losses), result.predictions) == ({"a": 1.0, "b": 2.0}, "predictions")
    assert objective.names == ("a", "b")
    with pytest.raises(SpecError, match="expected the losses a, b in every call, received a"):
        objective.result({"a": 1.0})


@pytest.mark.parametrize(
    "losses", [{}, {"loss": 1.0}, {str(i): 1.0 for i in range(MAX_LOSSES + 1)}]
)
def test_names_that_cannot_be_are_refused(losses: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="objective: expected 1 to 32 losses"):
        Objective(_two, None).result(losses)


def test_a_single_loss_has_no_name() -> None:
    objective = Objective(_two, None)
    assert dict(objective.result(3.0).losses) == {None: 3.0}
    assert objective.names == ()


def _gathers(rows: Any, context: Any) -> Any:
    return context.all_gather(rows)


def _gathers_by_a_function(model: Any, batch: Any, step: Any) -> Any:
    return _gathers(model(batch[0]), context=step)


def _gathers_by_two(model: Any, batch: Any, step: Any) -> Any:
    def contrast(rows: Any) -> Any:
        return _gathers_by_a_function(model, rows, step)

    return contrast(batch) + step.values["weight"]


def _calls_itself(model: Any, batch: Any, step: Any) -> Any:
    return step.mean(_calls_itself(model, batch, step))


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (_two, []),
        (_three, []),
        (_gathers, []),
        (_gathers_by_a_function, ["all_gather"]),
        (_gathers_by_two, ["all_gather"]),
        (_calls_itself, ["mean"]),
    ],
)
def test_collectives_are_found_in_functions_that_get_the_step(
    objective: Any, expected: list[str]
) -> None:
    assert called_collectives(objective) == expected
