"""The conformance checks find what is wrong: exactly the expected ones fail on broken backends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conformance.backends import param

REPLICAS = 2
QUICK = "sum-for-mean"

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
        "exact_mean_of_gradients",
        "local_step",
        "local_step_without_samples",
        "moving_statistics",
        *TRAINING,
    },
    "dropped-slice": {"gradients_and_apply", *TRAINING},
    "silent-broadcast": {"broadcast", "broadcast_keeps_bits"},
    "counted-placeholders": {"evaluation"},
    "own-start": {"start_is_equal"},
}
"""Broken backend to the checks that fail on it; all others pass."""

_PROGRAM = """
import json, sys, isotrain
from conformance import checks, probe
returned = isotrain.launch(checks.run_checks, probe.spec(), backend=sys.argv[1],
                           replicas=int(sys.argv[2]), run_directory=sys.argv[3],
                           on_event=lambda event: None)
print(json.dumps([process["failures"] for process in returned]))
"""


@pytest.mark.parametrize("fault", [param(fault, slow=fault != QUICK) for fault in EXPECTED])
def test_exactly_the_expected_checks_fail(fault: str, tmp_path: Path) -> None:
    """In at least one process each; the run itself goes well."""
    completed = subprocess.run(
        [sys.executable, "-c", _PROGRAM, f"broken-{fault}", str(REPLICAS), str(tmp_path / "run")],
        env={**os.environ, "ISOTRAIN_PLUGINS": "plugins.broken_backends"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    processes = json.loads(completed.stdout.splitlines()[-1])
    made = set(processes[0])
    failed = {name for process in processes for name, text in process.items() if text}
    unexpected = {name: text for p in processes for name, text in p.items() if text}
    assert failed == EXPECTED[fault], {n: unexpected.get(n) for n in failed ^ EXPECTED[fault]}
    assert len(made) > len(failed)
