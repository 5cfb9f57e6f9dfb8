"""Shows a run while it goes on: a bar in a terminal, plain lines elsewhere, JSON lines, or nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from isotrain.core.contracts.events import (
    CheckpointSaved,
    EpochEnded,
    Evaluating,
    Event,
    LauncherNote,
    OnEvent,
    OnPlainEvent,
    Output,
    Progress,
    Ready,
    Restarted,
    Resumed,
    Started,
    Warned,
    WorkerLost,
)
from isotrain.core.contracts.plan import Plan
from isotrain.core.json_format import prefixed_line
from isotrain.core.system.standard_streams import visible_output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as ProgressBar

_PLAIN_SECONDS = 5.0
_FRAMES_PER_SECOND = 5.0
_WIDE = 110
"""From this many columns on, the bar also shows the last epoch's metrics."""
_MEDIUM = 76
"""From this many columns on, the bar's facts are written out."""
_VALIDATION = "validation_"


@contextlib.contextmanager
def quiet() -> Iterator[OnPlainEvent]:
    """Shows nothing."""
    yield lambda event: None


@contextlib.contextmanager
def json_lines(stream: IO[str] | None = None, line_prefix: str = "") -> Iterator[OnPlainEvent]:
    """Prints every event as one line of JSON, behind a mark."""
    out = stream or sys.stdout

    def show(event: Mapping[str, Any]) -> None:
        print(prefixed_line(event, line_prefix), file=out, flush=True)

    yield show


def automatic(plan: Plan) -> contextlib.AbstractContextManager[OnEvent]:
    """A progress bar when standard error is a terminal, else plain lines."""
    return bar(plan) if sys.stderr.isatty() else plain(plan)


def _resumed(event: Resumed) -> str:
    """Where the run goes on, and what is not as it was; a line each."""
    changed = [f"  changed: {line}" for line in event.changes]
    lost = [f"  not taken over: {line}" for line in event.lost]
    return "\n".join([f"resumed after step {event.done} from {event.location}", *changed, *lost])


class RunProgress:
    """Follows the events of a run and puts them into words.

    Attributes:
        phase: What is going on.
        done: Steps taken.
        total: Steps of the run; None until known.
        loss: Of the last reported step; None before.
        samples_per_s: None until known.
        metrics: Of the last epoch.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._started: set[int] = set()
        self._ready: set[int] = set()
        self._warned: set[str] = set()
        self._epochs: int | None = None
        count = len(plan.processes)
        self.phase = f"starting {count} process{'' if count == 1 else 'es'}"
        self.done = 0
        self.total: int | None = None
        self.loss: float | None = None
        self.samples_per_s: float | None = None
        self.metrics: Mapping[str, float] = {}

    def note(self, event: Event) -> str | None:
        """Takes over what an event tells.

        Returns:
            A line that should stay on the screen, if the event is worth one.
        """
        match event:
            case Started():
                self._note_started(event)
            case Ready():
                self._note_ready(event)
            case Progress():
                self._note_progress(event)
            case Evaluating():
                self.phase = "evaluating"
            case EpochEnded():
                return self._note_epoch(event)
            case LauncherNote():
                return event.text
            case Warned():
                return self._note_warning(event)
            case CheckpointSaved():
                return f"checkpoint after step {event.done}: {event.location}"
            case Resumed():
                return _resumed(event)
            case Restarted():
                first = event.failure.partition("\n")[0]
                return f"failed ({first}); starts again after step {event.from_step}"
            case WorkerLost():
                return f"worker lost: rank {event.lost_rank} {event.cause or event.reason}"
        return None

    def _note_warning(self, event: Warned) -> str | None:
        """What a process warns of, once: others warn of the same."""
        if event.text in self._warned:
            return None
        self._warned.add(event.text)
        return f"warning: {event.text}"

    def _note_started(self, event: Started) -> None:
        self._started.add(event.rank)
        if len(self._started) == len(self._plan.processes):
            self.phase = "building the model"

    def _note_ready(self, event: Ready) -> None:
        self._ready.add(event.rank)
        measured = event.plan
        if measured and measured["total_steps"]:
            self.total = measured["total_steps"]
            per_epoch = measured["steps_per_epoch"]
            self._epochs = -(-self.total // per_epoch) if per_epoch else None
        if len(self._ready) == len(self._plan.processes):
            self.phase = "first step"

    def _note_progress(self, event: Progress) -> None:
        self.phase = self._epoch_name(event.epoch)
        self.done, self.total = event.done, event.total
        self.loss, self.samples_per_s = event.loss, event.samples_per_s

    def _note_epoch(self, event: EpochEnded) -> str:
        self.phase = self._epoch_name(event.epoch)
        self.done, self.metrics = event.done, event.metrics
        if event.loss is not None:
            self.loss = event.loss
        return f"{self.phase}: {epoch_facts(event)}"

    def _epoch_name(self, epoch: int) -> str:
        return f"epoch {epoch + 1}" + (f"/{self._epochs}" if self._epochs else "")


def title(plan: Plan) -> str:
    """The run in a few words."""
    collective = "" if plan.collective == "none" else f":{plan.collective}"
    plural = "" if plan.replicas == 1 else "s"
    return f"{plan.run} on {plan.backend}{collective}, {plan.replicas} replica{plural}"


def epoch_facts(event: EpochEnded) -> str:
    """An epoch's loss and metrics, and after them those of the evaluation."""
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
    """A number in six or seven characters, so that lines of them stand below each other."""
    size = abs(value)
    if size >= 1e4 or 0 < size < 1e-3:
        return f"{value:.1e}"
    decimals = 4 if size < 10 else 3 if size < 100 else 2 if size < 1000 else 1
    return f"{value:.{decimals}f}"


@contextlib.contextmanager
def plain(plan: Plan, stream: IO[str] | None = None) -> Iterator[OnEvent]:
    """Prints a line per phase, every few seconds of training, and at the end of every epoch."""
    out = stream or sys.stderr
    story = RunProgress(plan)
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        last = time.monotonic()
        print(line, file=out, flush=True)

    def show(event: Event) -> None:
        if isinstance(event, Output):
            sys.stdout.write(_output(event))
            sys.stdout.flush()
            return
        before = story.phase
        line = story.note(event)
        if line:
            say(line)
        elif isinstance(event, Started | Ready):
            if story.phase != before:
                say(story.phase)
        elif isinstance(event, Progress) and time.monotonic() - last > _PLAIN_SECONDS:
            say(_progress_line(story))

    say(title(plan))
    say(story.phase)
    yield show


def _output(event: Output) -> str:
    """What a rank printed; lines of others than rank 0 say whose they are."""
    text = visible_output(event.text, colours=sys.stdout.isatty())
    if event.rank == 0:
        return text
    return "".join(f"rank {event.rank}: {line}" for line in text.splitlines(keepends=True))


def _steps(story: RunProgress) -> str:
    total = str(story.total)
    return f"{story.done:>{len(total)}}/{total}"


def _progress_line(story: RunProgress) -> str:
    facts = [f"{story.phase}: step {_steps(story)}"]
    if story.loss is not None:
        facts.append(f"loss {short(story.loss)}")
    if story.samples_per_s:
        facts.append(f"{story.samples_per_s:,.0f} samples/s")
    return ", ".join(facts)


@contextlib.contextmanager
def bar(plan: Plan) -> Iterator[OnEvent]:
    """One progress bar with loss, metrics, samples per second and the time left; the rest above it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    story = RunProgress(plan)
    console.print(Text(title(plan), style="bold"))
    with _progress(console) as progress:
        task = progress.add_task(story.phase, total=None, start=False, steps="", facts="", speed="")

        def show(event: Event) -> None:
            if isinstance(event, Output):
                sys.stdout.write(_output(event))
                return
            line = story.note(event)
            if line:
                name, _, facts = line.partition(": ")
                console.print(_hanging(name, facts))
            if story.done and not progress.tasks[task].started:
                progress.start_task(task)
            progress.update(
                task,
                description=story.phase,
                total=story.total if story.done else None,
                completed=story.done,
                steps=_steps(story) if story.done else "",
                facts=_bar_facts(story, console.width),
                speed=_bar_speed(story, console.width),
            )

        try:
            yield show
        finally:
            sys.stdout.flush()


def _progress(console: Console) -> ProgressBar:
    """The bar: takes what is left of the width beside its facts."""
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as ProgressBar
    from rich.table import Column
    from rich.text import Text

    def fits() -> Column:
        return Column(no_wrap=True)

    class TimeLeft(ProgressColumn):
        """How long the rest will take; how long it took, in the end."""

        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            if task.finished:
                return Text(_clock(task.finished_time), style="progress.elapsed")
            if task.time_remaining is None:
                return Text("")
            return Text(f"{_clock(task.time_remaining)} left", style="progress.remaining")

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


def _hanging(name: str, facts: str) -> Any:
    """A line whose continuation is indented below its facts."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(name, Text(facts))
    return grid


def _bar_facts(story: RunProgress, width: int) -> str:
    if story.loss is None:
        return ""
    shown = {"loss": story.loss}
    if width >= _WIDE:
        shown |= {k: v for k, v in story.metrics.items() if not k.startswith(_VALIDATION)}
    return _listed(shown)


def _bar_speed(story: RunProgress, width: int) -> str:
    if not story.samples_per_s:
        return ""
    return f"{story.samples_per_s:,.0f}" + (" samples/s" if width >= _MEDIUM else "/s")


def _clock(seconds: float | None) -> str:
    minutes, rest = divmod(int(seconds or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
