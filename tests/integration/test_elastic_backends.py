"""Elastic runs on the real backends: processes are lost and join, as if nothing had happened."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import numpy as np
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
    die,
    native,
    portable,
    process,
    require_whole_history,
    run,
    spec,
)

import isotrain
from isotrain.adapters.horovod import build_info

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
        ("horovod-torch", "native"),
        ("horovod-torch", "portable"),
        ("horovod-tf", "portable"),
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


@pytest.mark.parametrize("backend", ["torch-ddp", "horovod-torch"])
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


@pytest.mark.parametrize(
    ("backend", "strategy", "options", "tolerance"),
    [
        ("torch-ddp", "hierarchical", {"host_size": 2}, 1e-11),
        ("torch-ddp", "compressed", {"method": "fp16"}, 5e-3),
        ("torch-ddp", "compressed", {"method": "bf16"}, 2e-2),
        ("horovod-torch", "compressed", {"method": "fp16"}, 5e-3),
        ("horovod-tf", "compressed", {"method": "fp16"}, 5e-3),
    ],
)
def test_the_others_go_on_under_other_strategies(
    backend: str, strategy: str, options: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    """A step that is left out, or taken twice, changes weights by 0.06."""
    model = portable if backend == "horovod-tf" else MODELS["native"]
    choice = {"name": strategy, "options": options}
    changes = {"model": model, "backend": backend, "strategy": choice, "timeouts": {"progress": 60}}
    whole, _ = run(tmp_path / "whole", 4, **changes, elastic=None)
    kills = Kills(between={1: 3, 0: 8})
    result, events = run(tmp_path / "run", 4, **changes, callbacks=[kills])
    require_whole_history(events)
    assert changes_told(events) == [({"1"}, [], [0, 2, 3]), ({"0"}, [], [2, 3])]
    for name, array in whole.weights.items():
        np.testing.assert_allclose(result.weights[name], array, rtol=0, atol=tolerance)


@dataclass
class DiesInLevel:
    """Callback that kills a process in step 6, before one of the exchanges of its host.

    Attributes:
        rank: The process.
        call: The kind of exchange.
        before: Number of these exchanges that it has taken part in.
    """

    rank: int
    call: str
    before: int

    def on_start(self, session: isotrain.Session) -> None:
        if process() == self.rank:
            communicator: Any = session.group.communicator  # type: ignore[attr-defined]
            exchange, count = getattr(communicator, self.call), 0

            def exchanging(value: Any, subgroups: Any) -> Any:
                nonlocal count
                if session.steps_done == 6:
                    if count == self.before:
                        die()
                    count += 1
                return exchange(value, subgroups)

            setattr(communicator, self.call, exchanging)


@pytest.mark.parametrize(
    ("dies", "done"),
    [(DiesInLevel(0, "all_reduce_within", 1), 6), (DiesInLevel(2, "broadcast_within", 0), 7)],
    ids=["between hosts", "inside a host"],
)
def test_the_others_go_on_from_different_levels(
    dies: DiesInLevel, done: int, tmp_path: Path
) -> None:
    """Without rank 0, rank 3 waits for rank 2 alone, which leaves. Without rank 2, only rank 3 is behind."""
    strategy = {"name": "hierarchical", "options": {"host_size": 2}}
    changes = {"model": MODELS["native"], "backend": "torch-ddp", "strategy": strategy}
    changes["timeouts"] = {"progress": 60}
    whole, _ = run(tmp_path / "whole", 4, **changes, elastic=None)
    result, events = run(tmp_path / "run", 4, **changes, callbacks=[dies])
    assert_same(result, whole)
    require_whole_history(events)
    found = [(set(each["lost"]), each["done"]) for each in changes_of(events)]
    assert found == [({str(dies.rank)}, done)]


class KeepsGroup:
    """Callback that keeps the newest replica group."""

    def on_start(self, session: isotrain.Session) -> None:
        self.group = session.group


@pytest.mark.parametrize("backend", ["torch-ddp", "horovod-torch"])
def test_the_others_go_on_where_a_callback_keeps_the_group(backend: str, tmp_path: Path) -> None:
    """The connections are closed although it does: others wait for those that have left."""
    changes = {"model": MODELS["native"], "backend": backend, "timeouts": {"progress": 60}}
    callbacks = [Kills(between={2: 3}), KeepsGroup()]
    result, events = run(tmp_path / "run", 5, **changes, callbacks=callbacks)
    assert len(result.history.loss) == STEPS
    assert [list(change["members"]) for change in changes_of(events)] == [[0, 1, 3, 4]]


class DiesWhileTheyConnect:
    """Rank 1 is killed, and another process while Horovod connects those that are left: at some addresses.

    Attributes:
        other: Rank of the other process.
        has_told: Whether it has told the others its addresses.
    """

    def __init__(self, other: int, *, has_told: bool) -> None:
        self.other = other
        self.has_told = has_told

    def on_start(self, session: isotrain.Session) -> None:
        from isotrain.adapters.horovod.private_api import ADDRESS_BYTES
        from isotrain.adapters.horovod.rendezvous import InterruptibleRelay

        write = InterruptibleRelay.write

        def writing(relay: InterruptibleRelay, path: str, value: bytes) -> None:
            are_addresses = bool(value) and not len(value) % ADDRESS_BYTES
            if are_addresses and not self.has_told:
                die()
            write(relay, path, value)
            if are_addresses:
                die()

        if process() == self.other:
            mock.patch.object(InterruptibleRelay, "write", writing).start()

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if (process(), batch.step) == (1, 2):
            die()


@pytest.mark.parametrize("other", [0, 3])
@pytest.mark.parametrize("has_told", [False, True])
def test_horovod_goes_on_where_a_process_is_lost_while_they_connect(
    other: int, has_told: bool, tmp_path: Path
) -> None:
    """Their own timeout, of a minute, does not decide: they are interrupted."""
    changes = {"model": MODELS["native"], "timeouts": {"progress": 60}}
    callbacks = [DiesWhileTheyConnect(other, has_told=has_told)]
    whole, _ = run(tmp_path / "whole", 4, backend="horovod-torch", **changes, elastic=None)
    found, events = run(
        tmp_path / "run", 4, backend="horovod-torch", **changes, callbacks=callbacks
    )
    assert_same(found, whole)
    require_whole_history(events)
    left = [rank for rank in (0, 2, 3) if rank != other]
    assert [each["members"] for each in changes_of(events)] == [(0, 2, 3), tuple(left)]


def test_a_build_that_does_not_survive_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_info, "survives_failed_start", lambda extension: False)
    expected = "elastic: backend 'horovod-torch': this build .* python -m isotrain.build_horovod"
    with pytest.raises(isotrain.UnsupportedError, match=expected):
        isotrain.plan(spec(model=MODELS["native"]), backend="horovod-torch", replicas=2)


def test_subgroups_of_horovod_are_refused() -> None:
    expected = "elastic: backend 'horovod-torch': the strategy has subgroups, for which Horovod has"
    fields = spec(model=MODELS["native"], strategy="hierarchical")
    with pytest.raises(isotrain.UnsupportedError, match=expected):
        isotrain.plan(fields, backend="horovod-torch", replicas=2)
