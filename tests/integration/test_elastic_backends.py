"""Elastic runs on the real backends: processes are lost and join, as if nothing had happened."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from helpers import waiting
from integration import elastic_runs
from integration.elastic_runs import (
    STEPS,
    Joins,
    Kills,
    WaitsForNewcomer,
    assert_same,
    changes_of,
    changes_told,
    native,
    portable,
    require_whole_history,
    run,
    spec,
)

import isotrain

pytestmark = [
    pytest.mark.usefixtures("no_processes_left"),
    pytest.mark.slow,
    pytest.mark.failures,
]

for module in (sys.modules[__name__], elastic_runs, waiting):
    cloudpickle.register_pickle_by_value(module)

MODELS: dict[str, Any] = {"native": {"torch": native}, "portable": portable}
ON_BACKENDS = pytest.mark.parametrize(
    ("backend", "model"),
    [
        ("torch-ddp", "native"),
        ("torch-ddp", "portable"),
    ],
)


@ON_BACKENDS
def test_the_others_go_on(backend: str, model: str, tmp_path: Path) -> None:
    kills = Kills(between={1: 3, 0: 8})
    changes = {"model": MODELS[model], "backend": backend}
    whole, _ = run(tmp_path / "whole", 3, **changes, elastic=None)
    result, events = run(tmp_path / "run", 3, **changes, callbacks=[kills])
    assert_same(result, whole)
    require_whole_history(events)
    assert changes_told(events) == [({"1"}, [], [0, 2]), ({"0"}, [], [2])]


@ON_BACKENDS
def test_newcomers_join(backend: str, model: str, tmp_path: Path) -> None:
    changes = {"model": MODELS[model], "backend": backend}
    whole, _ = run(tmp_path / "whole", 2, **changes, elastic=None)
    kills = Kills(between={1: 2, 0: 8})
    waits = WaitsForNewcomer(5, tmp_path / "reached", 2)
    changes |= {"callbacks": [kills, waits], "data": waits.data}
    elastic = {"min": 1, "replacements": 1}
    result, events = run(tmp_path / "run", 2, **changes, elastic=elastic)
    assert_same(result, whole)
    require_whole_history(events)
    assert changes_told(events) == [({"1"}, [], [0]), (set(), [2], [0, 2]), ({"0"}, [], [2])]


@pytest.mark.parametrize("backend", ["torch-ddp"])
def test_a_replica_joins_one(backend: str, tmp_path: Path) -> None:
    folder, changes = tmp_path / "run", {"model": MODELS["native"], "backend": backend}
    whole, _ = run(tmp_path / "whole", 1, **changes, elastic=None)
    joins = Joins(folder, 1)
    waits = WaitsForNewcomer(6, tmp_path / "reached", 1)
    elastic = {"min": 1, "max": 2}
    fields = spec(model=changes["model"], data=waits.data, callbacks=[waits], elastic=elastic)
    result = isotrain.run(fields, backend=backend, replicas=1, output=folder, on_event=joins)
    joins.finish()
    assert_same(result, whole)
    require_whole_history(joins.events)
    assert changes_told(joins.events) == [(set(), [1], [0, 1])]


class KeepsGroup:
    """Callback that keeps the newest replica group."""

    def on_start(self, session: isotrain.Session) -> None:
        self.group = session.group


@pytest.mark.parametrize("backend", ["torch-ddp"])
def test_the_others_go_on_where_a_callback_keeps_the_group(backend: str, tmp_path: Path) -> None:
    """The connections are closed although it does: others wait for those that have left."""
    changes = {"model": MODELS["native"], "backend": backend, "timeouts": {"progress": 60}}
    callbacks = [Kills(between={2: 3}), KeepsGroup()]
    result, events = run(tmp_path / "run", 5, **changes, callbacks=callbacks)
    assert len(result.history.loss) == STEPS
    assert [list(change["members"]) for change in changes_of(events)] == [[0, 1, 3, 4]]
