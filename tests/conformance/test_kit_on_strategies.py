"""The checks find what is wrong with broken strategies, and nothing wrong with isotrain's own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance import strategy_sessions

from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import plugin_manager
from isotrain.testing import strategy
from isotrain.testing.checks import resume as resume_checks
from isotrain.testing.consecutive_sessions import launched_in_turn
from isotrain.testing.launching import Run
from isotrain.testing.scorecard import outcome_of

ON_TORCH = (
    *("compressed, bf16", "sharded, stage 3", "tensor"),
    *("pipeline", "pipeline, 2-1-1", "pipeline, 2bw", "pipeline, pipedream"),
)
TOGETHER: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "reference",
        tuple(name for name in strategy_sessions.STRATEGIES if name not in ON_TORCH),
    ),
    ("torch-ddp", ("compressed, bf16", "sharded, stage 3", "broken-sums-gradients")),
    ("torch-ddp", ("pipeline", "pipeline, 2bw", "pipeline, pipedream")),
    ("torch-ddp", ("pipeline, 2-1-1",)),
    ("torch-ddp", ("tensor",)),
    ("tf-multiworker", ("tensor",)),
    ("tf-multiworker", ("pipeline, 2bw", "pipeline, pipedream")),
)
"""A backend and what is tried in the same processes of it: all that need no framework, and some on one.

In stages or cut layers, a replica has two processes; in stages of 2, 1 and 1 it has four.
"""
EXPECTED: dict[str, set[str]] = {
    **{name: set() for name in strategy_sessions.SOUND},
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
    "broken-needs-samples": {"survives_empty_replicas", "state_bytes_as_declared"},
    "broken-needs-others": {"survives_one_replica"},
    "broken-forgets-small-gradients": {"keeps_gradient_sum"},
    "broken-keeps-to-itself": {"strategy_resumes_exactly"},
    "broken-misdescribed": {"strategy_declarations"},
    "broken-keeps-news-back": {
        "replicas_are_equal",
        "equals_data_parallel",
        "converges_on_digits",
        "keeps_gradient_sum",
    },
    "broken-applies-in-halves": {"ordered_sums_keep_bits"},
    "broken-promises-too-much": {"state_bytes_as_declared"},
    "broken-keeps-residuals": {"elastic_as_declared"},
    "broken-steps-before-it-averages": {"elastic_as_declared"},
    "broken-applies-before-it-ends": {"elastic_as_declared"},
    "broken-equal-too-early": {"elastic_as_declared"},
}
"""Strategy to the checks that fail on it; all others pass or are not asked."""

GOING_ON = (*strategy_sessions.SOUND, "broken-keeps-to-itself")
"""Those that go on from another run; the other broken ones would end it."""

ASKED = {
    **{
        name: {"elastic_as_declared"}
        for name in (
            *("data-parallel", "hierarchical", "compressed, fp16"),
            *("local-sgd", "local-sgd, every step", "diloco"),
        )
    },
    "pipeline": {"state_bytes_as_declared", "strategy_resumes_exactly", "equals_data_parallel"},
    "pipeline, 2-1-1": {
        *("state_bytes_as_declared", "strategy_resumes_exactly", "equals_data_parallel"),
    },
    "pipeline, 2bw": {"state_bytes_as_declared", "strategy_resumes_exactly", "keeps_gradient_sum"},
    "pipeline, pipedream": {"state_bytes_as_declared", "strategy_resumes_exactly"},
    "tensor": {"state_bytes_as_declared", "strategy_resumes_exactly", "equals_data_parallel"},
}
"""Checks that are not to be left out for want of a capability."""


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    """Lets this process and its runs know the backend in NumPy and the broken strategies."""
    with selection.using(["isotrain.testing.reference", "plugins.broken_strategies"], []):
        yield


@functools.cache
def returned(backend: str, names: tuple[str, ...], replicas: int) -> list[dict[str, Any]]:
    """What the trials of these strategies with so many replicas brought back: by rank and trial."""
    trials = [
        i for i, trial in enumerate(strategy.STRATEGY_RUNS) if (trial.replicas or 2) == replicas
    ]
    specs = strategy_sessions.specs(names, backend, trials)
    return launched_in_turn(specs, strategy_sessions.tried, backend, replicas)


def of_one(backend: str, names: tuple[str, ...], name: str, trial: int) -> Run:
    """The part of one strategy, as if the run had been its own."""
    found = returned(backend, names, strategy.STRATEGY_RUNS[trial].replicas or 2)
    parts = [process[f"{trial}: {name}"] for process in found]
    return Run(parts, {}, parts[0].get("error"), ended=0.0, exit_seconds=0.0, folder=Path())


@functools.cache
def gone_on(backend: str, names: tuple[str, ...]) -> dict[str, str]:
    """What is wrong with each that goes on from another run: of two runs for all of them."""
    specs = {
        name: resume_checks.strategy_resume_case(*strategy_sessions.STRATEGIES[name], backend)
        for name in names
        if name in GOING_ON
    }
    return resume_checks.problems(specs, backend)


def _mark(backend: str, name: str) -> pytest.MarkDecorator:
    """Mark of a cell: those on tf-multiworker, and with unequal stages, are features."""
    is_feature = backend == "tf-multiworker" or name == "pipeline, 2-1-1"
    return pytest.mark.features if is_feature else pytest.mark.slow


@pytest.mark.parametrize(
    ("backend", "names", "name"),
    [
        pytest.param(
            *(backend, names, name),
            marks=_mark(backend, name),
            id=f"{backend}-{name}",
        )
        for backend, names in TOGETHER
        for name in names
    ],
)
def test_exactly_the_expected_checks_fail(backend: str, names: tuple[str, ...], name: str) -> None:
    adapter, tried = (
        plugin_manager().backend(backend),
        plugin_manager().strategy(*strategy_sessions.STRATEGIES[name]),
    )
    outcomes = [outcome_of(strategy.DECLARATIONS, tried)]
    for number, trial in enumerate(strategy.STRATEGY_RUNS):
        run = functools.partial(of_one, backend, names, name, number)
        outcomes += strategy.outcomes(trial, tried, adapter, run)
    if name in GOING_ON:
        told = gone_on(backend, names)[name]
        outcomes.append(strategy.RESUMES.failed(told) if told else strategy.RESUMES.passed())
    outcomes.append(strategy.elastic_outcome(*strategy_sessions.STRATEGIES[name]))
    failed = {outcome.check: outcome.reason for outcome in outcomes if outcome.verdict == "failed"}
    assert set(failed) == EXPECTED[name], failed
    passed = {outcome.check for outcome in outcomes if outcome.verdict == "passed"}
    assert passed >= ASKED.get(name, set())
    others = {outcome.verdict for outcome in outcomes if outcome.verdict != "failed"}
    assert others == {"passed", "skipped"}


def test_every_check_fails_on_some_broken_strategy() -> None:
    assert set.union(*EXPECTED.values()) == {check.name for check in strategy.CHECKS}
    tried = {name for _, names in TOGETHER for name in names}
    assert set(strategy_sessions.STRATEGIES) == set(EXPECTED) == tried
