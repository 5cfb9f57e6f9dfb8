"""Steps whose loss or gradients are not finite are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.session_specs import spec

import isotrain
from isotrain.testing.reference.layers import BatchNormalization, Dense
from isotrain.testing.reference.network import Network

pytestmark = pytest.mark.usefixtures("reference")


def normalised() -> Network:
    return Network([Dense(3, 5, name="first"), BatchNormalization(5), Dense(5, 1, name="last")])


def broken_in_two_of_three_steps() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    features, targets = generator.standard_normal((12, 3)), generator.standard_normal((12, 1))
    features[5], targets[9] = np.nan, np.inf
    return features, targets


def all_broken() -> tuple[np.ndarray, np.ndarray]:
    return np.full((12, 3), np.nan), np.zeros((12, 1))


def skipping(**fields: Any) -> dict[str, Any]:
    return spec(
        **{
            "model": normalised,
            "data": broken_in_two_of_three_steps,
            "on_nan": "skip",
            "shuffle": False,
            **fields,
        }
    )


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_skipped_step_changes_nothing() -> None:
    with isotrain.open_session(skipping(), backend="reference") as session:
        batches = session.batches()
        session.step(next(batches))
        before = session.read_state()
        for count in (1, 2):
            with pytest.warns(UserWarning, match=f"step {count} is skipped"):
                session.step(next(batches))
            assert session.skipped_steps == count
        after = session.read_state()
        session.step(next(batches))
        trained = session.read_state()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], value) for name, value in after.items())
    assert all(np.isfinite(value).all() for value in trained.values())
    assert not np.array_equal(trained["first/kernel"], after["first/kernel"])


def test_they_are_recorded_and_counted_over_a_resume(tmp_path: Path) -> None:
    def run(folder: str, **changes: Any) -> isotrain.RunResult:
        return isotrain.run(
            skipping(checkpoint={"every_steps": 1}, **changes),
            backend="reference",
            replicas=2,
            run_directory=tmp_path / folder,
            on_event=lambda event: None,
            resume="auto",
        )

    whole = run("whole")
    run("parts", epochs=None, steps=5)
    resumed = run("parts")
    finite = np.isfinite(whole.history.loss)
    assert finite.tolist() == [True, False, False] * 3
    np.testing.assert_array_equal(whole.history.loss, resumed.history.loss)
    assert all(np.array_equal(resumed.weights[n], value) for n, value in whole.weights.items())
    lines = (tmp_path / "whole" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    assert len([each for each in events if "is skipped" in each.get("text", "")]) == 6
    losses = [each["loss"] for each in events if each["event"] == "epoch"]
    assert losses == [
        loss for loss, is_finite in zip(whole.history.loss, finite, strict=True) if is_finite
    ]


@pytest.mark.filterwarnings("ignore:step .* is skipped")
def test_ten_in_a_row_end_the_run() -> None:
    with isotrain.open_session(skipping(data=all_broken, epochs=5), backend="reference") as session:
        batches = session.batches()
        for _ in range(9):
            session.step(next(batches))
        with pytest.raises(isotrain.NotANumberError, match="step 9 is the last of 10 in a row"):
            session.step(next(batches))


def test_strategies_with_steps_of_their_own_refuse_it() -> None:
    with pytest.raises(isotrain.UnsupportedError, match=r"on_nan: skip.*'local-sgd'"):
        isotrain.plan(
            skipping(strategy={"name": "local-sgd", "options": {"every": 2}}),
            backend="reference",
            replicas=2,
        )


def test_it_is_refused_with_a_loss_scale() -> None:
    with pytest.raises(isotrain.SpecError, match=r"on_nan.*float16"):
        isotrain.load_spec(skipping(precision="float16"))
