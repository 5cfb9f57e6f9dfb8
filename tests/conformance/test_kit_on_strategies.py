"""The checks find what is wrong with broken strategies, and nothing wrong with isotrain's own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import pytest
from conformance import in_turn
from conformance.backends import param

from isotrain.core.plugins import asked
from isotrain.core.plugins.host import plugin_host
from isotrain.testing import digits, going_on, strategy
from isotrain.testing.launching import Run, attempt
from isotrain.testing.scorecard import attempted
from isotrain.testing.series import PATIENT

CELLS = {
    "reference": [
        name for name in in_turn.STRATEGIES if name not in ("compressed, bf16", "sharded, stage 3")
    ],
    "torch-ddp": [
        "data-parallel",
        "compressed, bf16",
        "sharded, stage 3",
        "broken-sums-gradients",
    ],
}
"""Backend to what is tried on it: all that need no framework, and some on one."""
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
    "broken-needs-samples": {"survives_empty_replicas", "holds_what_it_says"},
    "broken-needs-others": {"survives_one_replica"},
    "broken-forgets-small-gradients": {"keeps_gradient_sum"},
    "broken-keeps-to-itself": {"strategy_goes_on"},
    "broken-misdescribed": {"strategy_declarations"},
    "broken-keeps-news-back": {
        "replicas_are_equal",
        "equals_data_parallel",
        "converges_on_digits",
        "keeps_gradient_sum",
    },
    "broken-promises-too-much": {"holds_what_it_says"},
}
"""Strategy to the checks that fail on it; all others pass or are not asked."""

GOING_ON = (*in_turn.SOUND, "broken-keeps-to-itself")
"""Those that go on from another run; the other broken ones would end it."""


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    """Lets this process and its runs know the backend in NumPy and the broken strategies."""
    with asked.chosen(["isotrain.testing.reference", "plugins.broken_strategies"], []):
        yield


@functools.cache
def returned(backend: str, replicas: int) -> Run:
    """What the trials of all strategies with so many replicas brought back."""
    trials = [i for i, trial in enumerate(strategy.TRIALS) if (trial.replicas or 2) == replicas]
    spec = digits.spec(adapter=plugin_host().backend(backend), timeouts=PATIENT)
    work = functools.partial(in_turn.try_all, names=CELLS[backend], trials=trials)
    run = attempt(work, spec, backend, replicas)
    assert run.failure is None, run.failure
    return run


def of_one(backend: str, name: str, trial: int) -> Run:
    """The part of one strategy, as if the run had been its own."""
    run = returned(backend, strategy.TRIALS[trial].replicas or 2)
    parts = [process[f"{name}: {trial}"] for process in run.returned]
    return dataclasses.replace(run, returned=parts, failure=parts[0].get("error"))


@functools.cache
def gone_on(backend: str) -> dict[str, str]:
    """What is wrong with each that goes on from another run: of two runs for all of them."""
    names = [name for name in CELLS[backend] if name in GOING_ON]
    specs = {n: going_on.strategy_case(*in_turn.STRATEGIES[n], backend) for n in names}
    return going_on.problems(specs, backend)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        param(backend, name, slow=backend != "reference")
        for backend, names in CELLS.items()
        for name in names
    ],
)
def test_exactly_the_expected_checks_fail(backend: str, name: str) -> None:
    adapter, tried = (
        plugin_host().backend(backend),
        plugin_host().strategy(*in_turn.STRATEGIES[name]),
    )
    outcomes = [attempted(strategy.DECLARATIONS, tried)]
    for number, trial in enumerate(strategy.TRIALS):
        run = functools.partial(of_one, backend, name, number)
        outcomes += strategy.outcomes(trial, tried, adapter, run)
    if name in GOING_ON:
        told = gone_on(backend)[name]
        outcomes.append(strategy.GOES_ON.failed(told) if told else strategy.GOES_ON.passed())
    failed = {outcome.check: outcome.reason for outcome in outcomes if outcome.verdict == "failed"}
    assert set(failed) == EXPECTED[name], failed
    others = {outcome.verdict for outcome in outcomes if outcome.verdict != "failed"}
    assert others == {"passed", "not asked"}


@pytest.mark.slow
def test_pipelines_keep_what_they_promise() -> None:
    """In runs of their own: each replica has two processes."""
    card = strategy.check_strategy("pipeline", backend="torch-ddp")
    failed = {each.check: each.reason for each in card.outcomes if each.verdict == "failed"}
    assert not failed
    asked = {each.check for each in card.outcomes if each.verdict == "passed"}
    assert {"holds_what_it_says", "strategy_goes_on", "equals_data_parallel"} <= asked


def test_every_check_is_seen_to_fail() -> None:
    assert set.union(*EXPECTED.values()) == {check.name for check in strategy.CHECKS}
    assert (
        set(in_turn.STRATEGIES) == set(EXPECTED) == {n for names in CELLS.values() for n in names}
    )
