"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from isotrain.core.errors import SpecError
from isotrain.core.session.training.lr_schedule import LearningRates
from isotrain.core.spec.training_spec import TrainingSpec


def rates(
    total: int = 20,
    per_epoch: int = 5,
    batch: int = 64,
    own: Callable[[int], float] | None = None,
    **fields: Any,
) -> list[float]:
    spec = TrainingSpec(
        **{
            "model": dict,
            "data": dict,
            "loss": "mse",
            "optimizer": {"name": "sgd", "lr": 0.5},
            "global_batch_size": batch,
            "steps": total,
            **fields,
        }
    )
    given = LearningRates(
        spec, own, global_batch_size=batch, steps_per_epoch=per_epoch, total_steps=total
    )
    return [given(step) for step in range(total)]


def test_an_overflowing_rate_is_refused_before_the_first_step() -> None:
    with pytest.raises(SpecError, match=r"schedule: the rate of the last step \(19\)"):
        rates(schedule={"name": "step", "every_steps": 1, "factor": 1e200})


def test_an_optimizer_s_own_schedule_gives_the_rates_which_are_scaled() -> None:
    found = rates(own=lambda step: 0.125 * step, scaling={"rule": "sqrt", "base_batch_size": 16})
    assert found[:4] == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("schedule", ["cosine", {"name": "constant", "warmup_steps": 2}])
def test_two_schedules_are_refused(schedule: Any) -> None:
    with pytest.raises(SpecError, match=r"schedule: (cosine|constant), and the optimizer .* too"):
        rates(own=float, schedule=schedule)


def test_constant() -> None:
    assert rates() == [0.5] * 20


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_scaling_is_relative_to_the_base_batch(rule: str, factor: float) -> None:
    assert rates(scaling={"rule": rule, "base_batch_size": 16})[0] == 0.5 * factor


def test_warmup_rises_linearly_to_the_peak() -> None:
    found = rates(schedule={"name": "constant", "warmup_steps": 4})
    assert found[:5] == [0.125, 0.25, 0.375, 0.5, 0.5]


def test_warmup_in_epochs_from_a_fraction() -> None:
    found = rates(schedule={"name": "constant", "warmup_epochs": 2, "warmup_from_fraction": 0.5})
    assert found[0] == pytest.approx(0.5 * (0.5 + 0.5 * 0.1))
    assert found[9] == 0.5


def test_step_decay_by_epochs_and_by_steps() -> None:
    by_epochs = rates(schedule={"name": "step", "every_epochs": 2, "factor": 0.5})
    by_steps = rates(schedule={"name": "step", "every_steps": 10, "factor": 0.5})
    assert by_epochs == by_steps == [0.5] * 10 + [0.25] * 10


def test_step_decay_counts_the_steps_of_the_warmup() -> None:
    found = rates(schedule={"name": "step", "every_steps": 10, "factor": 0.5, "warmup_steps": 4})
    assert found == [0.125, 0.25, 0.375] + [0.5] * 7 + [0.25] * 10


def test_cosine_covers_what_the_warmup_leaves() -> None:
    found = rates(schedule={"name": "cosine", "warmup_steps": 10, "final_fraction": 0.25})
    assert found[10] == 0.5
    assert found[15] == pytest.approx(0.5 * (0.25 + 0.75 * (1 + math.cos(math.pi / 2)) / 2))
    assert found[19] > 0.125


def test_polynomial_ends_at_its_final_fraction() -> None:
    found = rates(schedule={"name": "polynomial", "power": 2.0, "decay_steps": 10})
    assert found[5] == pytest.approx(0.5 * 0.25)
    assert found[10:] == [0.0] * 10
