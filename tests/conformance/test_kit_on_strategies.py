"""The checks find what is wrong with broken strategies, and nothing wrong with isotrain's own."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from conformance import in_turn

from isotrain.core.plugins.host import plugin_host
from isotrain.testing import strategy
from isotrain.testing.launching import Run, attempt
from isotrain.testing.scorecard import attempted

BACKEND = "torch-ddp"
EXPECTED: dict[str, set[str]] = {
    **{name: set() for name in in_turn.SOUND},
    "broken-undeclared": {"declares_what_it_uses"},
    "broken-wrong-loss": {"loss_is_of_the_global_batch", "survives_empty_replicas"},
    "broken-never-averages": {"replicas_are_equal"},
    "broken-sometimes-equal": {"replicas_are_equal"},
    "broken-root-takes-all": {"keeps_parameter_mean"},
    "broken-sums-gradients": {"equals_data_parallel"},
    "broken-stands-still": {
        "converges_on_digits",
        "survives_one_replica",
        "survives_empty_replicas",
    },
    "broken-needs-samples": {"survives_empty_replicas"},
    "broken-needs-others": {"survives_one_replica"},
    "broken-forgets-small-gradients": {"keeps_gradient_sum"},
    "broken-misdescribed": {"strategy_declarations"},
}
"""Strategy to the checks that fail on it; all others pass or are not asked."""


@functools.cache
def returned(trial: int) -> Run:
    """What the trial of all strategies brought back."""
    tried = strategy.TRIALS[trial]
    spec = {**tried.spec("", {}), "strategy": "data-parallel"}
    run = attempt(
        functools.partial(in_turn.try_all, trial=trial), spec, BACKEND, tried.replicas or 2
    )
    assert run.failure is None, run.failure
    return run


def of_one(name: str, trial: int) -> Run:
    """The part of one strategy, as if the run had been its own."""
    run = returned(trial)
    parts = [process[name] for process in run.returned]
    return dataclasses.replace(run, returned=parts, failure=parts[0].get("error"))


@pytest.mark.slow
@pytest.mark.parametrize("name", in_turn.STRATEGIES)
def test_exactly_the_expected_checks_fail(name: str) -> None:
    adapter, tried = plugin_host().backend(BACKEND), in_turn.STRATEGIES[name]()
    outcomes = [attempted(strategy.DECLARATIONS, tried)]
    for number, trial in enumerate(strategy.TRIALS):
        run = functools.partial(of_one, name, number)
        outcomes += strategy.outcomes(trial, tried, adapter, run)
    failed = {outcome.check: outcome.reason for outcome in outcomes if outcome.verdict == "failed"}
    assert set(failed) == EXPECTED[name], failed
    others = {outcome.verdict for outcome in outcomes if outcome.verdict != "failed"}
    assert others == {"passed", "not asked"}


def test_every_check_is_seen_to_fail() -> None:
    assert set.union(*EXPECTED.values()) == {check.name for check in strategy.CHECKS}
