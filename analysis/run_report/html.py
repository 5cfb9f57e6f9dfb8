"""The HTML report of a run, finished or going on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from isotrain.analysis.pages import page
from isotrain.analysis.run_report.media import logged_media
from isotrain.analysis.run_report.plots import plots_of
from isotrain.analysis.run_report.profile import profile_table
from isotrain.analysis.run_report.run_files import RunFiles
from isotrain.core.contracts.events import (
    EpochEnded,
    Evaluating,
    Event,
    Failed,
    Finished,
    ProcessEvent,
    Ready,
    RunFailed,
    Started,
)
from isotrain.core.errors import IsotrainError
from isotrain.core.launching.run_directory.run_directory import EVENTS_FILE, RunDirectory
from isotrain.core.quantities import counted
from isotrain.core.reporting.tables import number, size, text_of

REFRESH_SECONDS = 5
"""Seconds after which a browser loads the page of a run that goes on again."""
_MAX_SHARE = 0.05
"""Largest share of a core that following a run takes."""
_NICENESS = 10
_POLL_SECONDS = 0.5
_COMMON = {field.name for field in fields(ProcessEvent)}
_MAX_EVENTS = 100
_MAX_TEXT = 300
_HEADINGS = {
    "running": "Running",
    "finished": "Finished",
    "failed": "Failed",
    "stopped": "Stopped before its end",
    "damaged": "Some files cannot be read",
}


def render(run: RunFiles, *, follows: bool = False) -> str:
    """Renders the page of a run; with `follows` a browser loads it again and again.

    Raises:
        IsotrainError: A package that the page needs is not installed.
    """
    plots, profile = plots_of(run), profile_table(run.folder)
    media, media_left_out = logged_media(run)
    sections = [
        *((plot.name, plot.title) for plot in plots),
        *([("profile", "Profiled steps")] if profile[1] else []),
        *([("media", "Logged images, histograms and texts")] if media else []),
        ("result", "Result"),
        ("processes", "Processes"),
        ("events", "Events"),
        ("plan", "Plan"),
        ("machine", "Machine and versions"),
        ("spec", "Spec"),
    ]
    events = list(_events(run))
    facts = {
        "kind": "Run",
        "name": run.spec["name"],
        "source": f"{run.folder.resolve().name}/{EVENTS_FILE}",
        "created": page.moment(run.start or None),
        "machine_line": page.machine_line(run.versions["machine"]),
        "refresh_s": REFRESH_SECONDS if follows else None,
        "heading": _heading(run),
        "trained": _trained(run),
        "progress": _progress(run),
        "failure": _failure(run),
        "sections": sections,
        "media": media,
        "media_left_out": media_left_out,
        "profile": profile,
        "result": _result(run),
        "processes": [_process(run, index) for index in range(len(run.processes))],
        "events": events[-_MAX_EVENTS:],
        "events_left_out": max(0, len(events) - _MAX_EVENTS),
        "plan": page.facts(page.without_folders(run.plan)),
        "versions": page.facts({**run.versions["machine"], **run.versions["packages"]}),
        "spec": page.spec_text(run.spec),
    }
    return page.render("run.html.jinja", plots, facts)


def write_report(folder: Path, *, follows: bool = False) -> tuple[Path, bool]:
    """Writes `report.html` into a run directory.

    Args:
        folder: Run directory.
        follows: Whether the page will be written again, if the run goes on.

    Returns:
        Path of the page, and whether the run goes on.

    Raises:
        IsotrainError: The folder is no run directory, or the page cannot be made or written.
    """
    run = RunFiles(folder)
    is_running = run.summary.state == "running"
    return page.write_page(render(run, follows=follows and is_running), folder), is_running


def follow(folder: Path) -> None:
    """Writes the page of a run again and again until the run has ended, in the time that others leave."""
    os.nice(_NICENESS)
    directory, is_running = RunDirectory(folder), True
    while is_running:
        began = time.process_time()
        try:
            _, is_running = write_report(folder, follows=True)
        except IsotrainError:  # a line that is half written
            if not directory.is_locked():
                raise
        pause = max(REFRESH_SECONDS, (time.process_time() - began) / _MAX_SHARE)
        end = time.monotonic() + pause
        while directory.is_locked() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)


def _heading(run: RunFiles) -> str:
    heading = _HEADINGS[run.summary.state]
    if run.result is not None:
        measured = {"final loss": run.result.final_loss, **run.result.metrics}
        numbers = (f"{page.label(name)} {number(value)}" for name, value in measured.items())
        return f"{heading}: {', '.join(numbers)}"
    if run.summary.loss is not None:
        return f"{heading}: step {_steps(run)}, loss {number(run.summary.loss)}"
    return f"{heading}: no step is done"


def _steps(run: RunFiles) -> str:
    total = run.summary.total_steps
    return f"{run.summary.done:,}" + ("" if total is None else f" of {total:,}")


def _trained(run: RunFiles) -> str:
    """The backend, the replicas and the sizes of what was trained, in a sentence."""
    plan = run.plan
    backend = f"{plan['backend']}:{plan['collective']}"
    counts = {
        "parameters": plan.get("parameters"),
        "samples": plan.get("samples"),
        "samples in a global batch": plan["global_batch_size"],
    }
    known = [f"{number(count)} {what}" for what, count in counts.items() if count is not None]
    replicas = counted(plan["replicas"], "replica")
    return f"{backend} on {replicas}, strategy {plan['strategy']}: {', '.join(known)}."


def _progress(run: RunFiles) -> str:
    parts = [f"{_steps(run)} steps"]
    timings = {} if run.result is None else run.result.timings
    rate = timings.get("samples_per_s")
    if rate is None and run.rates:
        rate = run.rates[-1].samples_per_s
    if rate is not None:
        parts.append(f"{rate:,.0f} samples/s")
    seconds = timings.get("session_s", run.now - run.start)
    return ", ".join([*parts, f"{number(round(seconds, 1))} s"])


def _failure(run: RunFiles) -> str | None:
    """The message and the tracebacks of a run that has failed."""
    if run.summary.state not in ("failed", "damaged"):
        return None
    failed = [event for event in run.last_start if isinstance(event, Failed)]
    of_others = [event for event in failed if not event.is_peer_error]
    messages = [event.message for event in run.events if isinstance(event, RunFailed)]
    texts = [*messages[-1:], *(event.traceback for event in of_others[:1])]
    return _relative(run, "\n\n".join(texts) or str(run.summary.why))


def _result(run: RunFiles) -> list[tuple[str, str]]:
    """The fields of `result.json`, or of the progress so far."""
    result = run.result
    if result is None:
        return [("steps", _steps(run)), ("loss of the last step", text_of(run.summary.loss))]
    losses = {"final loss": result.final_loss, "loss of the last step": result.last_loss}
    numbers = {**losses, **result.metrics, **result.timings}
    others = {
        "stopped early": result.stopped_early,
        "restarts": len(result.restarts),
        **{f"read on {host}": text_of(read) for host, read in result.data_read.items()},
        **result.strategy_report,
    }
    return page.facts({**numbers, **others})


def _process(run: RunFiles, index: int) -> tuple[str, ...]:
    """A row of the table of processes."""
    process, start = run.processes[index], run.start
    times = (process.started, process.ready, process.ended)
    memory = process.peak_memory_bytes
    return (
        str(process.rank),
        process.host,
        *("–" if at is None else f"{at - start:.1f} s" for at in times),
        "–" if memory is None else size(memory),
    )


def _events(run: RunFiles) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the table of events: seconds after the first start, rank, kind, and what it says."""
    for event in run.events:
        if not isinstance(event, Started | Ready | Evaluating | Finished):
            at = event.to_dict().get("time")
            seconds = "–" if at is None else f"{at - run.first_start:,.1f} s"
            rank = str(event.rank) if isinstance(event, ProcessEvent) else "launcher"
            yield seconds, rank, event.kind, _relative(run, _details(event))


def _details(event: Event) -> str:
    left_out = {*_COMMON, "event", "traceback"}
    texts = {name: value for name, value in event.to_dict().items() if name not in left_out}
    if isinstance(event, EpochEnded):
        texts = {"number": event.epoch + 1, "loss": event.loss, **event.metrics}
    text = ", ".join(f"{page.label(name)} {text_of(value)}" for name, value in texts.items())
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _relative(run: RunFiles, text: str) -> str:
    """A text with paths in the run directory relative to it."""
    for folder in {str(run.folder), str(run.folder.resolve())}:
        text = text.replace(f"{folder}/", "")
    return text
