"""Steps whose loss or gradients are not finite are left out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.session_specs import launch, net, samples, spec

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


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:step .* is skipped")
def test_gradients_of_a_loop_that_are_not_applied_leave_no_statistics() -> None:
    with isotrain.open_session(skipping(), backend="reference") as session:
        batches = session.batches()
        session.step(next(batches))
        before = session.read_state()
        batch = next(batches)
        for _ in range(2):
            gradients, loss = session.gradients(batch)
        session.apply_gradients(batch, gradients, loss)
        assert session.skipped_steps == 1
        after = session.read_state()
    assert all(np.array_equal(before[name], value) for name, value in after.items())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:step .* is skipped")
def test_averages_of_weights_take_no_skipped_step() -> None:
    with isotrain.open_session(skipping(ema=0.5), backend="reference") as session:
        averages = []
        for batch in session.batches():
            session.step(batch)
            with session.averaged():
                averages.append(session.read_state(["trainable"])["last/kernel"])
    moved = [not np.array_equal(a, b) for a, b in itertools.pairwise(averages)]
    assert moved == [False, False, True] * 2 + [False, False]


def recurrent() -> Any:
    """A linear layer that keeps its last output, where Python has no attribute before the first call."""
    import torch

    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(3, 1)
            self.outputs: Any = None
            self.calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            before = 0.0 if self.outputs is None else self.outputs.mean()
            outputs = self.last(inputs) + before
            self.outputs = outputs.detach()
            self.calls += 1
            return outputs

    return Recurrent()


def broken_first() -> tuple[np.ndarray, np.ndarray]:
    features, targets = np.ones((12, 3)), np.ones((12, 1))
    features[1] = np.nan
    return features, targets


def steps_of_a_recurrent_model(session: isotrain.Session) -> list[Any]:
    calls = []
    for batch in session.batches():
        session.step(batch)
        calls.append(session.model.calls)
    return [session.skipped_steps, session.last_loss, calls, session.metrics()]


@pytest.mark.filterwarnings("ignore:step .* is skipped")
def test_state_that_a_skipped_step_creates_is_removed(tmp_path: Path) -> None:
    fields = {"model": {"torch": recurrent}, "metrics": ["mean_squared_error"], "epochs": 1}
    program = skipping(data=broken_first, **fields)
    skipped, loss, calls, metrics = launch(
        steps_of_a_recurrent_model, tmp_path, 1, "torch-ddp", **program
    )
    assert (skipped, calls) == (1, [0, 1, 2])
    assert np.isfinite([loss, *metrics.values()]).all()


def first_part(model: Any, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]) ** 2


def broken_part(model: Any, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]) ** 2 * float("nan")


def test_each_update_has_its_steps_in_a_row(tmp_path: Path) -> None:
    def trained(session: isotrain.Session) -> tuple[int, str]:
        try:
            for batch in session.batches():
                session.step(batch)
        except isotrain.NotANumberError as error:
            return session.skipped_steps, str(error)
        return session.skipped_steps, ""

    updates = {
        "good": {"objective": first_part, "weights": "*last*"},
        "bad": {"objective": broken_part, "weights": "*first*"},
    }
    program = skipping(model=net, data=samples, loss=None, updates=updates, epochs=5)
    skipped, error = launch(trained, tmp_path, 1, "torch-ddp", **program)
    assert skipped == 10
    assert error.startswith("update bad of step 9 is the last of 10 in a row")


def test_they_are_recorded_and_counted_over_a_resume(tmp_path: Path) -> None:
    def run(folder: str, **changes: Any) -> isotrain.RunResult:
        return isotrain.run(
            skipping(checkpoint={"every_steps": 1}, **changes),
            backend="reference",
            replicas=2,
            output=tmp_path / folder,
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
