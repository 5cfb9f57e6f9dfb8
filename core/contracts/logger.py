"""The contract of a logger: writes down somewhere how a run goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from isotrain.core.contracts.capabilities import Availability


class Logger:
    """Writes down how one run goes; every method does nothing unless overridden.

    A logger lives in the process that launched the run, on a thread of its own, so that it can hold up
    neither the training nor the watch over it. An exception that it raises is warned about, and the
    run goes on without it; so are steps and epochs that it is not told of because too many wait for it
    already. Its options are the keyword arguments of its constructor. It imports what
    it writes with in `started`, not when it is imported itself.

    Attributes:
        name: The name it is registered under.
        summary: One line for listings.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    @classmethod
    def availability(cls) -> Availability:
        """Looks whether the packages it needs are installed, importing none of them."""
        return Availability(True)

    def started(self, plan: Mapping[str, Any], run_directory: Path) -> None:
        """Called first: the processes are ready, or the run failed before they were.

        Args:
            plan: What `plan.json` holds.
            run_directory: Where the run keeps its files.
        """

    def resumed(self, step: int) -> None:
        """Called after `started`, where the run goes on after so many steps: later ones come again."""

    def steps_done(
        self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]
    ) -> None:
        """Called while the training goes on, with the steps since the last call: every 500, or two seconds.

        Args:
            first_step: The first of these steps, counted from 0 over the run.
            losses: Of each step: the mean loss of its global batch.
            learning_rates: Of each step.
        """

    def epoch_ended(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Called when an epoch has ended, after its steps.

        Args:
            epoch: Counted from 0.
            step: Steps done so far.
            metrics: The epoch's means; those of the evaluation are under `validation_*`.
        """

    def failed(self, message: str) -> None:
        """Called last, when the run ended early, also by Ctrl-C."""

    def finished(self, result: Mapping[str, Any] | None) -> None:
        """Called last, when the run went well; `result` is what `result.json` holds, if there is one."""
