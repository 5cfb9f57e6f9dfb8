"""Which process of a failed run is to blame, and what to say about it."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from isotrain.core.contracts.events import Event, Failed, Finished, Ready
from isotrain.core.contracts.process import Role, runs_the_loop
from isotrain.core.contracts.reporter import BETWEEN_CALLS, CLOSE, Status
from isotrain.core.errors import EndedError, NotANumberError, RunFailedError
from isotrain.core.launching.supervision.monitored_process import MonitoredProcess
from isotrain.core.system.process import signal_name

_LOG_LINES = 30
_WARNINGS = r".*:[0-9]+: [A-Za-z]*Warning: |  (warnings\.|self\.|return )"
"""What Python's warnings look like, and the line of source below each."""
_EFFORT_SECONDS = 0.05
_AMBIGUOUS_EXITS = (1, -signal.SIGABRT)
"""How frameworks end a process whose peers are gone, and how one can end by its own fault."""
_NOTICED_SECONDS = 0.5
"""By which the end of a process on another host is noticed later than what that does to calls of others."""
PEERS_FAILED = 4
"""The suspicion from which on a process is but a victim, or idle."""


@dataclass
class RankStatus:
    """What is known of one process.

    Attributes:
        process: The process.
        last_heard: When it was last heard of (`time.monotonic`).
        last_active: When it was last seen to do something: use a processor, or read.
        activity: What it had done by then.
        failure: The event by which it reported its failure.
        died_at: When it was found to have ended (`time.time`).
        started: Whether it was ever heard of.
        ready: Whether it has loaded the data and built the model.
        finished: Whether it reported the end of its work.
        lost: In words, why it is taken for lost though it lives.
        ignored_log_lines: See `Adapter`.
    """

    process: MonitoredProcess
    last_heard: float
    last_active: float
    activity: float = 0.0
    failure: Failed | None = None
    died_at: float | None = None
    started: bool = False
    ready: bool = False
    finished: bool = False
    lost: str | None = None
    ignored_log_lines: Sequence[str] = ()

    @property
    def rank(self) -> int:
        return self.process.peer.rank

    @property
    def role(self) -> Role:
        return self.process.peer.role

    @property
    def has_session(self) -> bool:
        """Whether it runs the loop; the others serve one that does."""
        return runs_the_loop(self.role)

    @property
    def is_needed(self) -> bool:
        """Whether the run cannot go on without it: it can without a worker that has been ready."""
        return self.role != "worker" or not self.ready

    @property
    def died_silently(self) -> bool:
        """Whether it ended without saying that it finished or failed."""
        return self.process.is_gone and not self.finished and self.failure is None

    def note(self, event: Event | None) -> None:
        """Takes over what an event tells; one of an unknown kind is a sign of life all the same."""
        self.last_heard = time.monotonic()
        self.started = True
        if isinstance(event, Failed):
            self.failure = event
        elif isinstance(event, Finished):
            self.finished = True
        elif isinstance(event, Ready):
            self.ready = True

    def look(self) -> None:
        """Notes whether it has done something since the last look."""
        activity = self.process.activity
        if activity - self.activity >= _EFFORT_SECONDS:
            self.activity = activity
            self.last_active = time.monotonic()

    def excuse(self, seconds: float) -> None:
        """Does not count time in which the launcher itself did not run."""
        self.last_heard += seconds
        self.last_active += seconds


def suspicion(watched: RankStatus) -> tuple[int, float]:
    """Orders processes by how likely they are the cause, and not a consequence; the cause is least.

    When one process goes, the others' communication fails at once, and some frameworks then end
    their process. So an error that tells of lost peers, or an exit that frameworks make, counts
    after everything else; among equals, what came first counts.
    """
    code = watched.process.exit_code
    if watched.lost is not None or (not watched.finished and watched.process.is_stopped):
        return 0, watched.last_heard
    if watched.died_silently and watched.died_at is not None:
        if code is None:  # nobody here knows how it ended, nor just when
            return 2, watched.died_at - _NOTICED_SECONDS
        if code == -signal.SIGKILL:
            return 1, watched.died_at
        return (3 if code in _AMBIGUOUS_EXITS else 2), watched.died_at
    if watched.failure is not None:
        return (PEERS_FAILED if watched.failure.is_peer_error else 2), _raised(watched.failure)
    step = watched.process.status.step
    return PEERS_FAILED + 1, -1.0 if step is None else float(step)


def _raised(failure: Failed) -> float:
    """When, beside the end of others: what is raised between calls is no consequence of that."""
    return failure.time - (_NOTICED_SECONDS if failure.call == BETWEEN_CALLS else 0.0)


def verdict(watched: RankStatus) -> str:
    """Says in a few words what happened to a process."""
    code = watched.process.exit_code
    if watched.failure is not None:
        return f"raised {watched.failure.error}"
    if watched.died_silently:
        return "is gone: its connection to rank 0 was closed" if code is None else _ending(code)
    if watched.process.is_stopped:
        silent = time.monotonic() - watched.last_heard
        heard = f"was last heard of {silent:.1f} s ago" if watched.started else "was never heard of"
        return f"is suspended (SIGSTOP) and {heard}"
    return watched.lost or "did nothing wrong"


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was ended by SIGKILL (kill -9, or the system had no memory left)"
    if code < 0:
        return f"was ended by {signal_name(-code)}"
    return f"ended with exit code {code} before its work was done"


def run_failure(culprit: RankStatus, everyone: Sequence[RankStatus]) -> RunFailedError:
    """The error that the run ends with, in the words of `describe_failure`."""
    text = describe_failure(culprit, everyone)
    is_nan = culprit.failure is not None and culprit.failure.error == NotANumberError.__name__
    error = NotANumberError(text) if is_nan else RunFailedError(text)
    error.was_asked = culprit.failure is not None and culprit.failure.error == EndedError.__name__
    reached = [_steps_done(watched.process.status) for watched in everyone]
    error.steps_done = max((steps for steps in reached if steps is not None), default=None)
    error.lost_host = _lost_host(culprit, everyone)
    return error


def _lost_host(culprit: RankStatus, everyone: Sequence[RankStatus]) -> str | None:
    """The culprit's host, if in the midst of training all its ranks were lost, and others were not."""
    if culprit.failure is not None or culprit.process.status.step is None:
        return None
    host, now = culprit.process.peer.host, time.monotonic()
    there = [watched for watched in everyone if watched.process.peer.host == host]
    quiet = (now - culprit.last_heard) / 2 if culprit.lost else math.inf
    lost = [each for each in there if each.died_silently or now - each.last_heard > quiet]
    return host if len(lost) == len(there) < len(everyone) else None


def _steps_done(status: Status) -> int | None:
    """How many steps a process has done, from the run's first; None before its own first."""
    return None if status.step is None else status.step + (status.call != "step")


def describe_failure(culprit: RankStatus, everyone: Sequence[RankStatus]) -> str:
    """Says which rank failed, at which step, in which call, and where the others were."""
    status = culprit.process.status
    are_apart = len({watched.process.peer.host for watched in everyone}) > 1
    where = f" on {culprit.process.peer.host}" if are_apart else ""
    lines = [
        f"rank {culprit.rank} of {len(everyone)}{where} {verdict(culprit)} {whereabouts(status)}.",
        evidence(culprit),
    ]
    lines += [f"rank {w.rank}: {_progress(w)}" for w in everyone if w is not culprit]
    lines.append(_left_alone(everyone))
    lines.append(f"logs: {culprit.process.log.parent}/rank-*.log")
    return "\n".join(line for line in lines if line)


def _left_alone(everyone: Sequence[RankStatus]) -> str:
    """Which processes had left their loop while others took further steps, if any; that ends in many ways."""
    loops = [watched for watched in everyone if watched.has_session]
    steps = [-1 if w.process.status.step is None else w.process.status.step for w in loops]
    furthest = max(steps, default=0)
    left = [
        f"rank {w.rank} left its loop {f'after step {step}' if step >= 0 else 'before its first step'}"
        for w, step in zip(loops, steps, strict=True)
        if (w.finished or w.process.status.call == CLOSE) and w.failure is None and step < furthest
    ]
    if not left:
        return ""
    others = f", while others came to step {furthest}"
    return f"{'; '.join(left)}{others}: every process must make the same calls in the same order."


def whereabouts(status: Status) -> str:
    """Says at or after which step, and in which call."""
    if status.step is None:
        return f"before its first step, in call {status.call!r}"
    word = "at" if status.call == "step" else "after"
    return f"{word} step {status.step}, in call {status.call!r}"


def evidence(culprit: RankStatus) -> str:
    """Its traceback, or the end of its log; nothing where that says nothing but what libraries always say."""
    if culprit.failure is not None:
        return culprit.failure.traceback.rstrip()
    try:
        text = culprit.process.log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"its log cannot be read: {error}"
    usual = re.compile("|".join([_WARNINGS, *culprit.ignored_log_lines]))
    tail = [line for line in text.splitlines() if line.strip() and not usual.match(line)]
    return "\n".join(["the end of its log:", *tail[-_LOG_LINES:]]) if tail else ""


def _progress(watched: RankStatus) -> str:
    status = watched.process.status
    step = "before its first step" if status.step is None else f"last step {status.step}"
    if watched.failure is not None:
        return f"{step}, then {watched.failure.message.strip().splitlines()[0]}"
    if watched.finished:
        return f"{step}, finished"
    if watched.died_silently:
        return f"{step}, then {verdict(watched)}"
    return f"{step}, in call {status.call!r}"
