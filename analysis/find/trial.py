"""A short run of a spec in processes of its own, of which only returned figures remain."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from isotrain.core.api import launch
from isotrain.core.contracts.job import Work
from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.errors import SpecError
from isotrain.core.run.options import ResumeOptions
from isotrain.core.spec.training_spec import TrainingSpec


def trial_spec(spec: TrainingSpec, *, steps: int, **changes: Any) -> TrainingSpec:
    """The spec for so many steps, without what a search does not need, such as checkpoints.

    Raises:
        SpecError: The spec has no data.
    """
    if spec.data is None:
        raise SpecError(
            "data: the spec has none, and a search trains on batches of the spec's data."
        )
    return spec.replace(
        steps=steps,
        epochs=None,
        checkpoint=None,
        early_stopping=None,
        loggers=(),
        on_nan="ignore",
        **changes,
    )


def launch_trial(
    work: Work, spec: TrainingSpec, backend: str | None, options: ResumeOptions
) -> Any:
    """Value that `work(session)` returns on the first process of a run.

    Raises:
        RunFailedError: A process failed.
    """
    is_local = options.get("launcher") in (None, LOCAL)
    shared = None if is_local else Path.cwd()  # which all hosts have
    with tempfile.TemporaryDirectory(prefix="isotrain-find-", dir=shared) as folder:
        run = Path(folder) / "run"
        quiet: ResumeOptions = {**options, "quiet": True}
        try:
            return launch(work, spec, backend=backend, output=run, **quiet)[0]
        except KeyboardInterrupt as interrupt:
            interrupt.__notes__ = []  # on what is left of the run: it is removed
            raise
