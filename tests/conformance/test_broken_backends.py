"""The conformance checks find what is wrong: exactly the expected ones fail on broken backends."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

REPLICAS = 2

TRAINING = {
    "training",
    "training_metrics",
    "synchronised_step",
    "accumulation",
    "kept_gradients",
}
EXPECTED: dict[str, set[str]] = {
    "identity-all-reduce": {
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
        "moving_statistics",
        *TRAINING,
    },
    "dropped-slice": {"gradients_and_apply", *TRAINING},
    "silent-broadcast": {"broadcast_keeps_bits", "broadcast_within", "computation_within_parts"},
    "counted-placeholders": {"evaluation"},
    "own-start": {"start_is_equal", "start_is_of_the_seed"},
    "careless": {"declarations", "unknown_choices_are_refused"},
    "noisy-close": {"clean_exit"},
    "dies-in-a-barrier": {"barrier"},
}
"""Broken backend to the checks that fail on it; all others pass."""

PARTLY = ("careless", "dies-in-a-barrier")
"""Those of which some checks are not asked: a capability is missing, or the run has ended."""

ALONE = ("noisy-close", "dies-in-a-barrier")
"""Those that end their run; the others are checked in one."""

_IN_TURN = """
import json, sys
from isotrain.testing.backend import check_in_turn
cards = check_in_turn(sys.argv[2:], replicas=int(sys.argv[1]))
print(json.dumps([card.to_dict() for card in cards]))
"""

_ALONE = """
import json, sys
from isotrain.testing.backend import check_backend
card = check_backend(sys.argv[2], replicas=int(sys.argv[1]), with_endings=False)
print(json.dumps([card.to_dict()]))
"""


@functools.cache
def cards(program: str, *faults: str) -> dict[str, Any]:
    """The scorecard of each, from one run."""
    completed = subprocess.run(
        [sys.executable, "-c", program, str(REPLICAS), *(f"broken-{fault}" for fault in faults)],
        env={**os.environ, "ISOTRAIN_PLUGINS": "plugins.broken_backends"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return dict(zip(faults, json.loads(completed.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("fault", EXPECTED)
def test_exactly_the_expected_checks_fail(fault: str) -> None:
    """All others pass."""
    together = [name for name in EXPECTED if name not in ALONE]
    given = (_ALONE, fault) if fault in ALONE else (_IN_TURN, *together)
    card = cards(*given)[fault]
    failed = {o["check"]: o["reason"] for o in card["outcomes"] if o["verdict"] == "failed"}
    assert set(failed) == EXPECTED[fault], failed
    others = {o["verdict"] for o in card["outcomes"] if o["verdict"] != "failed"}
    assert others == ({"passed", "not asked"} if fault in PARTLY else {"passed"})
