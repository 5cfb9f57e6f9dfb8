"""Callbacks of the built-in loop: the same calls on all processes; errors name the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integration.session_specs import samples, spec

import isotrain
from isotrain.core.errors import IsotrainError, RunFailedError
from isotrain.core.results.result import RunResult

pytestmark = pytest.mark.usefixtures("reference")


def data() -> isotrain.DataSet:
    return isotrain.DataSet(samples(), samples())


class Recorder(isotrain.Callback):
    """Writes a line for each call into a file of its process."""

    def __init__(self, name: str = "main") -> None:
        self.name = name

    def write(self, session: isotrain.Session, *facts: Any) -> None:
        with (session.run_directory / f"calls-{session.rank}.txt").open("a") as calls:
            print(self.name, *facts, file=calls)

    def on_start(self, session: isotrain.Session) -> None:
        self.write(session, "start", session.steps_done)

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        assert float(loss) == session.last_loss
        self.write(session, "step", batch.step)

    def on_evaluation(self, session: isotrain.Session, metrics: Any) -> None:
        assert list(metrics) == ["validation_loss"]
        self.write(session, "evaluation", session.steps_done)

    def on_epoch(self, session: isotrain.Session, epoch: int, metrics: Any) -> None:
        assert "validation_loss" in metrics
        self.write(session, "epoch", epoch)

    def on_checkpoint(self, session: isotrain.Session) -> None:
        self.write(session, "checkpoint", session.steps_done)

    def on_end(self, session: isotrain.Session, metrics: Any) -> None:
        self.write(session, "end", *metrics)


class StopsAfterTwo:
    """No subclass: an object with one of the methods."""

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if batch.step == 1:
            session.stop()


def run(folder: Path, callbacks: Any, **fields: Any) -> RunResult:
    return isotrain.run(
        spec(callbacks=callbacks, **{"data": data, "epochs": 2, **fields}),
        backend="reference",
        replicas=2,
        output=folder / "run",
        on_event=lambda event: None,
    )


def calls(folder: Path, rank: int) -> list[str]:
    return (folder / "run" / f"calls-{rank}.txt").read_text().splitlines()


def test_every_process_makes_the_same_calls_in_order(tmp_path: Path) -> None:
    run(tmp_path, Recorder, evaluation={"at_start": True}, checkpoint={"every_epochs": 1})
    expected = ["start 0", "evaluation 0"]
    for epoch in range(2):
        done = 3 * (epoch + 1)
        expected += [f"step {step}" for step in range(done - 3, done)]
        expected += [f"evaluation {done}", f"epoch {epoch}", f"checkpoint {done}"]
    expected.append("end validation_loss")
    for rank in range(2):
        assert calls(tmp_path, rank) == [f"main {call}" for call in expected]


def test_several_are_called_in_their_order_and_may_stop_the_run(tmp_path: Path) -> None:
    result = run(tmp_path, [Recorder("first"), StopsAfterTwo, lambda: Recorder("last")])
    assert len(result.history.loss) == 2
    assert [each for each in calls(tmp_path, 1) if "step" in each] == [
        f"{name} step {step}" for step in range(2) for name in ("first", "last")
    ]


PLUGIN = """\
import isotrain

class Counts(isotrain.Callback):
    def on_end(self, session, metrics):
        (session.run_directory / f"counted-{session.rank}").write_text(str(session.steps_done))

@isotrain.hookimpl
def isotrain_register_callbacks(register):
    register.add(Counts, name="counts")
"""


def test_a_plugin_registers_them_by_name(tmp_path: Path) -> None:
    plugin = tmp_path / "counting.py"
    plugin.write_text(PLUGIN)
    run(tmp_path, [Recorder, "counts"], plugins=[str(plugin)])
    assert [(tmp_path / "run" / f"counted-{rank}").read_text() for rank in range(2)] == ["6", "6"]
    with pytest.raises(IsotrainError, match=r"unknown callback 'count'\. Did you mean 'counts'"):
        run(tmp_path / "other", "count", plugins=[str(plugin)])


class Fails:
    def on_epoch(self, session: isotrain.Session, epoch: int, metrics: Any) -> None:
        raise ValueError("no room left")


class Misspelled:
    def on_epochs(self) -> None: ...


class Empty: ...


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Fails, r"no room left\n?.*raised by the callback Fails.on_epoch"),
        (Misspelled, "Misspelled: unknown method 'on_epochs'. Did you mean 'on_epoch'"),
        (Empty, "Empty: expected a method of on_start, .*it has none"),
    ],
)
def test_a_failing_or_wrong_callback_is_named(tmp_path: Path, callback: Any, message: str) -> None:
    with pytest.raises(RunFailedError, match=message):
        run(tmp_path, callback)


def test_a_resumed_run_starts_its_callbacks_anew(tmp_path: Path) -> None:
    run(tmp_path, Recorder(), checkpoint={"every_epochs": 1})
    longer = spec(
        callbacks=Recorder("resumed"), data=data, epochs=3, checkpoint={"every_epochs": 1}
    )
    isotrain.resume(tmp_path / "run", spec=longer, on_event=lambda event: None)
    resumed = [each for each in calls(tmp_path, 0) if each.startswith("resumed")]
    assert resumed[:2] == ["resumed start 6", "resumed step 6"]
