"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from isotrain.core.errors import SpecError
from isotrain.core.session.training.lr_schedule import LearningRates
from isotrain.core.spec.schedules import OneCycleSchedule, RunLength
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


# Schedules that frameworks have too, against theirs

EPOCH = 5
STEPS = 30


def torch_rates(make: Callable[[Any], Any], steps: int = STEPS, lr: float = 0.5) -> list[float]:
    """Rates of the steps under a torch scheduler that is stepped after each."""
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def torch_scheduler(name: str, **options: Any) -> Callable[[Any], Any]:
    import torch

    return lambda optimizer: getattr(torch.optim.lr_scheduler, name)(optimizer, **options)


IN_TORCH: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "exponential": (
        {"name": "exponential", "every_steps": 1, "factor": 0.9},
        "ExponentialLR",
        {"gamma": 0.9},
    ),
    "linear": (
        "linear",
        "LinearLR",
        {"start_factor": 1.0, "end_factor": 0.0, "total_iters": STEPS},
    ),
    "milestones in steps": (
        {"name": "milestones", "at_steps": [3, 11], "factor": 0.5},
        "MultiStepLR",
        {"milestones": [3, 11], "gamma": 0.5},
    ),
    "milestones in epochs": (
        {"name": "milestones", "at_epochs": [4, 1]},
        "MultiStepLR",
        {"milestones": [EPOCH, 4 * EPOCH]},
    ),
    "restarts": (
        {"name": "cosine-restarts", "first_epochs": 1, "length_factor": 2, "final_fraction": 0.1},
        "CosineAnnealingWarmRestarts",
        {"T_0": EPOCH, "T_mult": 2, "eta_min": 0.05},
    ),
    "one cycle": ("one-cycle", "OneCycleLR", {"max_lr": 0.5, "total_steps": STEPS}),
    "one cycle, linear": (
        {
            "name": "one-cycle",
            "rise_fraction": 0.45,
            "start_fraction": 0.1,
            "final_fraction": 0.001,
            "shape": "linear",
        },
        "OneCycleLR",
        {
            "max_lr": 0.5,
            "total_steps": STEPS,
            "pct_start": 0.45,
            "div_factor": 10,
            "final_div_factor": 100,
            "anneal_strategy": "linear",
        },
    ),
    "a function": (
        {"call": lambda step: 1 / (1 + step)},
        "LambdaLR",
        {"lr_lambda": lambda step: 1 / (1 + step)},
    ),
}


@pytest.mark.parametrize("case", IN_TORCH)
def test_rates_are_those_of_torch(case: str) -> None:
    pytest.importorskip("torch")
    schedule, name, options = IN_TORCH[case]
    steps = STEPS - (name == "OneCycleLR")  # torch's raises after the last one
    theirs = torch_rates(torch_scheduler(name, **options), steps)
    assert rates(STEPS, EPOCH, schedule=schedule)[:steps] == pytest.approx(
        theirs, rel=1e-12, abs=1e-18
    )


def test_momentum_of_one_cycle_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=STEPS)
    schedule = OneCycleSchedule(momentum_range=(0.85, 0.95))
    for step in range(STEPS - 1):
        theirs = optimizer.param_groups[0]["momentum"]
        assert schedule.momentum(step, RunLength(EPOCH, STEPS)) == pytest.approx(theirs, rel=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("rise", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("total", [1, 2, 3, 100])
def test_one_cycle_of_any_length_stays_between_0_and_the_peak(rise: float, total: int) -> None:
    found = rates(total, schedule={"name": "one-cycle", "rise_fraction": rise})
    assert all(0 < rate <= 0.5 for rate in found)


def test_restarts_of_growing_length_begin_at_lower_peaks() -> None:
    schedule = {
        "name": "cosine-restarts",
        "first_steps": 4,
        "length_factor": 1.5,
        "peak_factor": 0.5,
        "final_fraction": 0.25,
    }

    def rate(peak: float, progress: float) -> float:  # as Keras' CosineDecayRestarts
        return 0.5 * (0.25 + 0.75 * peak * (1 + math.cos(math.pi * progress)) / 2)

    expected = [rate(1, step / 4) for step in range(4)]
    expected += [rate(0.5, step / 6) for step in range(6)]
    expected += [rate(0.25, step / 9) for step in range(9)]
    expected += [rate(0.125, step / 13.5) for step in range(11)]
    assert rates(STEPS, schedule=schedule) == pytest.approx(expected, rel=1e-12)


def test_inverse_square_root_is_1_at_the_end_of_the_warmup() -> None:
    found = rates(schedule={"name": "inverse-sqrt", "warmup_steps": 4})
    assert found[:5] == [0.125, 0.25, 0.375, 0.5, 0.5]
    assert found[12] == pytest.approx(0.5 / math.sqrt(3))
    by_timescale = rates(schedule={"name": "inverse-sqrt", "timescale_steps": 3})
    assert by_timescale[9] == 0.25


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_wsd_warms_up_stays_and_decays(shape: str) -> None:
    schedule = {"name": "wsd", "warmup_steps": 4, "shape": shape}
    found = rates(schedule={**schedule, "decay_fraction": 0.5})
    assert found == rates(schedule={**schedule, "decay_steps": 10})
    assert found[3:11] == [0.5] * 8
    fractions = {"linear": 0.5, "cosine": 0.5, "1-sqrt": 1 - math.sqrt(0.5)}
    assert found[15] == pytest.approx(0.5 * fractions[shape])


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf, "half", None])
def test_a_schedule_of_your_own_that_returns_no_fraction_is_refused(value: Any) -> None:
    with pytest.raises(SpecError, match=r"schedule: .*returned .* for step 19; expected a finite"):
        rates(schedule=lambda step: value)


def test_a_rate_may_be_0() -> None:
    assert rates(schedule=lambda step: 0)[7] == 0.0
    assert (
        rates(schedule=lambda step: step, scaling={"rule": "sqrt", "base_batch_size": 16})[3] == 3
    )
