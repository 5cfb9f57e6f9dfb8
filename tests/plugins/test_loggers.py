"""Loggers: what each writes, read back by the library it writes for; and what a bad one does to a run."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated

import isotrain
from isotrain.core.contracts.events import EpochEnded, Event, Ready, Scalars, Started, Steps
from isotrain.core.contracts.logger import Logger
from isotrain.core.errors import IsotrainError
from isotrain.core.loggers import writer_thread
from isotrain.core.loggers.csv import CsvLogger
from isotrain.core.loggers.dispatcher import EventDispatcher
from isotrain.core.loggers.jsonl import JsonLinesLogger
from isotrain.core.loggers.mlflow import MlflowLogger
from isotrain.core.loggers.tensorboard import TensorBoardLogger
from isotrain.core.loggers.wandb import WandbLogger
from isotrain.core.plugins.manager import PluginManager

PLAN = {"run": "digits", "backend": "any", "replicas": 2, "options": {}, "samples": None}
RESULT = {"final_loss": 0.25}
EVENTS: list[Event] = [
    Started(pid=1),
    Ready(),
    Ready(plan={**PLAN, "samples": 300}),
    Steps(first=0, losses=[2.0, 1.5], learning_rates=[0.5, 0.25]),
    EpochEnded(epoch=0, done=2, loss=1.5, metrics={"accuracy": 0.5}),
    Steps(first=2, losses=[300.0], learning_rates=[0.125]),
    Scalars(steps=[2, 2], values=[{"kl": 0.5}, {"norm": 4.0}]),
    EpochEnded(epoch=1, done=3, loss=300.0, metrics={"accuracy": 0.75, "validation_loss": 4}),
]


def run(folder: Path, *loggers: Logger, error: Exception | None = None) -> None:
    """Lets loggers hear of a run of two epochs that ends well, or with `error`."""
    host = PluginManager(entry_points=False)
    with (
        contextlib.suppress(*([] if error is None else [type(error)])),
        EventDispatcher(host, loggers, PLAN, folder) as listening,
    ):
        for event in EVENTS:
            listening.dispatch(event)
        listening.result = RESULT
        if error is not None:
            raise error


class Noting(Logger):
    """Notes every call."""

    name = "noting"
    summary = "notes"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        calls = "started", "steps_done", "scalars_logged", "epoch_ended", "failed", "finished"
        if name in calls:
            return lambda *facts: self._note(name, *facts)
        return super().__getattribute__(name)

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())


def test_calls_come_in_order_on_one_other_thread(tmp_path: Path) -> None:
    logger = Noting()
    run(tmp_path, logger)
    assert [call[0] for call in logger.calls] == [
        *("started", "steps_done", "epoch_ended", "steps_done", "scalars_logged", "epoch_ended"),
        "finished",
    ]
    assert logger.calls[0][1:] == ({**PLAN, "samples": 300}, tmp_path)
    assert logger.calls[4][1:] == ([(2, {"kl": 0.5}), (2, {"norm": 4.0})],)
    assert logger.calls[-1] == ("finished", RESULT)
    assert len(logger.threads) == 1
    assert threading.get_ident() not in logger.threads


def test_a_failure_before_the_first_event_is_reported(tmp_path: Path) -> None:
    logger = Noting()
    with (
        pytest.raises(ValueError, match="no data"),
        EventDispatcher(PluginManager(entry_points=False), [logger], PLAN, tmp_path),
    ):
        raise ValueError("no data")
    assert logger.calls == [("started", PLAN, tmp_path), ("failed", "no data")]


class Raising(Logger):
    name = "raising"
    summary = "raises"

    def epoch_ended(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        raise OSError("no room left")


class Hanging(Logger):
    name = "hanging"
    summary = "hangs"
    go_on = threading.Event()

    def finished(self, result: Mapping[str, Any] | None) -> None:
        self.go_on.wait()


def test_a_failing_or_hanging_logger_is_named_and_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_thread, "CLOSE_TIMEOUT_SECONDS", 1.0)
    good = Noting()
    with pytest.warns(UserWarning, match="logger") as warned:
        run(tmp_path, Raising(), Hanging(), good)
    Hanging.go_on.set()
    said = sorted(str(warning.message) for warning in warned)
    assert said[0].startswith("logger 'hanging': it has not finished within 1 s")
    assert said[1].startswith("logger 'raising': epoch_ended: OSError: no room left.")
    assert good.calls[-1][0] == "finished"


class Slow(Noting):
    """Is told of nothing more before it may go on."""

    name = "slow"

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def _note(self, *call: Any) -> None:
        assert self.go_on.wait(60)
        super()._note(*call)


def test_few_steps_wait_for_a_slow_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_thread, "MAX_QUEUED_STEPS", 10)
    logger, told = Slow(), [0.5] * 4

    def run_past_it() -> None:
        with EventDispatcher(
            PluginManager(entry_points=False), [logger], PLAN, tmp_path
        ) as listening:
            listening.dispatch(Ready(plan=PLAN))
            for first in range(0, 4 * 998, 4):
                listening.dispatch(Steps(first=first, losses=told, learning_rates=told))
            listening.dispatch(EpochEnded(epoch=0, done=3992, loss=0.5, metrics={}))
            logger.go_on.set()

    with pytest.warns(UserWarning, match="'slow': it was too slow: 10 .* and 3984 were dropped"):
        run_past_it()
    steps = [("steps_done", first, told, told) for first in (0, 4)]
    ended = ("epoch_ended", 0, 3992, {"loss": 0.5})
    assert logger.calls[1:] == [*steps, ended, ("finished", None)]


def test_csv(tmp_path: Path) -> None:
    run(tmp_path, CsvLogger())
    with (tmp_path / "steps.csv").open(newline="") as stream:
        assert list(csv.reader(stream)) == [
            ["step", "loss", "learning_rate"],
            *(["0", "2.0", "0.5"], ["1", "1.5", "0.25"], ["2", "300.0", "0.125"]),
        ]
    with (tmp_path / "scalars.csv").open(newline="") as stream:
        assert list(csv.reader(stream)) == [
            ["step", "name", "value"],
            *(["2", "kl", "0.5"], ["2", "norm", "4.0"]),
        ]
    with (tmp_path / "epochs.csv").open(newline="") as stream:
        assert list(csv.DictReader(stream)) == [
            {"epoch": "0", "step": "2", "loss": "1.5", "accuracy": "0.5", "validation_loss": ""},
            {
                "epoch": "1",
                "step": "3",
                "loss": "300.0",
                "accuracy": "0.75",
                "validation_loss": "4",
            },
        ]


def test_json_lines(tmp_path: Path) -> None:
    run(tmp_path, JsonLinesLogger())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[1] == {"step": 1, "loss": 1.5, "learning_rate": 0.25}
    assert lines[2] == {"epoch": 0, "step": 2, "loss": 1.5, "accuracy": 0.5}
    assert lines[4:6] == [{"step": 2, "kl": 0.5}, {"step": 2, "norm": 4.0}]
    assert len(lines) == 7


def steps_and_epoch(logger: Logger, first: int, epoch: int) -> None:
    logger.steps_done(first, [1.0 + epoch, 2.0 + epoch], [0.5, 0.25])
    logger.scalars_logged([(first, {"kl": 1.0}), (first + 1, {"kl": 2.0, "norm": 3.0})])
    logger.scalars_logged([(first + 2, {"validation_loss": 4.0})])
    logger.epoch_ended(epoch, first + 2, {"accuracy": epoch / 4})


def test_a_resumed_run_appends_to_its_files(tmp_path: Path) -> None:
    for kind in (CsvLogger, JsonLinesLogger):
        for name, resumes in (("whole", False), ("resumed", True)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            logger: Logger = kind()
            logger.started({"run": "digits"}, folder)
            steps_and_epoch(logger, 0, 0)
            if resumes:
                logger.steps_done(2, [9.0], [9.0])
                logger.scalars_logged([(2, {"kl": 9.0}), (3, {"validation_loss": 9.0})])
                logger = kind()
                logger.started({"run": "digits"}, folder)
                logger.resumed(2)
            steps_and_epoch(logger, 2, 1)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == ["epochs.csv", "metrics.jsonl", "scalars.csv", "steps.csv"]
    for file in files:
        assert (tmp_path / "resumed" / file).read_text() == (tmp_path / "whole" / file).read_text()


def affine() -> Any:
    """A model of TensorFlow, for a session in a process that has imported it."""
    import tensorflow as tf

    class Affine(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable([[1.0]])

        def __call__(self, inputs: Any) -> Any:
            return inputs @ self.weight

    return Affine()


WITH_TENSORFLOW: dict[str, Any] = {
    "model": {"tensorflow": affine},
    "data": (np.ones((2, 1), "float32"), np.ones((2, 1), "float32")),
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": 0.5},
    "global_batch_size": 2,
    "steps": 1,
    "threads": 1,
}


def read_by_tensorflow(session: isotrain.Session, file: str) -> list[list[Any]]:
    """The version of the format and the values, as TensorFlow reads a file of events."""
    import tensorflow as tf

    events = list(tf.compat.v1.train.summary_iterator(file))
    assert all(event.wall_time > 1e9 for event in events)
    versions = [[event.file_version] for event in events if event.file_version]
    values = [[event.step, v.tag, v.simple_value] for event in events for v in event.summary.value]
    return versions + values


@pytest.mark.features
def test_tensorboard_as_tensorflow_reads_it(tmp_path: Path) -> None:
    run(tmp_path, TensorBoardLogger(str(tmp_path / "board")))
    (file,) = (tmp_path / "board").iterdir()
    assert ".tfevents." in file.name
    read = functools.partial(read_by_tensorflow, file=str(file))
    assert run_isolated(read, WITH_TENSORFLOW, "tf-mirrored", tmp_path / "run") == [
        ["brain.Event:2"],
        *([0, "loss", 2.0], [0, "learning_rate", 0.5]),
        *([1, "loss", 1.5], [1, "learning_rate", 0.25]),
        *([2, "epoch", 0.0], [2, "epoch/loss", 1.5], [2, "epoch/accuracy", 0.5]),
        *([2, "loss", 300.0], [2, "learning_rate", 0.125]),
        *([2, "kl", 0.5], [2, "norm", 4.0]),
        *(
            [3, "epoch", 1.0],
            [3, "epoch/loss", 300.0],
            [3, "epoch/accuracy", 0.75],
            [3, "epoch/validation_loss", 4.0],
        ),
    ]


@pytest.mark.features
@pytest.mark.filterwarnings("default")  # MLflow's own use of SQLAlchemy warns
def test_mlflow_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(
        writer_thread, "CLOSE_TIMEOUT_SECONDS", 300.0
    )  # MLflow makes the database first
    store = f"sqlite:///{tmp_path}/mlflow.db"
    run(tmp_path, MlflowLogger("isotrain", store))
    other = tmp_path / "other"
    other.mkdir()
    run(other, MlflowLogger("isotrain", store), error=OSError("a rank died"))
    from mlflow import MlflowClient

    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("isotrain")
    assert experiment is not None
    failed, finished = client.search_runs([experiment.experiment_id])
    assert (finished.info.status, finished.info.run_name) == ("FINISHED", "digits")
    assert (failed.info.status, failed.data.tags["failure"]) == ("FAILED", "a rank died")
    assert finished.data.params == {
        "run": "digits",
        "backend": "any",
        "replicas": "2",
        "samples": "300",
    }
    history = client.get_metric_history(finished.info.run_id, "loss")
    assert [(each.step, each.value) for each in history] == [(0, 2.0), (1, 1.5), (2, 300.0)]
    assert finished.data.metrics["epoch/validation_loss"] == 4.0
    assert finished.data.metrics["norm"] == 4.0
    resumed = MlflowLogger("isotrain", store)
    resumed.started({"run": "digits"}, other)
    resumed.finished(None)
    runs = client.search_runs([experiment.experiment_id])
    assert [each.info.status for each in runs] == ["FINISHED", "FINISHED"]


@pytest.mark.features
def test_wandb_offline(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom plugins import test_loggers as t\n"
        "for _ in range(2):\n    t.run(Path(sys.argv[1]), t.WandbLogger('isotrain', mode='offline'))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=tmp_path)
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    own = (tmp_path / "wandb-run-id").read_text()
    assert {file.name for file in files} == {f"run-{own}.wandb"}  # a resumed run is the same
    assert list(wandb_records(files[0])) == [
        {"step": 0, "loss": 2.0, "learning_rate": 0.5},
        {"step": 1, "loss": 1.5, "learning_rate": 0.25},
        {"step": 2, "epoch": 0, "epoch/loss": 1.5, "epoch/accuracy": 0.5},
        {"step": 2, "loss": 300.0, "learning_rate": 0.125},
        {"step": 2, "kl": 0.5},
        {"step": 2, "norm": 4.0},
        {
            "step": 3,
            "epoch": 1,
            "epoch/loss": 300.0,
            "epoch/accuracy": 0.75,
            "epoch/validation_loss": 4,
        },
    ]


def wandb_records(file: Path) -> Any:
    """The history in a file of Weights & Biases: a LevelDB log of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    for data in leveldb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            yield {k: json.loads(v) for k, v in items.items() if not k.startswith("_")}


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Blocks of 32 KiB; parts of records, each after checksum, length and which part it is."""
    block, whole, last, position = 32768, 1, 4, 7  # after the file's own header
    record = b""
    while position + 7 <= len(content):
        if block - position % block < 7:
            position += block - position % block
            continue
        length, part = struct.unpack_from("<HB", content, position + 4)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (whole, last):
            yield record
            record = b""


def test_a_missing_package_or_wrong_option_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for logger in (MlflowLogger, WandbLogger):
        found = logger.availability()
        assert not found.available
        assert f"isotrain[{logger.name}]" in str(found.hint)
    host = PluginManager(entry_points=False)
    with pytest.raises(IsotrainError, match=r"unknown option of the logger 'csv': 'folder'"):
        host.logger("csv", {"folder": "x"})
    with pytest.raises(IsotrainError, match=r"unknown logger 'tensorbord'\. Did you mean"):
        host.logger("tensorbord", {})
