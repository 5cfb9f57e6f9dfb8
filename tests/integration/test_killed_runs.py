"""Runs that are killed and started again, with as many replicas or fewer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from integration.random_kills import moments
from integration.resume_runs import STEPS, STRATEGIES, assert_same, chosen, killed, plain, run, spec

import isotrain
from isotrain.core.errors import UnsupportedError
from isotrain.core.plugins.manager import plugin_manager

pytestmark = pytest.mark.usefixtures("reference")

KILLS = 3
FAILURES = (pytest.mark.slow, pytest.mark.failures)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "local-sgd" else FAILURES) for name in STRATEGIES],
)
def test_a_run_that_is_killed_repeatedly_ends_as_if_never_killed(tmp_path: Path, name: str) -> None:
    uses_parameter_server = name == "parameter-server"
    changes = {"strategy": chosen(name)}
    whole = run(tmp_path / "whole", 3, changes=changes)
    kills = moments(name, KILLS, slices=3 if uses_parameter_server else 1)
    found = killed(tmp_path / "killed", kills, replicas=3, changes=changes)
    assert_same(found, whole)
    assert any(restart["from_step"] for restart in found.restarts), found.restarts
    for restart in found.restarts:
        assert restart["from_step"] % 3 == 0
        assert restart["from_step"] <= restart["after_step"] < STEPS
        assert restart["replicas"] == 3


def test_every_other_strategy_is_refused_with_a_reason() -> None:
    for name in plugin_manager().strategies.entries().keys() - STRATEGIES.keys():
        with pytest.raises(UnsupportedError, match=f"{name}.*(pipeline-step|unshard-weights)"):
            isotrain.plan(spec(strategy=name), backend="reference", replicas=3)


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    whole = run(tmp_path / "first", changes={"checkpoint": {"every_steps": 5, "keep_last": None}})
    older = tmp_path / "first/checkpoints/step-000000005"
    found = killed(tmp_path / "second", [("batch", 3)], resume=older, changes={"checkpoint": None})
    assert found.restarts[0]["from_step"] == 5
    assert found.history.loss == whole.history.loss[5:]


def dies_often(session: isotrain.Session) -> list[float]:
    """Rank 0 is killed after its second step, as long as it finds files."""
    losses = []
    for batch in session.batches():
        losses.append(float(session.step(batch)))
        flags = sorted(session.run_directory.parent.glob("kill-*")) if session.is_main else []
        if flags and session.steps_done == 2:
            flags[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return losses


PAIRS = {"name": "hierarchical", "options": {"host_size": 2}}
"""Which three replicas cannot be."""


@pytest.mark.slow
@pytest.mark.failures
@pytest.mark.parametrize(
    ("replicas", "strategy", "expected"),
    [(3, "data-parallel", [3, 2, 2]), (4, PAIRS, [4, 2])],
)
def test_a_run_without_progress_restarts_with_fewer_replicas(
    replicas: int, strategy: Any, expected: list[int], tmp_path: Path
) -> None:
    """Each start but the last ends before a first checkpoint; two replicas are the fewest."""
    told: list[Any] = []
    for number in range(len(expected)):
        (tmp_path / f"kill-{number}").touch()
    found = isotrain.launch(
        dies_often,
        spec(model={"numpy": plain}, min_replicas=2, strategy=strategy),
        backend="reference",
        replicas=replicas,
        output=tmp_path / "run",
        max_restarts=3,
        on_event=told.append,
    )
    restarts = [event for event in told if event["event"] == "restarted"]
    assert [each["replicas"] for each in restarts] == expected
    assert {each["from_step"] for each in restarts} == {0}
    whole = run(tmp_path / "whole", 1, changes={"model": {"numpy": plain}})
    assert len(found) == 2
    assert found[0] == pytest.approx(whole.history.loss, abs=1e-12)
