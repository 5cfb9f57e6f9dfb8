"""Streams of torchdata and Grain go on by their own state, and are not read from their beginning."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration import third_party_streams

import isotrain
from isotrain.testing.consecutive_sessions import next_session
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

pytestmark = [pytest.mark.usefixtures("reference"), pytest.mark.slow]

STEPS, SAVED_AFTER, GLOBAL_BATCH = 17, 7, 7


def network() -> Network:
    return Network([Dense(4, 3, name="head")])


def spec(data: Any, file: Path, workers: int) -> dict[str, Any]:
    return {
        "model": {"reference": network},
        "data": data,
        "data_args": {"file": str(file), "workers": workers},
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.125},
        "precision": "float64",
        "global_batch_size": GLOBAL_BATCH,
        "steps": STEPS,
        "checkpoint": {},
        "threads": 1,
    }


def trained(session: isotrain.Session, folder: Path) -> list[float]:
    """The losses of all steps that are left; saves after some."""
    losses = []
    for batch in session.batches():
        losses.append(float(session.group.numpy(session.step(batch))))
        if session.steps_done == SAVED_AFTER:
            session.save(folder)
    return losses


def whole_and_rest(session: isotrain.Session, given: dict[str, Any], folder: Path) -> Any:
    """The losses of a run, and of one that goes on from its checkpoint with a stream made anew."""
    file = Path(given["data_args"]["file"])
    whole = trained(session, folder)
    file.unlink()
    with next_session(session, "rest", given) as again:
        again.restore(folder)
        rest = trained(again, folder)
    return whole, rest, len(file.read_text().split())


@pytest.mark.parametrize(
    ("package", "data", "workers"),
    [
        ("torchdata", third_party_streams.of_torchdata, 0),
        ("torchdata", third_party_streams.of_torchdata, 2),
        ("grain", third_party_streams.of_grain, 1),
    ],
    ids=["torchdata", "torchdata's workers", "grain"],
)
def test_a_stream_resumes_from_its_state(
    package: str, data: Any, workers: int, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, which `make environment` does")
    given = spec(data, tmp_path / "read", workers)
    work = functools.partial(whole_and_rest, given=given, folder=tmp_path / "saved")
    ((whole, rest, read),) = isotrain.launch(
        work,
        given,
        backend="reference",
        replicas=1,
        run_directory=tmp_path / "run",
        on_event=lambda event: None,
    )
    assert rest == whole[SAVED_AFTER:]
    assert len(set(np.round(whole, 12))) == STEPS
    assert read < STEPS * GLOBAL_BATCH
