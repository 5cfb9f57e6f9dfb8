"""Diagnoses a failed run: which rank caused the failure, and the error message about it."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from isotrain.core.contracts.events import Event, Failed, Finished, Ready
from isotrain.core.contracts.process import Role
from isotrain.core.contracts.reporter import BETWEEN_CALLS, CLOSE, Status
from isotrain.core.errors import (
    EndedError,
    NotANumberError,
    RunFailedError,
    ValuesNeededError,
)
from isotrain.core.launching.supervision.monitored_process import MonitoredProcess
from isotrain.core.system.process import describe_exit

_LOG_LINES = 30
_WARNING_PATTERN = r".*:[0-9]+: [A-Za-z]*Warning: |  (warnings\.|self\.|return )"
"""Pattern of Python's warnings in a log, and of the source line below each."""
_ACTIVITY_SECONDS = 0.05
_AMBIGUOUS_EXITS = (1, -signal.SIGABRT)
"""Exit codes of processes that fail by themselves, and of those that frameworks end when peers are gone."""
_DETECTION_DELAY_SECONDS = 0.5
"""Delay with which the end of a process on another host is seen, after its effect on calls of others."""
PEERS_FAILED = 4
"""Lowest suspicion of a process that is only a victim of others' failure, or idle."""


@dataclass
class RankStatus:
    """The supervisor's state of one rank process.

    Attributes:
        process: The rank process.
        last_heard: Time of its last event (`time.monotonic`).
        last_active: Time of its last activity, CPU time or reading (`time.monotonic`).
        activity: Activity in seconds at that time, see `process_activity.activity`.
        failure: Event by which it reported its failure; None if it did not.
        died_at: Time when its end was detected (`time.time`); None while it runs.
        started: Whether it has sent any event.
        ready: Whether it has loaded the data and built the model.
        finished: Whether it reported the end of its work.
        lost: Reason why it is considered lost although it runs; None if it is not.
        left: Whether the run goes on without it (elastic).
        joins: Whether it is to join an elastic run, and is no member of the process group yet.
        is_retired: Whether it has ended, and nothing more is read from it (elastic).
        ignored_log_lines: Patterns of log lines that diagnose nothing, see `Adapter.ignored_log_lines`.
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
    left: bool = False
    joins: bool = False
    is_retired: bool = False
    ignored_log_lines: Sequence[str] = ()

    @property
    def rank(self) -> int:
        return self.process.info.rank

    @property
    def role(self) -> Role:
        return self.process.info.role

    @property
    def is_over(self) -> bool:
        """Whether the run waits for nothing more from it."""
        return self.finished or self.left

    @property
    def is_awaited(self) -> bool:
        """Whether the run does not end before it."""
        return self.has_session and not self.is_over and not self.joins

    @property
    def has_session(self) -> bool:
        """Whether it has a session; workers and servers of a parameter-server run have none."""
        return self.process.info.has_session

    @property
    def is_needed(self) -> bool:
        """Whether the run fails without it; it can lose a worker (parameter server) that has been ready."""
        return self.role != "worker" or not self.ready

    @property
    def died_silently(self) -> bool:
        """Whether it ended without reporting that it finished or failed."""
        return self.process.is_gone and not self.finished and self.failure is None

    def update(self, event: Event | None) -> None:
        """Updates the state by an event; None, for an event of an unknown kind, is a sign of life too."""
        self.last_heard = time.monotonic()
        self.started = True
        if isinstance(event, Failed):
            self.failure = event
        elif isinstance(event, Finished):
            self.finished = True
        elif isinstance(event, Ready):
            self.ready = True

    def update_activity(self) -> None:
        """Updates `last_active` if the process has been active since the last call."""
        activity = self.process.activity
        if activity - self.activity >= _ACTIVITY_SECONDS:
            self.activity = activity
            self.last_active = time.monotonic()

    def excuse(self, seconds: float) -> None:
        """Excludes a pause of the launching process itself from all timeouts."""
        self.last_heard += seconds
        self.last_active += seconds


def suspicion(watched: RankStatus) -> tuple[int, float]:
    """Sort key by which the process that caused the failure comes first: severity class, then time.

    When one process dies, the others' communication fails at once, and some frameworks then end their
    processes. So an error about lost peers, or an exit code that frameworks use, ranks behind everything
    else; within a class, the earliest comes first.
    """
    exit_code = watched.process.exit_code
    if watched.lost is not None or (not watched.finished and watched.process.is_stopped):
        return 0, watched.last_heard
    if watched.died_silently and watched.died_at is not None:
        if exit_code is None:  # on another host: neither exit code nor exact time are known
            return 2, watched.died_at - _DETECTION_DELAY_SECONDS
        if exit_code == -signal.SIGKILL:
            return 1, watched.died_at
        return (3 if exit_code in _AMBIGUOUS_EXITS else 2), watched.died_at
    if watched.failure is not None:
        return (PEERS_FAILED if watched.failure.is_peer_error else 2), _raised_at(watched.failure)
    step = watched.process.status.step
    return PEERS_FAILED + 1, -1.0 if step is None else float(step)


def _raised_at(failure: Failed) -> float:
    """Time of a failure, comparable to the end of others: one raised in user code is not caused by them."""
    return failure.time - (_DETECTION_DELAY_SECONDS if failure.call == BETWEEN_CALLS else 0.0)


def verdict(watched: RankStatus) -> str:
    """Describes in a few words what happened to a process."""
    exit_code = watched.process.exit_code
    if watched.failure is not None:
        return f"raised {watched.failure.error}"
    if watched.died_silently:
        if exit_code is None:
            return "is gone: its connection to rank 0 was closed"
        return describe_exit(exit_code)
    if watched.process.is_stopped:
        silent = time.monotonic() - watched.last_heard
        contact = (
            f"was last heard of {silent:.1f} s ago" if watched.started else "was never heard of"
        )
        return f"is suspended (SIGSTOP) and {contact}"
    return watched.lost or "did nothing wrong"


def run_failure(culprit: RankStatus, statuses: Sequence[RankStatus]) -> RunFailedError:
    """The error with which the run ends; its message is that of `describe_failure`."""
    text = describe_failure(culprit, statuses)
    name = "" if culprit.failure is None else culprit.failure.error
    error: RunFailedError
    if culprit.failure is not None and name == ValuesNeededError.__name__:
        error = ValuesNeededError(text)
        error.reason = culprit.failure.message.partition(": ")[2]
    else:
        error = NotANumberError(text) if name == NotANumberError.__name__ else RunFailedError(text)
    error.was_asked = name == EndedError.__name__
    reached = [_steps_done(watched.process.status) for watched in statuses]
    error.steps_done = max((steps for steps in reached if steps is not None), default=None)
    error.lost_host = _lost_host(culprit, statuses)
    return error


def _lost_host(culprit: RankStatus, statuses: Sequence[RankStatus]) -> str | None:
    """The culprit's host, if all ranks of that host, and only some of all, were lost during training."""
    if culprit.failure is not None or culprit.process.status.step is None:
        return None
    host, now = culprit.process.info.host, time.monotonic()
    on_host = [watched for watched in statuses if watched.process.info.host == host]
    silence = (now - culprit.last_heard) / 2 if culprit.lost else math.inf
    lost = [each for each in on_host if each.died_silently or now - each.last_heard > silence]
    return host if len(lost) == len(on_host) < len(statuses) else None


def _steps_done(status: Status) -> int | None:
    """Number of steps that a process has completed, counted from the run's start; None before its first."""
    return None if status.step is None else status.step + (status.call != "step")


def describe_failure(culprit: RankStatus, statuses: Sequence[RankStatus]) -> str:
    """The message: which rank failed, at which step, in which call, and where the others were."""
    status = culprit.process.status
    are_on_several_hosts = len({watched.process.info.host for watched in statuses}) > 1
    where = f" on {culprit.process.info.host}" if are_on_several_hosts else ""
    lines = [
        f"rank {culprit.rank} of {len(statuses)}{where} {verdict(culprit)} {whereabouts(status)}.",
        evidence(culprit),
    ]
    lines += [f"rank {w.rank}: {_describe_progress(w)}" for w in statuses if w is not culprit]
    lines.append(_describe_early_exits(statuses))
    lines.append(f"logs: {culprit.process.log.parent}/rank-*.log")
    return "\n".join(line for line in lines if line)


def _describe_early_exits(statuses: Sequence[RankStatus]) -> str:
    """Names ranks that left their loop while others took further steps; empty if there are none."""
    loops = [watched for watched in statuses if watched.has_session]
    steps = [-1 if w.process.status.step is None else w.process.status.step for w in loops]
    last_step = max(steps, default=0)
    left = [
        f"rank {w.rank} left its loop {f'after step {step}' if step >= 0 else 'before its first step'}"
        for w, step in zip(loops, steps, strict=True)
        if (w.finished or w.process.status.call == CLOSE) and w.failure is None and step < last_step
    ]
    if not left:
        return ""
    others = f", while others came to step {last_step}"
    return f"{'; '.join(left)}{others}: every process must make the same calls in the same order."


def whereabouts(status: Status) -> str:
    """Describes the step and the call that a process is in."""
    if status.step is None:
        return f"before its first step, in call {status.call!r}"
    word = "at" if status.call == "step" else "after"
    return f"{word} step {status.step}, in call {status.call!r}"


def evidence(culprit: RankStatus) -> str:
    """Traceback of a process, or the end of its log without warnings and ignored lines; may be empty."""
    if culprit.failure is not None:
        return culprit.failure.traceback.rstrip()
    try:
        text = culprit.process.log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"its log cannot be read: {error}"
    ignored = re.compile("|".join([_WARNING_PATTERN, *culprit.ignored_log_lines]))
    tail = [line for line in text.splitlines() if line.strip() and not ignored.match(line)]
    return "\n".join(["the end of its log:", *tail[-_LOG_LINES:]]) if tail else ""


def _describe_progress(watched: RankStatus) -> str:
    status = watched.process.status
    step = "before its first step" if status.step is None else f"last step {status.step}"
    if watched.failure is not None:
        return f"{step}, then {watched.failure.message.strip().splitlines()[0]}"
    if watched.finished:
        return f"{step}, finished"
    if watched.left and watched.lost:
        return f"{step}; it {watched.lost}"
    if watched.died_silently:
        return f"{step}, then {verdict(watched)}"
    return f"{step}, in call {status.call!r}"
