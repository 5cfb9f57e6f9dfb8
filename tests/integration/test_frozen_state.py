"""Python state that a step of TensorFlow, traced once, freezes; and who is told of it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from helpers.isolated import run_isolated
from integration import captured_models as models

import isotrain

pytestmark = pytest.mark.features

SPEC: dict[str, Any] = {
    "model": models.dense,
    "data": models.data,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "optimizer": {"name": "sgd", "lr": 0.0625},
    "global_batch_size": models.BATCH,
    "steps": 2,
    "threads": 1,
}
CASES = {
    "nothing": ({}, ""),
    "random": ({"model": models.by_random}, "random numbers are drawn by random: "),
    "numpy": ({"model": models.by_numpy}, "random numbers are drawn by numpy.random: "),
    "attribute": ({"model": models.by_count}, "a call changes own (Own): calls: "),
    "metric": ({"metrics": [models.COUNTING]}, "a call changes Counting: calls: "),
    **{
        kind: ({"model": models.by_variable, "model_args": {"kind": kind}}, text)
        for kind, text in {
            "global": "a call changes by_variable.<locals>.call: TOTALS{calls}: ",
            "class": "a call changes Counted: total: ",
            "closure": "a call changes by_variable.<locals>.count: calls: ",
            "generator": "a call changes own (Own): draws: ",
            "iterator": "a call may advance own (Own): turns: ",
        }.items()
    },
}
"""Changes of the spec, and how the only warning begins; the first case gives none."""


def train_all(session: isotrain.Session) -> dict[str, tuple[list[str], list[str]]]:
    """Warnings of steps and an evaluation, and notes of a plan, by case."""
    session.close()
    found = {}
    for name, (changes, _) in CASES.items():
        with (
            warnings.catch_warnings(record=True) as warned,
            isotrain.open_session(SPEC | changes, backend="tf-mirrored", replicas=1) as trained,
        ):
            warnings.simplefilter("always")
            notes = trained.step_notes()
            for batch in trained.batches():
                trained.step(batch)
            trained.evaluate()
        said = [str(each.message) for each in warned if "traces a step once" in str(each.message)]
        found[name] = said, notes
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], list[str]]]:
    folder = tmp_path_factory.mktemp("frozen") / "run"
    return dict(run_isolated(train_all, SPEC, "tf-mirrored", folder))


@pytest.mark.parametrize("case", CASES)
def test_what_tensorflow_freezes_is_told_once(
    found: dict[str, tuple[list[str], list[str]]], case: str
) -> None:
    said, notes = found[case]
    begins = CASES[case][1]
    if not begins:
        assert not said
        assert not notes
        return
    (text,) = said
    assert text.startswith(begins)
    assert case == "metric" or notes == said


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_a_person_sees_the_warning(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {
        "torch-ddp": "training steps are not replayed, but computed by Keras",
        "tf-mirrored": "random numbers are drawn by random: TensorFlow traces a step once",
    }[backend]
    spec = SPEC | {"model": models.by_random}
    isotrain.run(spec, backend=backend, replicas=2, output=tmp_path / "run")
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count(f"warning: {text}") == 1
    lines = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    said = [event for event in map(json.loads, lines) if event["event"] == "warning"]
    assert any(event["text"].startswith(text) for event in said)
