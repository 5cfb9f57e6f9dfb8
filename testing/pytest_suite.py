"""Conformance suites as pytest classes, for the tests of a plugin.

    from isotrain.testing.pytest_suite import backend_suite

    TestMyBackend = backend_suite("my-backend")

Import this module where you need it. It is no pytest entry point: pytest would load that into every test
session of every environment with isotrain installed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from isotrain.testing import backend, strategy
from isotrain.testing.scorecard import Outcome


def backend_suite(
    name: str, *, replicas: Sequence[Any] = (2, 3), without: Collection[str] = ()
) -> type:
    """Test class with one test for every check of a backend.

    A check that the backend's capabilities do not allow is skipped, with the reason. All checks on a
    number of replicas share one run; those with runs of their own are made once.

    Args:
        name: Backend, `NAME` or `NAME:COLLECTIVE`.
        replicas: Numbers of replicas, at least 2 each; a `pytest.param` may carry marks.
        without: Names of checks to leave out, such as `crash` and `hang`, which take about 10 s each.
    """
    crash_checks = {check.name: check for check in backend.CRASH_CHECKS}
    once = {backend.RESUMES.name, *crash_checks}
    cells = [
        pytest.param(count, check.name, marks=marks, id=f"{count}-{check.name}")
        for index, (count, marks) in enumerate(map(_value_and_marks, replicas))
        for check in backend.CHECKS
        if check.name not in without and (index == 0 or check.name not in once)
    ]

    class Suite:
        """The checks of one backend."""

        @pytest.mark.parametrize(("replicas", "check"), cells)
        def test_check(self, replicas: int, check: str) -> None:
            """The check passes, or is skipped for a capability that the backend lacks."""
            if check in crash_checks:
                _report(backend.crash_outcome(crash_checks[check], name, replicas))
            elif check in once:
                _report(backend.resume_outcome(name))
            else:
                _report(_backend_outcomes(name, replicas)[check])

    return Suite


def strategy_suite(
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    backends: Sequence[Any] = (None,),
    replicas: int = 2,
) -> type:
    """Test class with one test for every check of a strategy.

    A check of something that the strategy does not promise is skipped, with the reason.

    Args:
        name: Strategy name.
        options: Strategy options, JSON types.
        backends: Backends to run it on; None stands for the first available one that has what the strategy
            requires. A `pytest.param` may carry marks.
        replicas: Number of replicas, at least 2.
    """
    options_json = json.dumps(dict(options or {}))
    cells = [
        pytest.param(chosen, check.name, marks=marks, id=f"{chosen or 'any'}-{check.name}")
        for chosen, marks in map(_value_and_marks, backends)
        for check in strategy.CHECKS
    ]

    class Suite:
        """The checks of one strategy."""

        @pytest.mark.parametrize(("backend", "check"), cells)
        def test_check(self, backend: str | None, check: str) -> None:
            """The check passes, or is skipped because the strategy does not promise it."""
            _report(_strategy_outcomes(name, options_json, backend, replicas)[check])

    return Suite


def _value_and_marks(parameter: Any) -> tuple[Any, Any]:
    """Value and marks of a parameter, which may be a `pytest.param`."""
    if hasattr(parameter, "marks"):
        return parameter.values[0], parameter.marks
    return parameter, ()


@functools.cache
def _backend_outcomes(name: str, replicas: int) -> dict[str, Outcome]:
    card = backend.check_backend(name, replicas=replicas, with_crash_checks=False)
    return {outcome.check: outcome for outcome in card.outcomes}


@functools.cache
def _strategy_outcomes(
    name: str, options: str, chosen: str | None, replicas: int
) -> dict[str, Outcome]:
    card = strategy.check_strategy(
        name, backend=chosen, replicas=replicas, options=json.loads(options)
    )
    return {outcome.check: outcome for outcome in card.outcomes}


def _report(outcome: Outcome) -> None:
    if outcome.verdict == "skipped":
        pytest.skip(str(outcome.reason))
    if outcome.verdict == "failed":
        pytest.fail(f"{outcome.meaning}\n{outcome.reason}", pytrace=False)
