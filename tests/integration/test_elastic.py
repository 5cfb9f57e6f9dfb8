"""Elastic runs: processes are lost, and the others go on without a restart, as if nothing had happened."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import numpy as np
import pytest
from integration import elastic_runs
from integration.elastic_runs import (
    REPLICAS,
    STEPS,
    STEPS_PER_EPOCH,
    Kills,
    assert_same,
    changes_of,
    die,
    native,
    portable,
    process,
    require_whole_history,
    run,
    spec,
)

import isotrain
from isotrain.core.errors import (
    PlanError,
    RunFailedError,
    SpecError,
    UnsupportedError,
)
from isotrain.core.launching.run_directory.run_directory import (
    last_weights_file,
    last_weights_path,
)
from isotrain.core.launching.supervision import handover_folders
from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.session.training import part_shares
from isotrain.core.session.weights.weights_file import read_weights

pytestmark = pytest.mark.usefixtures("reference", "no_processes_left")

for module in (sys.modules[__name__], elastic_runs):
    cloudpickle.register_pickle_by_value(module)

KILLED = "was ended by SIGKILL"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> isotrain.RunResult:
    """A run from which nothing is lost."""
    result, _ = run(tmp_path_factory.mktemp("whole") / "run", elastic=None)
    return result


CASES = {
    "the last rank": (Kills(between={3: 2}), [({"3"}, 3, [0, 1, 2])]),
    "rank 0": (Kills(between={0: 6}), [({"0"}, 7, [1, 2, 3])]),
    "one after the other": (
        Kills(between={1: 1, 0: 4, 3: 8}),
        [({"1"}, 2, [0, 2, 3]), ({"0"}, 5, [2, 3]), ({"3"}, 9, [2])],
    ),
    "two at once": (Kills(between={0: 7, 2: 7}), [({"0", "2"}, 8, [1, 3])]),
    "a sum that one rank has": (Kills(sending={0: 6}), [({"0"}, 7, [1, 2, 3])]),
    "in an evaluation": (Kills(evaluating={1: 4}), [({"1"}, 5, [0, 2, 3])]),
    "rank 0 in an evaluation": (Kills(evaluating={0: 9}), [({"0"}, 10, [1, 2, 3])]),
    "after the last step": (Kills(between={0: STEPS - 1}), [({"0"}, STEPS, [1, 2, 3])]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_others_go_on_as_if_nothing_was_lost(
    name: str, whole: isotrain.RunResult, tmp_path: Path
) -> None:
    kills, expected = CASES[name]
    result, events = run(tmp_path / "run", callbacks=[kills])
    assert_same(result, whole)
    changes = changes_of(events)
    lost: set[str] = set().union(*(change["lost"] for change in changes))
    assert lost == set().union(*(ranks for ranks, _, _ in expected))
    assert all(what.startswith(KILLED) for c in changes for what in c["lost"].values())
    assert list(changes[-1]["members"]) == expected[-1][2]
    if name != "two at once":  # may be two changes
        found_changes = [(set(c["lost"]), c["done"], list(c["members"])) for c in changes]
        assert found_changes == expected
    assert result.restarts == []
    require_whole_history(events)
    epochs = [event for event in events if event["event"] == "epoch"]
    assert [epoch["loss"] for epoch in epochs] == pytest.approx(
        [epoch["loss"] for epoch in whole.history.epochs], abs=1e-12
    )
    for found, undisturbed in zip(result.history.epochs, whole.history.epochs, strict=True):
        for metric in ("validation_loss", "validation_mean_absolute_error"):
            assert found[metric] == pytest.approx(undisturbed[metric], abs=1e-12)
    first_whole = -(-expected[-1][1] // STEPS_PER_EPOCH) + 1
    for found, undisturbed in zip(
        result.history.epochs[first_whole:], whole.history.epochs[first_whole:], strict=True
    ):
        assert found["mean_absolute_error"] == pytest.approx(undisturbed["mean_absolute_error"])


HIERARCHICAL = {"name": "hierarchical", "options": {"host_size": 2}}


@pytest.mark.parametrize(
    ("kills", "expected"),
    [
        (Kills(between={1: 2, 0: 6}), [({"1"}, 3, [0, 2, 3]), ({"0"}, 7, [2, 3])]),
        (Kills(sending={0: 6}, exchanges=3), [({"0"}, 7, [1, 2, 3])]),
    ],
    ids=["one after the other", "a sum that one rank has"],
)
def test_hierarchical_steps_go_on(
    kills: Kills, expected: list[Any], whole: isotrain.RunResult, tmp_path: Path
) -> None:
    """The hosts are formed anew of the replicas that are left: of 2, of 2 and 1, and of 2."""
    result, events = run(tmp_path / "run", callbacks=[kills], strategy=HIERARCHICAL)
    assert_same(result, whole)
    require_whole_history(events)
    changes = changes_of(events)
    assert [(set(c["lost"]), c["done"], list(c["members"])) for c in changes] == expected


def test_steps_with_gradients_in_16_bits_go_on(tmp_path: Path) -> None:
    """Up to the rounding of these: a step that is left out, or taken twice, changes weights by 0.06."""
    strategy = {"name": "compressed", "options": {"method": "fp16"}}
    undisturbed, _ = run(tmp_path / "whole", elastic=None, strategy=strategy)
    kills = Kills(sending={0: 6})
    result, events = run(tmp_path / "run", callbacks=[kills], strategy=strategy)
    require_whole_history(events)
    assert [(set(c["lost"]), c["done"]) for c in changes_of(events)] == [({"0"}, 7)]
    assert result.history.loss[:7] == undisturbed.history.loss[:7]
    np.testing.assert_allclose(result.history.loss, undisturbed.history.loss, rtol=0, atol=5e-3)
    for name, array in undisturbed.weights.items():
        np.testing.assert_allclose(result.weights[name], array, rtol=0, atol=5e-3, err_msg=name)


class SlowLast:
    """Callback that moves the clock of shares by the parts of each step: those of rank 3 take four times."""

    now = 0.0

    def on_start(self, session: isotrain.Session) -> None:
        mock.patch.object(part_shares, "clock", self.seconds).start()

    def seconds(self) -> float:
        return self.now

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        self.now += len(batch.slices[0]) * (4.0 if process() == 3 else 1.0)


@pytest.mark.slow
@pytest.mark.failures
def test_unequal_shares_are_dealt_among_those_who_are_left(tmp_path: Path) -> None:
    """Weights and losses have the bits of a run from which nothing is lost, with equal shares."""
    undisturbed, _ = run(tmp_path / "whole", elastic=None, reproducible="bits")
    result, events = run(
        tmp_path / "run",
        callbacks=[SlowLast(), Kills(between={1: 8})],
        reproducible="bits",
        shares={"every": 2},
    )
    assert [list(change["members"]) for change in changes_of(events)] == [[0, 2, 3]]
    scalars = [event for event in events if event["event"] == "scalars"]
    dealt = [list(each.values()) for event in scalars for each in event["values"]]
    assert dealt == [[3, 2, 2, 1], [4, 3, 1]]
    assert result.history.loss == undisturbed.history.loss
    for name, array in undisturbed.weights.items():
        assert result.weights[name].tobytes() == array.tobytes(), name


@pytest.mark.slow
def test_a_suspended_process_is_ended_and_the_others_go_on(
    whole: isotrain.RunResult, tmp_path: Path
) -> None:
    result, events = run(tmp_path / "run", callbacks=[Stops()], timeouts={"silence": 2.0})
    assert_same(result, whole)
    (change,) = changes_of(events)
    assert change["lost"]["2"].startswith("is suspended (SIGSTOP)")


class Stops:
    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if process() == 2 and batch.step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
def test_checkpoints_go_on_and_a_later_run_resumes_from_them(
    whole: isotrain.RunResult, tmp_path: Path
) -> None:
    kills = Kills(between={0: 3, 1: 7})
    policy = {"every_steps": 2, "keep_last": None, "background": False}
    run(tmp_path / "run", callbacks=[kills], checkpoint=policy)
    checkpoints = tmp_path / "run" / "checkpoints"
    found = {path.parent.name for path in checkpoints.glob("step-*/manifest.json")}
    assert found == {f"step-{step:09}" for step in (*range(2, STEPS, 2), STEPS)}
    for path in checkpoints.glob("step-*"):
        if int(path.name[5:]) > 12:
            (path / "manifest.json").unlink()
    result, _ = run(tmp_path / "again", replicas=3, resume=checkpoints, checkpoint=policy)
    np.testing.assert_allclose(result.history.loss, whole.history.loss[12:], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_too_few_that_are_left_fail_and_name_the_rank(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError) as caught:
        run(
            tmp_path, callbacks=[Kills(between={1: 2, 3: 5})], elastic={"min": 3, "replacements": 0}
        )
    first, *others = str(caught.value).splitlines()
    assert first.startswith(f"rank 3 of {REPLICAS} {KILLED}")
    assert first.endswith("after step 5, in call 'between calls'.")
    assert any(line.startswith(f"rank 1: last step 2, then {KILLED}") for line in others), others


def test_a_state_that_fits_nowhere_fails_and_names_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover_folders, "free_bytes", lambda parent: 0)
    with pytest.raises(RunFailedError, match=r"(?s)rank 1 of 4 .*after step 2.*bytes to hand over"):
        run(tmp_path, callbacks=[Kills(between={1: 2})])


class Raises:
    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if process() == 1 and batch.step == 2:
            raise ValueError("a deliberate mistake")


@pytest.mark.slow
def test_an_error_of_a_rank_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="rank 1 of 4 raised ValueError after step 2"):
        run(tmp_path, callbacks=[Raises()])


class EndsItself:
    """Rank 0 is killed, and its successor is requested to end in a later step."""

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if (process(), batch.step) == (0, 2):
            die()
        if (process(), batch.step) == (1, 5):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_later_rank_0_keeps_its_weights_when_it_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="this process was requested to end"):
        run(tmp_path / "run", callbacks=[EndsItself()])
    kept = last_weights_file(tmp_path / "run")
    assert kept == last_weights_path(tmp_path / "run", 6)
    until_then, _ = run(tmp_path / "again", elastic=None, epochs=None, steps=6)
    for name, value in until_then.weights.items():
        np.testing.assert_allclose(read_weights(kept)[name], value, rtol=0, atol=1e-11)


class RaisesAfterALoss:
    """Rank 2 is killed, and rank 1 raises an error once the launcher has most likely noticed that."""

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if batch.step == 3 and process() == 2:
            die()
        if batch.step == 3 and process() == 1:
            time.sleep(1.0)
            raise ValueError("a mistake of the user")


@pytest.mark.slow
def test_an_error_of_the_users_code_ends_the_run_also_while_another_is_lost(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="a mistake of the user"):
        run(tmp_path, callbacks=[RaisesAfterALoss()])


def own_loop(session: isotrain.Session) -> list[Any]:
    """A loop that is called again in the next process group, and continues from the notes."""
    assert session.replicas == len(session.plan.processes)
    for batch in session.batches():
        loss = float(session.step(batch))
        session.notes["losses"] = [*session.notes.get("losses", []), loss]
        if process() == 1 and batch.step == 4:
            die()
    return [process(), session.rank, session.replicas, session.notes["losses"]]


def test_an_own_loop_is_called_again_with_its_notes(
    whole: isotrain.RunResult, tmp_path: Path
) -> None:
    returned = isotrain.launch(own_loop, spec(), backend="reference", replicas=3, output=tmp_path)
    assert [each[:3] for each in returned] == [[0, 0, 2], [2, 1, 2]]
    for *_, losses in returned:
        assert losses == pytest.approx(whole.history.loss, abs=1e-12)


class Node:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


class KeepsSession:
    """Callback that keeps its newest session and a cycle of objects, and counts what is alive in the end."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.nodes: list[Any] = []

    def on_start(self, session: isotrain.Session) -> None:
        self.session, self.node = session, Node()
        self.groups.append(weakref.ref(session.group))
        self.nodes.append(weakref.ref(self.node))

    def on_end(self, session: isotrain.Session, metrics: Any) -> None:
        gc.collect()
        alive = [sum(each() is not None for each in kept) for kept in (self.groups, self.nodes)]
        print("alive:", len(self.groups), alive)


def test_a_session_that_a_callback_keeps_keeps_no_model(
    whole: isotrain.RunResult, tmp_path: Path
) -> None:
    """What is made after the first loss is garbage once nothing refers to it."""
    kills = Kills(between={1: 1, 0: 4, 3: 8})
    result, _ = run(tmp_path / "run", callbacks=[kills, KeepsSession()])
    assert_same(result, whole)
    assert "alive: 4 [1, 2]" in (tmp_path / "run" / "rank-2.log").read_text()


def test_metrics_survive_the_loss_of_a_process_in_an_evaluation_within_an_epoch(
    tmp_path: Path,
) -> None:
    """Nobody has reduced them yet: those of the samples of the others count, as if it was lost before."""
    changes: list[dict[str, Any]] = [
        {"callbacks": [Kills(between={3: 1})]},
        {"callbacks": [Kills(evaluating={3: 1})], "evaluation": {"every_steps": 2}},
    ]
    before, within = (
        run(tmp_path / str(index), **each)[0].history.epochs[0]["mean_absolute_error"]
        for index, each in enumerate(changes)
    )
    assert within == pytest.approx(before, abs=1e-12)


def test_a_resumed_run_goes_on_under_a_strategy_that_does_not_say_that_replicas_are_equal(
    tmp_path: Path,
) -> None:
    """Its checkpoints have the weights of each replica, as for those that differ."""
    with selection.using(["isotrain.testing.reference", "plugins.plain_strategy"], []):
        changes: dict[str, Any] = {"strategy": "plain"}
        first, ends = tmp_path / "first", Kills(between={0: 12})
        saves = {"every_steps": 7, "background": False}
        with pytest.raises(RunFailedError):
            run(first, **changes, checkpoint=saves, callbacks=[ends], elastic=None)
        kills = Kills(between={1: 8})
        _, events = run(tmp_path / "run", resume=first, **changes, callbacks=[kills])
    assert [each["done"] for each in changes_of(events)] == [9]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("diloco", {"fragments": 2}, "with fragments, the weights .* are never all equal; leave fragm"),
    (
        "diloco",
        {"overlap": 1},
        "with overlap, the weights .* are never all equal; leave overlap out",
    ),
    ("gossip", {}, "each replica has weights of its own, of which its neighbours have a part"),
    ("elastic-averaging", {}, "each replica has weights of its own, towards which the centre"),
    ("compressed", {"method": "topk"}, "method topk keeps .*; fp16 and bf16 keep nothing"),
    ("compressed", {"method": "powersgd"}, "method powersgd keeps on each replica what it has not"),
    ("parameter-server", {}, "only the parameter server has the weights"),
    ("sharded", {}, "each replica has a shard of the optimizer state that no other has"),
    ("sharded", {"stage": 3}, "each replica has a shard of the weights and their optimizer state"),
    ("sharded", {"hybrid": True}, "each host has every shard once"),
    ("pipeline", {}, "the processes of a replica each have a stage of the model"),
    ("tensor", {}, "the processes of a replica each have a part of its layers"),
]
"""Strategies, their options, and the reason why the others cannot go on."""


def test_every_strategy_goes_on_or_is_refused() -> None:
    names = PluginManager(entry_points=False).strategies.names()
    refused = {name for name, _, _ in REFUSED}
    assert set(names) == refused | {"data-parallel", "hierarchical", "compressed", "local-sgd"}


@pytest.mark.parametrize(
    ("changes", "backend", "error", "text"),
    [
        ({"elastic": {"min": 5}}, "reference", PlanError, "elastic.min: expected at most the 4"),
        *(
            (
                {"strategy": {"name": name, "options": options}},
                "torch-ddp",
                UnsupportedError,
                f"elastic: strategy '{name}': {text}.* Use data-parallel. Or leave elastic out",
            )
            for name, options, text in REFUSED
        ),
        ({}, "tf-multiworker", UnsupportedError, "cannot change its cluster in a living process"),
        ({}, "tf-mirrored", UnsupportedError, "elastic: backend 'tf-mirrored'"),
        (
            {"global_batch_size": None, "local_batch_size": 3},
            "reference",
            SpecError,
            "global_batch_size with elastic",
        ),
        (
            {"elastic": {"min": 2, "max": 3}},
            "reference",
            PlanError,
            "elastic.max: expected at least the 4",
        ),
        (
            {"elastic": {"min": 3, "max": 2}},
            "reference",
            SpecError,
            "elastic.max: got 2; expected at least 3, as min",
        ),
        (
            {"elastic": {"min": 1, "max": 8}, "reproducible": {"granularity": 4}},
            "reference",
            PlanError,
            "reproducible: 8 replicas",
        ),
    ],
)
def test_what_cannot_go_on_is_refused(
    changes: dict[str, Any], backend: str, error: type[Exception], text: str
) -> None:
    models = {"numpy": elastic_runs.model, "torch": native, "tensorflow": portable}
    fields = spec(model=models, **changes)
    present = {name: value for name, value in fields.items() if value is not None}
    with pytest.raises(error, match=text):
        isotrain.plan(present, backend=backend, replicas=REPLICAS)
