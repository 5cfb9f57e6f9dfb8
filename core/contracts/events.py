"""What the processes of a run, and whoever launched them, tell: one class for each kind of event."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from isotrain.core.json_format import FORMAT, json_line, with_numbers


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run.

    Attributes:
        kind: What it is called where events are written.
    """

    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The event as a mapping: `event`, which is its kind, and its fields."""
        return {
            "event": self.kind,
            **{field.name: getattr(self, field.name) for field in fields(self)},
        }

    def to_line(self) -> bytes:
        """The event as one line of JSON, which `read_event` reads."""
        return json_line(self.to_dict()).encode() + b"\n"


OnEvent = Callable[[Event], None]
"""Is told of every event as it arrives."""

OnPlainEvent = Callable[[Mapping[str, Any]], None]
"""A person's own function: the same, with every event as a mapping."""


@dataclass(frozen=True, kw_only=True)
class ProcessEvent(Event):
    """Something that a process of the run tells; its reporter fills in who, when and where.

    Attributes:
        rank: Of the process.
        time: When it was sent, in seconds since 1970.
        step: The step that the process is at; None before the first.
        call: What it is doing, in a word or two.
    """

    rank: int = 0
    time: float = 0.0
    step: int | None = None
    call: str = ""


@dataclass(frozen=True, kw_only=True)
class Started(ProcessEvent):
    """The process runs.

    Attributes:
        pid: Its number.
    """

    kind = "started"
    pid: int


@dataclass(frozen=True, kw_only=True)
class Heartbeat(ProcessEvent):
    """The process lives."""

    kind = "heartbeat"


@dataclass(frozen=True, kw_only=True)
class Ready(ProcessEvent):
    """The process has loaded its data and built its model.

    Attributes:
        plan: What `plan.json` holds, completed with what was measured; of rank 0 only.
        samples: In its training data; None for a stream, and for who serves others.
    """

    kind = "ready"
    samples: int | None = None
    plan: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Progress(ProcessEvent):
    """How far the training is; of rank 0.

    Attributes:
        done: Steps taken.
        total: Steps of the run.
        epoch: Counted from 0.
        loss: Of the newest step whose loss is known.
        samples_per_s: None until known.
    """

    kind = "progress"
    done: int
    total: int
    epoch: int
    loss: float
    samples_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Steps(ProcessEvent):
    """Steps that were done; of rank 0.

    Attributes:
        first: The first of them, counted from 0 over the run.
        losses: Of each step: the mean loss of its global batch.
        learning_rates: Of each step.
    """

    kind = "steps"
    first: int
    losses: Sequence[float]
    learning_rates: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Evaluating(ProcessEvent):
    """An evaluation begins; of rank 0."""

    kind = "evaluating"


@dataclass(frozen=True, kw_only=True)
class EpochEnded(ProcessEvent):
    """An epoch and its evaluation have ended; of rank 0.

    Attributes:
        metrics: By name; the evaluation's as `validation_<name>`.
        epoch: Counted from 0.
        done: Steps taken.
        loss: Mean over the epoch's samples, each as it was when it was trained on; None without steps.
    """

    kind = "epoch"
    metrics: Mapping[str, float]
    epoch: int
    done: int
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(ProcessEvent):
    """A checkpoint is complete; of rank 0.

    Attributes:
        done: Steps taken when its state was copied.
        location: Its folder.
        best: Whether it is the best so far, where the spec says what that is.
    """

    kind = "checkpoint"
    done: int
    location: str
    best: bool


@dataclass(frozen=True, kw_only=True)
class Resumed(ProcessEvent):
    """The run goes on from a checkpoint; of rank 0.

    Attributes:
        done: Steps taken before it.
        location: The checkpoint's folder.
        changes: What of spec and plan is another than in the run that saved it.
        lost: What of its state could not be taken over.
    """

    kind = "resumed"
    done: int
    location: str
    changes: Sequence[str]
    lost: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class WorkerLost(ProcessEvent):
    """A worker of a parameter-server run is lost, and the run goes on without it; of rank 0.

    Attributes:
        lost_rank: Of the worker.
        lost_step: Of the slice that it had; None where it had none, or the backend does not tell.
        reason: What was noticed of it.
        cause: What became of it, as far as its launcher can see.
    """

    kind = "worker lost"
    lost_rank: int
    lost_step: int | None
    reason: str
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class Warned(ProcessEvent):
    """The run goes on, but a person should know of something.

    Attributes:
        text: What.
    """

    kind = "warning"
    text: str


@dataclass(frozen=True, kw_only=True)
class Failed(ProcessEvent):
    """The process has raised.

    Attributes:
        error: The name of the error's class.
        message: The error in a line.
        traceback: As Python prints it, without most frames of libraries; the log has the whole.
        is_peer_error: Whether the error tells that another process is gone.
    """

    kind = "failed"
    error: str
    message: str
    traceback: str
    is_peer_error: bool


@dataclass(frozen=True, kw_only=True)
class Finished(ProcessEvent):
    """The process's work is done."""

    kind = "finished"


@dataclass(frozen=True, kw_only=True)
class Output(Event):
    """A rank has printed something: rank 0, or another whose output was asked for.

    Attributes:
        text: What.
        rank: Which.
    """

    kind = "output"
    text: str
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class FilePart(Event):
    """A part of a file of the run, for who follows it from elsewhere; those of a file follow each other.

    Attributes:
        name: Of the file, in the run directory.
        begin: Bytes of it that come before.
        size: Of the whole file, in bytes.
        data: The part, in base64.
    """

    kind = "file"
    name: str
    begin: int
    size: int
    data: str


@dataclass(frozen=True, kw_only=True)
class LauncherNote(Event):
    """The launcher does something in another way than the plan says.

    Attributes:
        time: When, in seconds since 1970.
        text: What, and why.
    """

    kind = "note"
    time: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Restarted(Event):
    """The run has failed, and starts again.

    Attributes:
        time: When, in seconds since 1970.
        failure: What happened.
        after_step: Steps that had been done by then.
        from_step: Steps that it goes on after.
        replicas: With how many.
    """

    kind = "restarted"
    time: float
    failure: str
    after_step: int
    from_step: int
    replicas: int


@dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    """The run has failed, as whoever launched it found.

    Attributes:
        time: When, in seconds since 1970.
        message: How, in words.
    """

    kind = "run failed"
    time: float
    message: str


@dataclass(frozen=True, kw_only=True)
class CommandFailed(Event):
    """A command with `--json` ends by an error; nothing follows.

    Attributes:
        format: Of what the command line prints.
        error: The name of the error's class.
        message: The error, in words.
        exit_code: Of the program.
        lost_host: The host that a run has lost with all its ranks, where it has.
    """

    kind = "error"
    format: int = FORMAT
    error: str
    message: str
    exit_code: int
    lost_host: str | None = None


RESULT = "result"
"""What stands for a kind in the last line of a run that went well, whose fields are `RunResult`'s."""

_KINDS: tuple[type[Event], ...] = (
    Started,
    Heartbeat,
    Ready,
    Progress,
    Steps,
    Evaluating,
    EpochEnded,
    CheckpointSaved,
    Resumed,
    WorkerLost,
    Warned,
    Failed,
    Finished,
    Output,
    FilePart,
    LauncherNote,
    Restarted,
    RunFailed,
    CommandFailed,
)
_CLASSES = {each.kind: each for each in _KINDS}


def read_event(line: bytes) -> Event | None:
    """Reads an event.

    Args:
        line: One line of JSON, as `to_line` writes it.

    Returns:
        The event, without the fields that this version does not know; None if it does not know the kind.
    """
    return event_from_dict(json.loads(line))


def event_from_dict(told: Mapping[str, Any]) -> Event | None:
    """The same of a mapping that was read already, as `to_dict` gives it."""
    event = _CLASSES.get(told["event"])
    if event is None:
        return None
    known = {field.name: str(field.type) for field in fields(event)}
    return event(
        **{
            name: with_numbers(value) if "float" in known[name] else value
            for name, value in told.items()
            if name in known
        }
    )
