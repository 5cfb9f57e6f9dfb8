"""The contract of a logger: records the metrics of a run, such as in TensorBoard or MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from isotrain.core.contracts.backend.capabilities import Availability

MediaKind = Literal["image", "histogram", "text"]


class Logger:
    """Records steps, epochs and the outcome of one run; every method does nothing by default.

    A logger runs in the launching process, on its own thread, so that it delays neither training nor
    supervision. If it raises, isotrain warns and the run continues without it; if it is too slow, isotrain
    drops steps and epochs and warns. Its options are the keyword arguments of its constructor. It imports
    its library in `started`, not at import time.

    Attributes:
        name: Name under which it is registered.
        summary: One line for listings.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    @classmethod
    def availability(cls) -> Availability:
        """Whether the packages it needs are installed; imports none of them."""
        return Availability(True)

    def started(self, plan: Mapping[str, Any], run_directory: Path) -> None:
        """Called first, when the processes are ready or the run failed before.

        Args:
            plan: Content of `plan.json`.
            run_directory: Run directory.
        """

    def resumed(self, step: int) -> None:
        """Called after `started` when the run resumes after `step` steps: later steps are repeated."""

    def steps_done(
        self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]
    ) -> None:
        """Called during training with the steps since the last call: every 500 steps, or two seconds.

        Args:
            first_step: Index of the first of these steps, from 0 over the run.
            losses: Mean loss of each step's global batch.
            learning_rates: Learning rate of each step.
        """

    def scalars_logged(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Called with the named scalars of steps, from `session.log`, since the last call.

        Args:
            records: Pairs of a step, from 0 over the run, and its scalars by name. A step may have several.
        """

    def media_logged(self, step: int, name: str, kind: MediaKind, path: Path) -> None:
        """Called with a file of `session.log_image`, `log_histogram` or `log_text`.

        Args:
            step: Index of the step, from 0 over the run.
            name: Name under which it was logged, which may have parts divided by `/`.
            kind: What the file is: a PNG image, JSON with `counts`, `edges`, `sum`, `sum_of_squares` and
                `not_finite`, or a UTF-8 text.
            path: Path of the file in the run directory.
        """

    def epoch_ended(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Called when an epoch has ended, after its steps.

        Args:
            epoch: Index of the epoch, from 0.
            step: Number of steps done.
            metrics: Mean of the training loss (`loss`) and of each metric over the epoch, by name; evaluation
                metrics are named `validation_*`.
        """

    def failed(self, message: str) -> None:
        """Called last, when the run ended early, also by Ctrl-C."""

    def finished(self, result: Mapping[str, Any] | None) -> None:
        """Called last, when the run succeeded; `result` is the content of `result.json`, if there is one."""
