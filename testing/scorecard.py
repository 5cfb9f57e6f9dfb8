"""What the checks found: an outcome for each, and all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from isotrain.core.contracts.capabilities import Capabilities, Capability

Verdict = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One check: a function that raises when something is wrong.

    Attributes:
        function: The name and the first line of the docstring are what people see of it.
        needs: The capabilities that a backend must have for it to be asked.
    """

    function: Callable[..., None]
    needs: frozenset[Capability] = frozenset()

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.__name__

    @property
    def meaning(self) -> str:
        """What holds when it passes, in a line."""
        return (self.function.__doc__ or "").strip().splitlines()[0]

    def obstacle(self, can: Capabilities) -> str | None:
        """Why a backend whose groups can do this is not asked; None when it is."""
        missing = can.missing(self.needs)
        return "the backend has " + "; ".join(missing) if missing else None

    def passed(self) -> Outcome:
        """It holds."""
        return Outcome(self.name, self.meaning, "passed")

    def failed(self, reason: str) -> Outcome:
        """It does not hold, and why."""
        return Outcome(self.name, self.meaning, "failed", reason)

    def skipped(self, reason: str) -> Outcome:
        """It was not made, and why."""
        return Outcome(self.name, self.meaning, "skipped", reason)


@dataclass(frozen=True)
class Outcome:
    """What became of one check.

    Attributes:
        check: Its name.
        meaning: What holds when it passes.
        verdict: What became of it.
        reason: Why it failed or was not asked.
    """

    check: str
    meaning: str
    verdict: Verdict
    reason: str | None = None


@dataclass(frozen=True)
class Scorecard:
    """All outcomes of one backend or strategy.

    Attributes:
        kind: What was checked.
        name: Its name.
        backend: Where it ran.
        replicas: With how many.
        outcomes: One per check, in the order in which they were made.
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
        """The checks that failed, and why."""
        return {o.check: o.reason or "" for o in self.outcomes if o.verdict == "failed"}

    def to_dict(self) -> dict[str, Any]:
        """The card as plain JSON values."""
        fields = asdict(self)
        return {**fields, "outcomes": list(fields["outcomes"]), "passed": self.passed}


def outcome_of_processes(check: Check, problems: Sequence[str]) -> Outcome:
    """The outcome of a check that every process made.

    Args:
        check: Which.
        problems: What is wrong, by rank; empty texts where nothing is.
    """
    told = [f"process {rank}: {text}" for rank, text in enumerate(problems) if text]
    return check.failed("\n".join(told)) if told else check.passed()


def outcome_of(check: Check, *given: Any) -> Outcome:
    """Makes a check that needs no run."""
    try:
        check.function(*given)
    except AssertionError as error:
        return check.failed(str(error))
    return check.passed()
