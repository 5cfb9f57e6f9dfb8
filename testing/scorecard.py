"""Checks, their outcomes, and the scorecard of all outcomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.capabilities import Capabilities, Capability

Verdict = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """Check: a function that raises `AssertionError` when something is wrong.

    Attributes:
        function: Check function; users see its name and the first line of its docstring.
        needs: Capabilities that a backend must have; without them the check is skipped.
    """

    function: Callable[..., None]
    needs: frozenset[Capability] = frozenset()

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.__name__

    @property
    def meaning(self) -> str:
        """Property that holds when the check passes, in one line."""
        return (self.function.__doc__ or "").strip().splitlines()[0]

    def obstacle(self, can: Capabilities) -> str | None:
        """Reason to skip a backend with these capabilities; None when the check applies."""
        missing = can.missing(self.needs)
        return "the backend has " + "; ".join(missing) if missing else None

    def passed(self) -> Outcome:
        """Outcome of a check that passed."""
        return Outcome(self.name, self.meaning, "passed")

    def failed(self, reason: str) -> Outcome:
        """Outcome of a check that failed, with the reason."""
        return Outcome(self.name, self.meaning, "failed", reason)

    def skipped(self, reason: str) -> Outcome:
        """Outcome of a check that was not made, with the reason."""
        return Outcome(self.name, self.meaning, "skipped", reason)


@dataclass(frozen=True, kw_only=True)
class SessionCheck(Check):
    """Check in a session of its own.

    Attributes:
        spec: Makes the spec of the session.
        absence: Tells the reason why an adapter has not what is checked; None where it has.
    """

    spec: Callable[[Adapter], Mapping[str, Any]]
    absence: Callable[[Adapter], str | None] = lambda adapter: None


@dataclass(frozen=True)
class Outcome:
    """Outcome of one check.

    Attributes:
        check: Name of the check.
        meaning: Property that holds when the check passes.
        verdict: `passed`, `failed` or `skipped`.
        reason: Reason why the check failed or was skipped, or None.
    """

    check: str
    meaning: str
    verdict: Verdict
    reason: str | None = None


@dataclass(frozen=True)
class Scorecard:
    """Outcomes of all checks of one backend or strategy.

    Attributes:
        kind: `backend` or `strategy`.
        name: Name of the backend or strategy.
        backend: Backend of the runs, `NAME` or `NAME:COLLECTIVE`.
        replicas: Number of replicas.
        outcomes: Outcomes, in the order in which the checks were made.
    """

    kind: Literal["backend", "strategy"]
    name: str
    backend: str
    replicas: int
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> dict[str, str]:
        """Reasons of the failed checks, by name."""
        return {o.check: o.reason or "" for o in self.outcomes if o.verdict == "failed"}

    def to_dict(self) -> dict[str, Any]:
        """Scorecard as plain JSON values."""
        fields = asdict(self)
        return {**fields, "outcomes": list(fields["outcomes"]), "passed": self.passed}


def outcome_of_processes(check: Check, problems: Sequence[str]) -> Outcome:
    """Outcome of a check by the problem of each process, by rank; an empty text where the check passed."""
    failures = [f"process {rank}: {text}" for rank, text in enumerate(problems) if text]
    return check.failed("\n".join(failures)) if failures else check.passed()


def outcome_of(check: Check, *given: Any) -> Outcome:
    """Calls the function of a check with these arguments, in this process; returns the outcome."""
    try:
        check.function(*given)
    except AssertionError as error:
        return check.failed(str(error))
    return check.passed()
