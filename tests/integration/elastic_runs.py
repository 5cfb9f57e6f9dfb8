"""Elastic runs on the reference backend, and what kills their processes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from helpers.waiting import wait_until

import isotrain
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.launching.supervision.join_requests import request_join
from isotrain.testing.reference.layers import Dense, Layer
from isotrain.testing.reference.network import Network

REPLICAS = 4
STEPS_PER_EPOCH = 5
EPOCHS = 3
LONGEST_OTHER = 200
"""Bytes of the longest message from rank 0 in a step but those of all gradients, in 16 bits or more."""
STEPS = STEPS_PER_EPOCH * EPOCHS


class Seen(Layer):
    """Passes its inputs on; a moving statistic is changed in each forward pass, before a step is applied."""

    def start(self, draw: random.Random) -> None:
        self.statistics = {"mean": np.zeros(4)}

    def forward(self, inputs: Any, training: bool) -> Any:
        if training:
            mean = self.statistics["mean"]
            mean[...] = 0.5 * mean + 0.5 * inputs.mean(axis=0)
        return inputs

    def backward(self, slope: Any) -> Any:
        return slope


def model() -> Network:
    hidden = Dense(4, 8, "tanh", name="hidden")
    return Network([Seen("seen"), hidden, Dense(8, 2, name="head")])


def native() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def portable() -> Any:
    import keras

    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((4,)), *layers])


def data() -> isotrain.DataSet:
    """56 samples in global batches of 12, of which the last of an epoch has 8."""
    inputs = np.random.default_rng(0).normal(size=(56, 4))
    targets = np.tanh(inputs[:, :2])
    return isotrain.DataSet((inputs, targets), (inputs[:20], targets[:20]))


def spec(**changes: Any) -> dict[str, Any]:
    fields = {
        "name": "elastic",
        "model": {"numpy": model},
        "data": data,
        "loss": "mean_squared_error",
        "metrics": ["mean_absolute_error"],
        "optimizer": {"name": "adam", "lr": 0.0625},
        "global_batch_size": 12,
        "epochs": EPOCHS,
        "precision": "float64",
        "elastic": {"min": 1, "replacements": 0},
    }
    return fields | changes


def process() -> int:
    """Rank of this process at the start of the run, or its number if it was started later."""
    rank: int = json.loads(os.environ["ISOTRAIN_PROCESS"])["rank"]
    return rank


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Kills:
    """Callback that kills processes, by their rank at the start of the run.

    Attributes:
        between: Step after which a process is killed, outside of a call.
        sending: Step in which a process, rank 0 by then, is killed while it sends a sum to the others: the
            first of them has it, and the last does not.
        evaluating: Step after which a process is killed within the evaluation.
        exchanges: Number of exchanges of all gradients in a step; `sending` is in the last of them.
    """

    between: Mapping[int, int] = field(default_factory=dict)
    sending: Mapping[int, int] = field(default_factory=dict)
    evaluating: Mapping[int, int] = field(default_factory=dict)
    exchanges: int = 1

    def on_start(self, session: isotrain.Session) -> None:
        if process() in self.sending:
            _die_while_sending(session, self.sending[process()], self.exchanges)
        if process() in self.evaluating:
            _die_in_evaluation(session, self.evaluating[process()])

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if self.between.get(process()) == batch.step:
            die()


@dataclass
class WaitsForNewcomer:
    """Callback that waits after a step until the launcher asks to let a newcomer in, before the next one.

    Attributes:
        step: The step.
        reached: File that tells newcomers that it is done; they have no data before.
        replicas: Number of processes at the start.
    """

    step: int
    reached: Path
    replicas: int = REPLICAS
    reporter: Reporter | None = None

    def on_start(self, session: isotrain.Session) -> None:
        enter = Reporter.enter

        def entering(reporter: Reporter, call: str) -> None:
            self.reporter = reporter
            enter(reporter, call)

        mock.patch.object(Reporter, "enter", entering).start()

    def on_step(self, session: isotrain.Session, batch: Any, loss: Any) -> None:
        if batch.step == self.step:
            assert self.reporter is not None
            reporter = self.reporter
            self.reached.touch()
            wait_until(lambda: reporter.is_regroup_requested, 200)

    def data(self) -> isotrain.DataSet:
        """Data of the run."""
        if process() >= self.replicas:
            wait_until(self.reached.exists, 200)
        return data()


def _die_while_sending(session: isotrain.Session, step: int, exchanges: int) -> None:
    """In the last exchange of a step: that of gradients, after which they are applied."""
    send, sent = socket.socket.sendall, 0
    before_last = (exchanges - 1) * (session.replicas - 1)

    def sendall(connection: socket.socket, data: bytes) -> None:
        nonlocal sent
        if session.steps_done == step and len(data) > LONGEST_OTHER:
            if sent > before_last:
                die()
            sent += 1
        send(connection, data)

    mock.patch.object(socket.socket, "sendall", sendall).start()


def _die_in_evaluation(session: isotrain.Session, step: int) -> None:
    group: Any = session.group
    evaluate = group.evaluation_step

    def evaluation_step(batch: Any) -> None:
        if session.steps_done == step + 1:
            die()
        evaluate(batch)

    group.evaluation_step = evaluation_step


def run(
    folder: Path,
    replicas: int = REPLICAS,
    *,
    backend: str = "reference",
    resume: Path | None = None,
    **changes: Any,
) -> tuple[isotrain.RunResult, list[Any]]:
    """The result of a run, and its events."""
    events: list[Any] = []
    result = isotrain.run(
        spec(**changes),
        backend=backend,
        replicas=replicas,
        output=folder,
        resume=resume,
        on_event=events.append,
    )
    return result, events


def changes_of(events: list[Any]) -> list[Any]:
    """The changes of members among the events of a run."""
    return [event for event in events if event["event"] == "members changed"]


def assert_same(found: isotrain.RunResult, whole: isotrain.RunResult) -> None:
    """Losses of all steps, metrics and weights are equal to rounding; no step is missing or twice."""
    assert len(found.history.loss) == len(whole.history.loss)
    np.testing.assert_allclose(found.history.loss, whole.history.loss, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.history.learning_rate, whole.history.learning_rate)
    weights, expected = found.weights, whole.weights
    assert weights.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(weights[name], array, rtol=0, atol=1e-11, err_msg=name)


def require_whole_history(events: list[Any]) -> None:
    """Every step and every epoch is reported once, in order."""
    steps = [
        e["first"] + i for e in events if e["event"] == "steps" for i in range(len(e["losses"]))
    ]
    assert steps == list(range(STEPS))
    epochs = [event["epoch"] for event in events if event["event"] == "epoch"]
    assert epochs == list(range(EPOCHS))


def changes_told(events: list[Any]) -> list[tuple[set[str], list[int], list[int]]]:
    """What is lost, what has joined, and who is there, for each change of members."""
    return [
        (set(each["lost"]), list(each["joined"]), list(each["members"]))
        for each in changes_of(events)
    ]


class Joins:
    """Listener that asks for further replicas once the run trains, and keeps what it is answered."""

    def __init__(self, folder: Path, count: int) -> None:
        self.answers: list[Any] = []
        self.events: list[Any] = []
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._count = count

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        if event["event"] == "steps" and self._thread is None:
            self._thread = threading.Thread(target=self._ask)
            self._thread.start()

    def _ask(self) -> None:
        for _ in range(self._count):
            self.answers.append(list(request_join(self._folder)))
        (self._folder / "asked").touch()

    def finish(self) -> None:
        assert self._thread is not None
        self._thread.join()
