"""The conformance checks find what is wrong: exactly the expected ones fail on broken backends."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from isotrain.core.plugins import selection
from isotrain.testing.backend import check_backend, check_in_turn, resume_outcome
from isotrain.testing.scorecard import Scorecard

REPLICAS = 2

TRAINING = {
    "training",
    "training_metrics",
    "synchronous_step",
    "accumulation",
    "kept_gradients",
    "own_batches",
    "optimizer_groups",
}
SHORT = {
    "computation_in_bfloat16",
    "objective_step",
    "named_updates",
    "per_replica_state",
    "draws_per_sample",
}
"""NumPy has no such type, and the reference backend no such objectives and state."""
EXPECTED: dict[str, set[str]] = {
    "identity-all-reduce": {
        "all_reduce_sum",
        "all_reduce_mean",
        "all_reduce_max",
        "average_parameters",
        "collectives_overlap",
        "computation_collectives",
        "evaluation",
        "evaluation_changes_nothing",
        "exact_mean_of_gradients",
        "local_step",
        "local_step_without_samples",
        "local_step_accumulated",
        "moving_statistics",
        "replicas_stay_equal",
        *TRAINING,
    },
    "identity-under-torch": {
        "all_reduce_sum",
        "all_reduce_mean",
        "all_reduce_max",
        "average_parameters",
        "barrier",
        "computation_collectives",
        "computation_in_bfloat16",
        "evaluation",
        "evaluation_changes_nothing",
        "gradients_and_apply",
        "moving_statistics",
        "own_batches",
        "replicas_stay_equal",
        "training_metrics",
    },
    "sum-for-mean": {
        "all_reduce_mean",
        "average_parameters",
        "computation_collectives",
        "exact_mean_of_gradients",
        "local_step",
        "local_step_without_samples",
        "local_step_accumulated",
        "moving_statistics",
        *TRAINING,
    },
    "dropped-slice": {"gradients_and_apply", "moving_statistics", *TRAINING},
    "silent-broadcast": {"broadcast_keeps_bits", "broadcast_within", "computation_in_subgroups"},
    "counted-placeholders": {"evaluation"},
    "trains-to-predict": {"predictions"},
    "own-start": {"start_is_equal", "start_is_of_the_seed"},
    "forgets-metrics": {"gradients_preserve_state", "resumes_exactly"},
    "careless": {"declarations", "unknown_choices_are_refused"},
    "noisy-close": {"clean_exit"},
    "dies-in-a-barrier": {"barrier"},
    "uncounted-rows": {"own_batches"},
    "swapped-parts": {"ordered_sums"},
    "inexact-parts": {"ordered_sums"},
    "inexact-sums": {"ordered_sums"},
    "careless-objectives": {
        "objective_step",
        "named_updates",
        "per_replica_state",
        "draws_per_sample",
    },
}
"""Broken backend to the checks that fail on it; all others pass."""

NOT_ASKED = {
    "careless": {"send_receive", *SHORT},
    "identity-under-torch": set[str](),
    "careless-objectives": set[str](),
    "noisy-close": {"optimizer_groups", "ordered_sums", *SHORT},
}
"""Checks that are not asked for want of a capability, where these are others than in NumPy."""

FORGETFUL = ("forgets-metrics",)
"""Those of which more is known when they go on from another run."""

ALONE = ("noisy-close", "dies-in-a-barrier", "identity-under-torch", "careless-objectives")
"""Those that end their run, or start in another way; the others are checked in one."""


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    """Lets this process and its runs know the broken backends."""
    with selection.using(["plugins.broken_backends"], []):
        yield


@functools.cache
def cards(*faults: str) -> dict[str, Scorecard]:
    """The scorecard of each, from one run."""
    names = [f"broken-{fault}" for fault in faults]
    return dict(zip(faults, check_in_turn(names, replicas=REPLICAS), strict=True))


@functools.cache
def alone(fault: str) -> Scorecard:
    """The scorecard of one from a run of its own."""
    return check_backend(f"broken-{fault}", replicas=REPLICAS, with_crash_checks=False)


@pytest.mark.slow
@pytest.mark.parametrize("fault", EXPECTED)
def test_exactly_the_expected_checks_fail(fault: str) -> None:
    """A broken backend fails the checks of what is broken, and passes all others."""
    together = [name for name in EXPECTED if name not in ALONE]
    card = alone(fault) if fault in ALONE else cards(*together)[fault]
    outcomes = list(card.outcomes)
    if fault in FORGETFUL:
        outcomes.append(resume_outcome(f"broken-{fault}"))
    failures = {
        outcome.check: outcome.reason for outcome in outcomes if outcome.verdict == "failed"
    }
    assert set(failures) == EXPECTED[fault], failures
    unasked = {outcome.check for outcome in outcomes if outcome.verdict == "skipped"}
    if fault == "dies-in-a-barrier":
        assert {"training", "clean_exit"} < unasked  # the run has ended
    else:
        assert unasked == NOT_ASKED.get(fault, SHORT)
