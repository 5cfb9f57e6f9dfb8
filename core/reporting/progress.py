"""Progress displays of a run: a bar in a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from isotrain.core.contracts.events import (
    CheckpointSaved,
    EpochEnded,
    Evaluating,
    Event,
    LauncherNote,
    MembersChanged,
    OnEvent,
    OnPlainEvent,
    Output,
    Progress,
    Ready,
    Restarted,
    Resumed,
    Scalars,
    Started,
    Warned,
    WorkerLost,
)
from isotrain.core.contracts.plan import Plan
from isotrain.core.json_format import prefixed_line
from isotrain.core.quantities import counted
from isotrain.core.system.standard_streams import can_redraw, has_colours, visible_output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as ProgressBar

_PLAIN_SECONDS = 5.0
_FRAMES_PER_SECOND = 5.0
_EPOCH_LINES = 20
"""Number of lines that the epochs of a long run get; the first and the last have one in any case."""
_WIDE = 110
"""Terminal width from which the bar also shows the metrics of the last epoch."""
_MEDIUM = 76
"""Terminal width from which the bar spells out units."""
_VALIDATION = "validation_"


@contextlib.contextmanager
def json_lines(stream: IO[str] | None = None, line_prefix: str = "") -> Iterator[OnPlainEvent]:
    """Prints every event as one line of JSON, after a prefix."""
    out = stream or sys.stdout

    def show(event: Mapping[str, Any]) -> None:
        print(prefixed_line(event, line_prefix), file=out, flush=True)

    yield show


def automatic(
    plan: Plan, directory: Path, *, verbose: bool = False
) -> contextlib.AbstractContextManager[OnEvent]:
    """A progress bar if standard error is a terminal that can draw one, else plain lines.

    Args:
        plan: Plan of the run.
        directory: Run directory.
        verbose: Whether every epoch has a line.
    """
    display = bar if can_redraw(sys.stderr) else plain
    return display(plan, directory, every_epoch=verbose)


def _resumed(event: Resumed) -> str:
    """The step and checkpoint of a resumed run, and what changed or is lost; one line each."""
    changed = [f"  changed: {line}" for line in event.changes]
    lost = [f"  not taken over: {line}" for line in event.lost]
    return "\n".join([f"resumed after step {event.done} from {event.location}", *changed, *lost])


def _members_changed(event: MembersChanged) -> str:
    """Text on the processes that an elastic run has lost and won, and how many go on after which step."""
    changes = [f"rank {rank} {what}" for rank, what in event.lost.items()]
    changes += [f"rank {rank} has joined" for rank in event.joined]
    count = len(event.members)
    go_on = (
        f"{counted(count, 'replica')} {'goes' if count == 1 else 'go'} on after step {event.done}"
    )
    return f"{'; '.join(changes) or 'the process group was formed anew'}: {go_on}"


def _evaluated(event: Scalars) -> str | None:
    """The newest evaluation between two ends of epochs among logged scalars."""
    for step, scalars in zip(reversed(event.steps), reversed(event.values), strict=True):
        found = {
            n.removeprefix(_VALIDATION): v for n, v in scalars.items() if n.startswith(_VALIDATION)
        }
        if found:
            return f"after step {step}: validation: {_listed(found)}"
    return None


class RunProgress:
    """The progress of a run, updated by its events.

    Attributes:
        phase: Present phase, as text such as `evaluating` or `epoch 2/5`.
        done: Number of steps done.
        total: Number of steps of the run; None until known.
        loss: Loss of the last reported step; None before.
        samples_per_s: Throughput in samples per second; None until known.
        metrics: Metrics of the last epoch.
    """

    def __init__(self, plan: Plan, *, every_epoch: bool = False) -> None:
        """Starts before the first event; `every_epoch`: whether `note` has a line for each of many epochs."""
        self._plan = plan
        self._every_epoch = every_epoch
        self._started: set[int] = set()
        self._ready: set[int] = set()
        self._warned: set[str] = set()
        self._epochs: int | None = None
        count = len(plan.processes)
        self.phase = f"starting {counted(count, 'process')}"
        self.done = 0
        self.total: int | None = None
        self._checkpoint = 0
        self.loss: float | None = None
        self.samples_per_s: float | None = None
        self.metrics: Mapping[str, float] = {}

    def note(self, event: Event) -> str | None:
        """Updates the progress by an event.

        Returns:
            A line to print permanently, if the event calls for one.
        """
        match event:
            case Started():
                self._note_started(event)
            case Ready():
                return self._note_ready(event)
            case Progress():
                self._note_progress(event)
            case Evaluating():
                self.phase = "evaluating"
            case EpochEnded():
                return self._note_epoch(event)
            case Scalars():
                return _evaluated(event)
            case LauncherNote():
                return event.text
            case Warned():
                return self._note_warning(event)
            case CheckpointSaved():
                return self._note_checkpoint(event)
            case Resumed():
                return _resumed(event)
            case Restarted():
                reason = event.failure.partition("\n")[0]
                return f"failed ({reason}); starts again after step {event.from_step}"
            case MembersChanged():
                return _members_changed(event)
            case WorkerLost():
                return f"worker lost: rank {event.lost_rank} {event.cause or event.reason}"
        return None

    def _note_warning(self, event: Warned) -> str | None:
        """The warning of a process, unless another process gave the same one."""
        if event.text in self._warned:
            return None
        self._warned.add(event.text)
        return f"warning: {event.text}"

    def _note_started(self, event: Started) -> None:
        self._started.add(event.rank)
        if len(self._started) == len(self._plan.processes):
            self.phase = "building the model"

    def _note_ready(self, event: Ready) -> str | None:
        """The sizes of the run, as text, once they are known."""
        self._ready.add(event.rank)
        plan = event.plan
        if plan and plan["total_steps"]:
            self.total = plan["total_steps"]
            per_epoch = plan["steps_per_epoch"]
            self._epochs = -(-self.total // per_epoch) if per_epoch else None
        if len(self._ready) == len(self._plan.processes):
            self.phase = "first step"
        return self._sizes(plan) if plan else None

    def _sizes(self, plan: Mapping[str, Any]) -> str | None:
        """Steps, epochs, samples and parameters, as far as they are known."""
        counts = {
            "step": self.total,
            "epoch": self._epochs,
            "sample": plan.get("samples"),
            "parameter": plan.get("parameters"),
        }
        return ", ".join(counted(count, noun) for noun, count in counts.items() if count) or None

    def _note_progress(self, event: Progress) -> None:
        self.phase = self._epoch_name(event.epoch)
        self.done, self.total = event.done, event.total
        self.loss, self.samples_per_s = event.loss, event.samples_per_s

    def _note_epoch(self, event: EpochEnded) -> str | None:
        """The epoch's facts; of many epochs, those of about `_EPOCH_LINES`."""
        self.phase = self._epoch_name(event.epoch)
        self.done, self.metrics = event.done, event.metrics
        if event.loss is not None:
            self.loss = event.loss
        interval = 1 if self._every_epoch else max(1, (self._epochs or 0) // _EPOCH_LINES)
        is_last = event.epoch + 1 == self._epochs
        if event.epoch and (event.epoch + 1) % interval and not is_last:
            return None
        return f"{self.phase}: {epoch_facts(event)}"

    def _note_checkpoint(self, event: CheckpointSaved) -> str | None:
        """Where a checkpoint is; of many, about `_EPOCH_LINES`."""
        interval = 0 if self._every_epoch else (self.total or 0) / _EPOCH_LINES
        if self._checkpoint and event.done < self._checkpoint + interval:
            return None
        self._checkpoint = event.done
        return f"checkpoint after step {event.done}: {event.location}"

    def _epoch_name(self, epoch: int) -> str:
        return f"epoch {epoch + 1}" + (f"/{self._epochs}" if self._epochs else "")


def title(plan: Plan) -> str:
    """The run in a few words, such as `digits on torch-ddp:gloo, 2 replicas`."""
    collective = "" if plan.collective == "none" else f":{plan.collective}"
    chosen = next((note for note in plan.notes if note.startswith("backend: ")), None)
    name = f"{plan.run} on {plan.backend}{collective}, {counted(plan.replicas, 'replica')}"
    return name if chosen is None else f"{name} ({chosen})"


def epoch_facts(event: EpochEnded) -> str:
    """Loss and metrics of an epoch, then those of its evaluation, as text."""
    metrics = dict(event.metrics)
    evaluated = {
        name.removeprefix(_VALIDATION): metrics.pop(name)
        for name in list(metrics)
        if name.startswith(_VALIDATION)
    }
    if event.loss is not None:
        metrics = {"loss": event.loss, **metrics}
    parts = [_listed(metrics)]
    if evaluated:
        parts.append("validation: " + _listed(evaluated))
    return "; ".join(part for part in parts if part)


def _listed(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {short(value)}" for name, value in metrics.items())


def short(value: float) -> str:
    """A number in six or seven characters, so that columns of numbers align."""
    magnitude = abs(value)
    if magnitude >= 1e4 or 0 < magnitude < 1e-3:
        return f"{value:.1e}"
    decimals = 4 if magnitude < 10 else 3 if magnitude < 100 else 2 if magnitude < 1000 else 1
    return f"{value:.{decimals}f}"


@contextlib.contextmanager
def plain(
    plan: Plan, directory: Path, stream: IO[str] | None = None, *, every_epoch: bool = False
) -> Iterator[OnEvent]:
    """Prints the run directory, a line per phase, every few seconds of training, and at the end of epochs."""
    out = stream or sys.stderr
    state = RunProgress(plan, every_epoch=every_epoch)
    began = last_printed = time.monotonic()

    def print_line(line: str) -> None:
        nonlocal last_printed
        last_printed = time.monotonic()
        print(line, file=out, flush=True)

    def show(event: Event) -> None:
        if isinstance(event, Output):
            sys.stdout.write(_output(event))
            sys.stdout.flush()
            return
        phase_before = state.phase
        line = state.note(event)
        if line:
            print_line(line)
        if isinstance(event, Started | Ready) and state.phase != phase_before:
            print_line(state.phase)
        elif isinstance(event, Progress) and time.monotonic() - last_printed > _PLAIN_SECONDS:
            print_line(f"{_progress_line(state)}, {_clock(time.monotonic() - began)}")

    print_line(title(plan))
    print_line(f"run directory: {directory}")
    print_line(state.phase)
    yield show


def _output(event: Output) -> str:
    """The output of a rank; lines of ranks other than 0 begin with their rank."""
    text = visible_output(event.text, colours=has_colours(sys.stdout))
    if event.rank == 0:
        return text
    return "".join(f"rank {event.rank}: {line}" for line in text.splitlines(keepends=True))


def _steps(state: RunProgress) -> str:
    total = str(state.total)
    return f"{state.done:>{len(total)}}/{total}"


def _progress_line(state: RunProgress) -> str:
    facts = [f"{state.phase}: step {_steps(state)}"]
    if state.loss is not None:
        facts.append(f"loss {short(state.loss)}")
    if state.samples_per_s:
        facts.append(f"{state.samples_per_s:,.0f} samples/s")
    return ", ".join(facts)


@contextlib.contextmanager
def bar(plan: Plan, directory: Path, *, every_epoch: bool = False) -> Iterator[OnEvent]:
    """A progress bar with loss, metrics, samples per second and time left; other lines go above it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    state = RunProgress(plan, every_epoch=every_epoch)
    console.print(Text(title(plan), style="bold"))
    console.print(Text(f"run directory  {directory}"), soft_wrap=True)  # whole, to be copied
    with _progress(console) as progress:
        task = progress.add_task(state.phase, total=None, start=False, steps="", facts="", speed="")

        def show(event: Event) -> None:
            if isinstance(event, Output):
                sys.stdout.write(_output(event))
                return
            line = state.note(event)
            if line:
                name, _, facts = line.partition(": ")
                if isinstance(event, EpochEnded) and len(line) > console.width:
                    facts = facts.replace("; ", "\n")
                console.print(_with_hanging_indent(name, facts) if facts else Text(line))
            if state.done and not progress.tasks[task].started:
                progress.start_task(task)
            progress.update(
                task,
                description=state.phase,
                total=state.total if state.done else None,
                completed=state.done,
                steps=_steps(state) if state.done else "",
                facts=_bar_facts(state, console.width),
                speed=_bar_speed(state, console.width),
            )

        try:
            yield show
        finally:
            sys.stdout.flush()


def _progress(console: Console) -> ProgressBar:
    """The rich progress bar, which takes the width that its texts leave."""
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as ProgressBar
    from rich.table import Column
    from rich.text import Text

    def fits() -> Column:
        return Column(no_wrap=True)

    class TimeLeft(ProgressColumn):
        """Estimated time left; at the end, the time taken."""

        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            if task.finished:
                return Text(_clock(task.finished_time), style="progress.elapsed")
            if task.time_remaining is None:
                return Text("")
            left = f"{_clock(task.time_remaining)} left"
            took = f"{_clock(task.elapsed)}, " if console.width >= _MEDIUM else ""
            return Text(took + left, style="progress.remaining")

    return ProgressBar(
        TextColumn("{task.description}", table_column=fits()),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6)),
        TextColumn("{task.fields[steps]}", style="progress.download", table_column=fits()),
        TextColumn("{task.fields[facts]}", markup=False, table_column=fits()),
        TextColumn("{task.fields[speed]}", markup=False, table_column=fits()),
        TimeLeft(table_column=fits()),
        console=console,
        expand=True,
        refresh_per_second=_FRAMES_PER_SECOND,
        redirect_stdout=sys.stdout.isatty(),
    )


def _with_hanging_indent(name: str, facts: str) -> Any:
    """A line whose continuation lines are indented to where `facts` begin."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(name, Text(facts))
    return grid


def _bar_facts(state: RunProgress, width: int) -> str:
    if state.loss is None:
        return ""
    metrics = {"loss": state.loss}
    if width >= _WIDE:
        metrics |= {k: v for k, v in state.metrics.items() if not k.startswith(_VALIDATION)}
    return _listed(metrics)


def _bar_speed(state: RunProgress, width: int) -> str:
    if not state.samples_per_s:
        return ""
    return f"{state.samples_per_s:,.0f}" + (" samples/s" if width >= _MEDIUM else "/s")


def _clock(seconds: float | None) -> str:
    minutes, rest = divmod(int(seconds or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
