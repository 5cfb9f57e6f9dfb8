"""Elastic runs with local steps: the others go back to the last averaging, and go on from there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from integration import elastic_runs
from integration.elastic_runs import (
    EPOCHS,
    STEPS,
    Kills,
    WaitsForNewcomer,
    changes_of,
    native,
    portable,
    run,
)

import isotrain
from isotrain.core.errors import RunFailedError, UnsupportedError

pytestmark = pytest.mark.usefixtures("reference", "no_processes_left")

for module in (sys.modules[__name__], elastic_runs):
    cloudpickle.register_pickle_by_value(module)

SGD = {"name": "sgd", "lr": 0.0625}
"""An optimizer without momenta: a resumed run has their mean, and an elastic one those of a replica."""
LOCAL_SGD = {"name": "local-sgd", "options": {"every": 3}}
DILOCO = {"name": "diloco", "options": {"every": 3}}


def in_parts(folder: Path, parts: list[tuple[int, int]], **changes: Any) -> isotrain.RunResult:
    """The result of runs that are resumed from each other: replicas of each, and step in which it ends."""
    resume = None
    for index, (replicas, end) in enumerate(parts):
        length = {"epochs": EPOCHS} if end == STEPS else {"epochs": None, "steps": end}
        result, _ = run(
            folder / str(index),
            replicas,
            resume=resume,
            **{"optimizer": SGD, **changes, **length},
            elastic=None,
            checkpoint={"every_steps": end},
        )
        resume = folder / str(index)
    return result


def assert_goes_on_as(found: isotrain.RunResult, expected: isotrain.RunResult) -> None:
    """Every step has one loss; those of the last part and the weights are equal to rounding."""
    assert len(found.history.loss) == STEPS
    last = expected.history.loss
    np.testing.assert_allclose(found.history.loss[-len(last) :], last, rtol=0, atol=1e-12)
    assert [each["epoch"] for each in found.history.epochs] == list(range(EPOCHS))
    for name, array in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], array, rtol=0, atol=1e-11, err_msg=name)


KILLS = Kills(between={1: 7, 0: 10})
PARTS = [(4, 6), (3, 9), (2, STEPS)]


@pytest.mark.parametrize(
    "strategy",
    [
        LOCAL_SGD,
        {"name": "local-sgd", "options": {"every": 3, "start": 3}},
        DILOCO,
        {"name": "diloco", "options": {"every": 3, "bits": 8}},
    ],
    ids=["local-sgd", "late local-sgd", "diloco", "diloco in 8 bits"],
)
def test_the_others_go_back_to_the_last_averaging(strategy: dict[str, Any], tmp_path: Path) -> None:
    changes = {"strategy": strategy}
    expected = in_parts(tmp_path / "parts", PARTS, **changes)
    result, events = run(tmp_path / "run", 4, **changes, optimizer=SGD, callbacks=[KILLS])
    assert [each["done"] for each in changes_of(events)] == [6, 9]
    assert_goes_on_as(result, expected)


def test_averaging_after_each_step_is_as_synchronous_steps(tmp_path: Path) -> None:
    """Rank 0 is lost when the first of the others has the mean, and the last does not."""
    changes = {"strategy": {"name": "local-sgd", "options": {"every": 1}}, "optimizer": SGD}
    whole, _ = run(tmp_path / "whole", 4, **changes, elastic=None)
    result, events = run(tmp_path / "run", 4, **changes, callbacks=[Kills(sending={0: 7})])
    assert [each["done"] for each in changes_of(events)] == [8]
    assert_goes_on_as(result, whole)


@pytest.mark.parametrize("evaluated", [4, 9])
def test_one_is_lost_in_an_evaluation(evaluated: int, tmp_path: Path) -> None:
    """After step 4, between two averagings, and after step 9, also at the end of an epoch."""
    kills = Kills(evaluating={0: evaluated})
    end = (evaluated + 1) // 3 * 3
    changes = {"strategy": DILOCO}
    expected = in_parts(tmp_path / "parts", [(4, end), (3, STEPS)], **changes)
    result, events = run(tmp_path / "run", 4, **changes, optimizer=SGD, callbacks=[kills])
    assert [each["done"] for each in changes_of(events)] == [end]
    assert_goes_on_as(result, expected)


def test_a_newcomer_joins_after_an_averaging(tmp_path: Path) -> None:
    """It is let in after step 5, although it waits from step 3 on."""
    changes = {"strategy": DILOCO}
    expected = in_parts(tmp_path / "parts", [(4, 3), (3, 6), (4, STEPS)], **changes)
    kills = Kills(between={1: 3})
    waits = WaitsForNewcomer(4, tmp_path / "reached")
    elastic = {"min": 1, "replacements": 1}
    changes |= {"callbacks": [kills, waits], "data": waits.data, "elastic": elastic}
    result, events = run(tmp_path / "run", 4, **changes, optimizer=SGD)
    assert [each["done"] for each in changes_of(events)] == [3, 6]
    assert_goes_on_as(result, expected)


def test_a_run_resumed_between_averagings_fails_before_the_next(tmp_path: Path) -> None:
    """The replicas' weights differ in the checkpoint after 7 steps; they are averaged after 9."""
    changes = {"strategy": LOCAL_SGD, "optimizer": SGD}
    first, ends = tmp_path / "first", Kills(between={0: 12})
    with pytest.raises(RunFailedError):
        run(
            first,
            4,
            **changes,
            checkpoint={"every_steps": 7, "background": False},
            callbacks=[ends],
            elastic=None,
        )
    with pytest.raises(RunFailedError, match="weights differ") as caught:
        run(tmp_path / "run", 4, resume=first, **changes, callbacks=[Kills(between={1: 7})])
    assert "SIGKILL" in str(caught.value)
    result, events = run(
        tmp_path / "later", 4, resume=first, **changes, callbacks=[Kills(between={1: 10})]
    )
    assert [each["done"] for each in changes_of(events)] == [9]
    assert np.isfinite(result.final_loss)


def test_a_run_resumed_at_an_averaging_goes_on_from_there(tmp_path: Path) -> None:
    changes = {"strategy": DILOCO}
    expected = in_parts(tmp_path / "parts", [(4, 6), (3, STEPS)], **changes)
    kills = Kills(between={1: 6})
    first = tmp_path / "parts" / "0"
    result, events = run(
        tmp_path / "run", 4, resume=first, **changes, optimizer=SGD, callbacks=[kills]
    )
    assert [each["done"] for each in changes_of(events)] == [6]
    for name, array in expected.weights.items():
        np.testing.assert_allclose(result.weights[name], array, rtol=0, atol=1e-11, err_msg=name)


class Stops:
    """Callback that ends training after step 7."""

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if batch.step == 7:
            session.stop()


def test_one_is_lost_once_training_has_ended(tmp_path: Path) -> None:
    """The weights were averaged when it ended, and no step is taken again."""
    changes = {"strategy": DILOCO, "optimizer": SGD}
    whole, _ = run(tmp_path / "whole", 4, **changes, callbacks=[Stops()], elastic=None)
    kills = Kills(evaluating={1: 7})
    result, events = run(tmp_path / "run", 4, **changes, callbacks=[Stops(), kills])
    assert [each["done"] for each in changes_of(events)] == [8]
    assert len(result.history.loss) == 8
    for name, array in whole.weights.items():
        np.testing.assert_allclose(result.weights[name], array, rtol=0, atol=1e-11, err_msg=name)


def test_an_average_of_weights_is_refused_if_more_replicas_may_join(tmp_path: Path) -> None:
    fields = {"strategy": LOCAL_SGD, "ema": 0.9, "elastic": {"min": 1, "max": 2}}
    with pytest.raises(UnsupportedError, match=r"ema: .* each replica trains weights of its own"):
        run(tmp_path / "run", 1, **fields)


@pytest.mark.slow
@pytest.mark.failures
@pytest.mark.parametrize(
    ("backend", "model", "strategy", "lost_after", "done"),
    [
        ("torch-ddp", {"torch": native}, LOCAL_SGD, 7, 6),
        ("torch-ddp", portable, DILOCO, 8, 9),
        ("horovod-torch", {"torch": native}, DILOCO, 7, 6),
        ("horovod-tf", portable, DILOCO, 7, 6),
    ],
    ids=["torch-ddp, local-sgd", "torch-ddp", "horovod-torch", "horovod-tf"],
)
def test_the_others_go_back_on_other_backends(
    backend: str, model: Any, strategy: dict[str, Any], lost_after: int, done: int, tmp_path: Path
) -> None:
    changes = {"backend": backend, "model": model, "strategy": strategy}
    expected = in_parts(tmp_path / "parts", [(3, done), (2, STEPS)], **changes)
    kills = Kills(between={1: lost_after})
    result, events = run(tmp_path / "run", 3, **changes, optimizer=SGD, callbacks=[kills])
    assert [each["done"] for each in changes_of(events)] == [done]
    assert_goes_on_as(result, expected)
