"""`on_event` that returns `stop`: the run ends well after the same step on every process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from integration.session_specs import samples, spec

import isotrain

pytestmark = pytest.mark.usefixtures("reference")
MANY = 2000


def data() -> isotrain.DataSet:
    return isotrain.DataSet(samples(), samples())


class Slow(isotrain.Callback):
    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        time.sleep(0.02)


def stop_at_once(event: Mapping[str, Any]) -> str | None:
    return "stop" if event["event"] == "progress" else None


def run(folder: Path, backend: str, replicas: int, **options: Any) -> Any:
    fields = spec(
        data=data,
        global_batch_size=12,
        epochs=MANY,
        callbacks=[Slow()],
        checkpoint={"every_epochs": MANY},
        evaluation={"every_epochs": MANY},
    )
    options = {"on_event": stop_at_once, **options}
    return isotrain.run(fields, backend=backend, replicas=replicas, output=folder, **options)


@pytest.mark.parametrize(
    ("backend", "replicas"),
    [
        ("reference", 1),
        ("reference", 2),
        pytest.param("torch-ddp", 2, marks=[pytest.mark.slow, pytest.mark.failures]),
    ],
)
def test_a_run_stops_well_and_can_be_resumed(tmp_path: Path, backend: str, replicas: int) -> None:
    result = run(tmp_path / "run", backend, replicas)
    steps = len(result.history.loss)
    assert result.stopped_early
    assert 1 <= steps < MANY
    assert "validation_loss" in result.metrics
    assert isotrain.read_result(tmp_path / "run").stopped_early
    longer = spec(
        data=data, global_batch_size=12, epochs=steps + 2, checkpoint={"every_epochs": MANY}
    )
    resumed = isotrain.resume(tmp_path / "run", spec=longer, on_event=lambda event: "go on")
    assert len(resumed.history.loss) == steps + 2
    assert not resumed.stopped_early


def own_loop(session: isotrain.Session) -> list[int]:
    """Takes all steps; returns their number, and whether the session says that none is left."""
    for batch in session.batches():
        session.step(batch)
        time.sleep(0.02)
    return [session.steps_done, int(session.is_done)]


def test_a_loop_of_your_own_stops_after_the_same_step(tmp_path: Path) -> None:
    returned = isotrain.launch(
        own_loop,
        spec(data=data, global_batch_size=12, epochs=MANY),
        backend="reference",
        replicas=2,
        output=tmp_path / "run",
        on_event=stop_at_once,
    )
    assert returned[0] == returned[1]
    assert returned[0][0] < MANY
    assert returned[0][1]
