"""Events of a run: one class for each kind, and their form as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from isotrain.core.json_format import FORMAT, json_line, with_numbers


@dataclass(frozen=True, kw_only=True)
class Event:
    """Event of a run.

    Attributes:
        kind: Name of the kind in JSON.
    """

    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The event's fields, and its kind as `event`."""
        return {
            "event": self.kind,
            **{field.name: getattr(self, field.name) for field in fields(self)},
        }

    def to_line(self) -> bytes:
        """The event as one line of JSON, which `read_event` reads."""
        return json_line(self.to_dict()).encode() + b"\n"


STOP = "stop"
"""What a callback returns to end the training early, after a step."""

OnEvent = Callable[[Event], str | None]
"""Callback for every event as it arrives; may return `STOP`."""

OnPlainEvent = Callable[[Mapping[str, Any]], Any]
"""A user's callback for every event, as a mapping; may return `STOP`."""


def with_stop(on_event: OnEvent, request_stop: Callable[[], None]) -> OnEvent:
    """A callback that also calls `request_stop` whenever `on_event` returns `STOP`."""

    def listen(event: Event) -> None:
        if on_event(event) == STOP:
            request_stop()

    return listen


@dataclass(frozen=True, kw_only=True)
class ProcessEvent(Event):
    """Event of one process; its reporter fills in these fields.

    Attributes:
        rank: Rank of the process.
        time: Seconds since 1970 when the event was sent.
        step: Current step of the process, from 0; None before the first.
        call: Current call of the process, such as `step` or `save checkpoint`.
    """

    rank: int = 0
    time: float = 0.0
    step: int | None = None
    call: str = ""


@dataclass(frozen=True, kw_only=True)
class Started(ProcessEvent):
    """The process has started.

    Attributes:
        pid: Process ID.
    """

    kind = "started"
    pid: int


@dataclass(frozen=True, kw_only=True)
class Heartbeat(ProcessEvent):
    """The process is alive."""

    kind = "heartbeat"


@dataclass(frozen=True, kw_only=True)
class Ready(ProcessEvent):
    """The process has loaded its data and built its model.

    Attributes:
        plan: Content of `plan.json` with the measured values; from rank 0 only.
        samples: Number of training samples; None for a stream, and for workers and servers.
        data: Identity of the data, which newcomers must have too: number of samples and a checksum, by part;
            from rank 0 of an elastic run only.
    """

    kind = "ready"
    samples: int | None = None
    plan: Mapping[str, Any] | None = None
    data: Mapping[str, Sequence[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Progress(ProcessEvent):
    """Progress of the training, from rank 0.

    Attributes:
        done: Number of steps done.
        total: Number of steps of the run.
        epoch: Index of the epoch, from 0.
        loss: Loss of the newest step whose loss is known.
        samples_per_s: Samples per second; None until known.
    """

    kind = "progress"
    done: int
    total: int
    epoch: int
    loss: float
    samples_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class Steps(ProcessEvent):
    """Steps done since the last such event, from rank 0.

    Attributes:
        first: Index of the first step, from 0 over the run.
        losses: Mean loss of each step's global batch.
        learning_rates: Learning rate of each step.
    """

    kind = "steps"
    first: int
    losses: Sequence[float]
    learning_rates: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Scalars(ProcessEvent):
    """Named scalars of steps, beside loss and learning rate, since the last such event; from rank 0.

    Attributes:
        steps: Index of each record's step, from 0 over the run; a step may have several records.
        values: Scalars of each record, by name.
    """

    kind = "scalars"
    steps: Sequence[int]
    values: Sequence[Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class MediaLogged(ProcessEvent):
    """An image, histogram or text of a step was written to a file, by rank 0.

    Attributes:
        logged_step: Index of the step that it belongs to, from 0 over the run.
        name: Name under which it was logged.
        media: `image`, `histogram` or `text`.
        file: Path of the file in the run directory.
    """

    kind = "media_logged"
    logged_step: int
    name: str
    media: str
    file: str


def outlasts_rewind(step: int, names: Iterable[str], steps_done: int) -> bool:
    """Whether scalars of a step stay when a run goes on after `steps_done` steps, and repeats later ones.

    An evaluation after these steps, whose names begin with `validation_`, is not repeated.
    """
    is_evaluation = any(name.startswith("validation_") for name in names)
    return step < steps_done + is_evaluation


@dataclass(frozen=True, kw_only=True)
class Evaluating(ProcessEvent):
    """An evaluation begins, from rank 0."""

    kind = "evaluating"


@dataclass(frozen=True, kw_only=True)
class EpochEnded(ProcessEvent):
    """An epoch and its evaluation have ended, from rank 0.

    Attributes:
        metrics: Metric name to value; evaluation metrics are named `validation_<name>`.
        epoch: Index of the epoch, from 0.
        done: Number of steps done.
        loss: Mean training loss over the epoch's samples; None without steps.
    """

    kind = "epoch"
    metrics: Mapping[str, float]
    epoch: int
    done: int
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(ProcessEvent):
    """A checkpoint is complete, from rank 0.

    Attributes:
        done: Number of steps done when the state was copied.
        location: Folder or URL of the checkpoint.
        best: Whether it is the best so far by the spec's metric.
    """

    kind = "checkpoint"
    done: int
    location: str
    best: bool


@dataclass(frozen=True, kw_only=True)
class Resumed(ProcessEvent):
    """The run has resumed from a checkpoint, from rank 0.

    Attributes:
        done: Number of steps done in the checkpoint.
        location: Folder or URL of the checkpoint.
        changes: Differences of spec and plan from the run that saved it.
        lost: State that could not be restored.
    """

    kind = "resumed"
    done: int
    location: str
    changes: Sequence[str]
    lost: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class WorkerLost(ProcessEvent):
    """A worker of a parameter-server run is lost and the run continues without it, from rank 0.

    Attributes:
        lost_rank: Rank of the worker.
        lost_step: Step of the slice it was computing; None for none, or where unknown.
        reason: Sign by which the coordinator noticed.
        cause: End of the worker process (exit code or signal), as far as its launcher knows.
    """

    kind = "worker lost"
    lost_rank: int
    lost_step: int | None
    reason: str
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class Interrupted(ProcessEvent):
    """A process of an elastic run has left its process group, because another process is lost or joins.

    It waits for the launcher to say who is there.

    Attributes:
        generation: Number of the process group that it has left.
        done: Number of steps in the state that it has.
        phase: Number of parts of the built-in loop after the last of these steps that are done: metrics,
            evaluation, end of epoch and so on; 0 in a loop of your own.
        metrics_collected: Whether the metrics of an epoch are reduced already, which ends with that step.
        replicas_differ: Whether others may have other optimizer state after as many steps.
        state_bytes: Size of what it writes if the others take this state from it, in bytes.
        metrics_bytes: Size of its metrics, which it writes in any case, in bytes.
        reason: Error by which it noticed.
    """

    kind = "interrupted"
    generation: int
    done: int
    phase: int
    metrics_collected: bool = False
    replicas_differ: bool = False
    state_bytes: int
    metrics_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Waiting(ProcessEvent):
    """A process that joins an elastic run has built its model, and waits to be let into the process group.

    Attributes:
        state_bytes: Size of the state that it will take from a member, in bytes, as far as its model tells.
        data: Identity of its data: number of samples and a checksum, by part.
    """

    kind = "waiting"
    state_bytes: int
    data: Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class MembersChanged(Event):
    """Processes of an elastic run are lost or have joined, and it goes on in a new process group.

    Processes are named by their rank at the start of the run; those that are started later have the numbers
    after that, in their order.

    Attributes:
        time: Seconds since 1970.
        generation: Number of the new process group.
        lost: What happened to each lost process, by its rank at the start.
        joined: Ranks at the start of the processes that are new in the group.
        done: Number of steps done; the next one is taken by the members of the new group.
        members: Ranks at the start of the members; a member's rank is now its index here.
    """

    kind = "members changed"
    time: float
    generation: int
    lost: Mapping[str, str]
    joined: Sequence[int] = ()
    done: int
    members: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Warned(ProcessEvent):
    """Warning to the user; the run continues.

    Attributes:
        text: Text of the warning.
    """

    kind = "warning"
    text: str


@dataclass(frozen=True, kw_only=True)
class Failed(ProcessEvent):
    """The process has raised.

    Attributes:
        error: Class name of the error.
        message: The error in one line.
        traceback: Traceback without most library frames; the log has the full one.
        is_peer_error: Whether the error only says that another process failed or left.
    """

    kind = "failed"
    error: str
    message: str
    traceback: str
    is_peer_error: bool


@dataclass(frozen=True, kw_only=True)
class Finished(ProcessEvent):
    """The process has finished its work.

    Attributes:
        peak_memory_bytes: Peak resident memory of the process in bytes.
    """

    kind = "finished"
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Output(Event):
    """Output that a rank has printed: rank 0, or another rank requested by the user.

    Attributes:
        text: Printed text.
        rank: Rank of the process.
    """

    kind = "output"
    text: str
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class FilePart(Event):
    """Part of a file of the run directory, for runs followed from another machine; parts arrive in order.

    Attributes:
        name: File name in the run directory.
        begin: Offset of the part in the file, in bytes.
        size: Size of the file, in bytes.
        data: Content of the part, in base64.
    """

    kind = "file"
    name: str
    begin: int
    size: int
    data: str


@dataclass(frozen=True, kw_only=True)
class LauncherNote(Event):
    """The launcher deviates from the plan.

    Attributes:
        time: Seconds since 1970.
        text: Sentence on what it does instead, and why.
    """

    kind = "note"
    time: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Restarted(Event):
    """The run has failed and restarts.

    Attributes:
        time: Seconds since 1970.
        failure: Description of the failure.
        after_step: Number of steps done before the failure.
        from_step: Number of steps done in the checkpoint it restarts from.
        replicas: Number of replicas from now on.
    """

    kind = "restarted"
    time: float
    failure: str
    after_step: int
    from_step: int
    replicas: int


@dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    """The run has failed, from its launcher.

    Attributes:
        time: Seconds since 1970.
        message: Description of the failure.
    """

    kind = "run failed"
    time: float
    message: str


@dataclass(frozen=True, kw_only=True)
class CommandFailed(Event):
    """A command with `--json` has failed; the last line of its output.

    Attributes:
        format: Version of the command line's JSON format.
        error: Class name of the error.
        message: Error message.
        exit_code: Exit code of the program.
        lost_host: Host that was lost with all its ranks; None for other errors.
    """

    kind = "error"
    format: int = FORMAT
    error: str
    message: str
    exit_code: int
    lost_host: str | None = None


RESULT = "result"
"""Kind of the last line of a successful run, whose fields are those of `RunResult`."""

_KINDS: tuple[type[Event], ...] = (
    Started,
    Heartbeat,
    Ready,
    Progress,
    Steps,
    Scalars,
    MediaLogged,
    Evaluating,
    EpochEnded,
    CheckpointSaved,
    Resumed,
    WorkerLost,
    Interrupted,
    Waiting,
    MembersChanged,
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
    """Parses one line of JSON, as `to_line` writes it.

    Returns:
        The event, without unknown fields; None for an unknown kind.
    """
    return event_from_dict(json.loads(line))


def event_from_dict(values: Mapping[str, Any]) -> Event | None:
    """Event of a mapping, as `to_dict` returns it, without unknown fields; None for an unknown kind."""
    event_class = _CLASSES.get(values["event"])
    if event_class is None:
        return None
    types = {field.name: str(field.type) for field in fields(event_class)}
    return event_class(
        **{
            name: with_numbers(value) if "float" in types[name] else value
            for name, value in values.items()
            if name in types
        }
    )
