"""Shows a run while it goes on: a progress bar in a terminal, plain lines elsewhere, JSON lines, or nothing."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from isotrain.core.plan import Plan

OnEvent = Callable[[Mapping[str, Any]], None]
_PLAIN_SECONDS = 5.0


@contextlib.contextmanager
def fixed(on_event: OnEvent) -> Iterator[OnEvent]:
    """Hands every event to the caller's own function."""
    yield on_event


@contextlib.contextmanager
def quiet() -> Iterator[OnEvent]:
    """Shows nothing."""
    yield lambda event: None


@contextlib.contextmanager
def json_lines(stream: IO[str] | None = None) -> Iterator[OnEvent]:
    """Prints every event as one line of JSON."""
    out = stream or sys.stdout

    def show(event: Mapping[str, Any]) -> None:
        print(json.dumps(event, default=str), file=out, flush=True)

    yield show


def automatic(plan: Plan) -> contextlib.AbstractContextManager[OnEvent]:
    """A progress bar when standard error is a terminal, else plain lines."""
    return bar(plan) if sys.stderr.isatty() else plain(plan)


def title(plan: Plan) -> str:
    """The run in a few words."""
    collective = "" if plan.collective == "none" else f":{plan.collective}"
    plural = "" if plan.replicas == 1 else "s"
    return f"{plan.run} on {plan.backend}{collective}, {plan.replicas} replica{plural}"


@contextlib.contextmanager
def plain(plan: Plan, stream: IO[str] | None = None) -> Iterator[OnEvent]:
    """Prints a line every few seconds and at the end of every epoch."""
    out = stream or sys.stderr
    last = time.monotonic()

    def show(event: Mapping[str, Any]) -> None:
        nonlocal last
        kind = event["event"]
        if kind == "output":
            sys.stdout.write(event["text"])
            sys.stdout.flush()
        elif kind == "ready" and event["rank"] == 0:
            print(f"{title(plan)}: training", file=out, flush=True)
        elif kind == "epoch":
            print(f"{title(plan)}: {epoch_line(event)}", file=out, flush=True)
            last = time.monotonic()
        elif kind == "progress" and time.monotonic() - last > _PLAIN_SECONDS:
            print(f"{title(plan)}: {progress_line(event)}", file=out, flush=True)
            last = time.monotonic()

    print(f"{title(plan)}: starting", file=out, flush=True)
    yield show


@contextlib.contextmanager
def bar(plan: Plan) -> Iterator[OnEvent]:
    """One progress bar with loss, metrics, samples per second and the time left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}"),
        console=Console(stderr=True),
    )
    with progress:
        task = progress.add_task(title(plan), total=None, facts="starting")

        def show(event: Mapping[str, Any]) -> None:
            kind = event["event"]
            if kind == "output":
                progress.console.print(event["text"], end="", markup=False, highlight=False)
            elif kind == "progress":
                facts = progress_facts(event)
                progress.update(
                    task, completed=event["done"], total=event["total"], facts=facts
                )
            elif kind == "epoch":
                facts = epoch_line(event)
                progress.update(task, completed=event["done"], facts=facts)

        yield show


def progress_facts(event: Mapping[str, Any]) -> str:
    """Loss and speed of a progress event."""
    speed = event["samples_per_s"]
    return f"loss {event['loss']:.4g}" + (f", {speed:.0f} samples/s" if speed else "")


def progress_line(event: Mapping[str, Any]) -> str:
    """A progress event in one line."""
    return f"step {event['done']}/{event['total']}, {progress_facts(event)}"


def epoch_line(event: Mapping[str, Any]) -> str:
    """An epoch's end in one line."""
    loss = [] if event["loss"] is None else [f"loss {event['loss']:.4g}"]
    metrics = [f"{name} {value:.4g}" for name, value in event["metrics"].items()]
    return f"epoch {event['epoch'] + 1}: " + ", ".join(loss + metrics)
