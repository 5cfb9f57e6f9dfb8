"""The programs that people know from keras.io and torch train: all in the processes of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.spec.loading import load_spec
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, next_session

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "familiar"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def specs() -> dict[str, isotrain.TrainingSpec]:
    return {name: load_spec(f"{FOLDER / name}.py:spec") for name in NAMES}


def losses(session: isotrain.Session) -> list[float]:
    found = [float(session.step(batch)) for batch in session.batches()]
    if session.can_evaluate:
        session.evaluate()
    session.metrics()
    return found


def one_after_the_other(given: dict[str, isotrain.TrainingSpec]) -> Any:
    def work(session: isotrain.Session) -> dict[str, list[float]]:
        found = {}
        for name, spec in given.items():
            with next_session(session, name, spec) as session:
                found[name] = losses(session)
        return found

    return work


@pytest.mark.slow
def test_familiar_examples_train(tmp_path: Path) -> None:
    given = specs()
    first = given["forecaster"].replace(timeouts=LONG_TIMEOUTS)
    found = isotrain.launch(
        one_after_the_other(given),
        first,
        backend="torch-ddp",
        replicas=2,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )[0]
    assert len(found) == 8
    for name, curve in found.items():
        assert np.isfinite(curve).all(), name
        assert np.mean(curve[-3:]) < 0.95 * np.mean(curve[:3]), name


@pytest.mark.parametrize("name", NAMES)
def test_each_example_says_how_to_run_it(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert f"isotrain run examples/familiar/{name}.py:spec --backend " in text
