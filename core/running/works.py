"""What the processes of `run`, `measured_plan` and `check` do with their session.

The process that launches them names these functions without calling them: NumPy is imported where it
is used, so that a run's start does not wait for it twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isotrain.core.running.loop import fit
from isotrain.core.running.result import WEIGHTS_FILE, RunResult

if TYPE_CHECKING:
    from isotrain.core.running.session import Session


def train(session: Session) -> dict[str, Any] | None:
    """Trains to the end; rank 0 leaves the weights in the run directory and gives the plain result."""
    import numpy as np

    from isotrain.core.system.whole_file import whole_file

    metrics = fit(session)
    if not session.is_main:
        return None
    weights = session.read_state(("trainable", "non-trainable"))
    with whole_file(session.run_directory / WEIGHTS_FILE) as stream:
        np.savez(stream, **weights)  # type: ignore[arg-type]
    assert session.last_loss is not None
    return RunResult(
        final_loss=session.last_loss,
        metrics=metrics,
        strategy_report=session.strategy_report,
        timings=session.stopwatch.timings(),
        plan=session.plan.to_dict(),
        versions=session.versions,
        run_directory=session.run_directory,
    ).to_dict()


def describe(session: Session) -> dict[str, Any]:
    """Gives the numbers that only the data and the model know."""
    plan = session.plan
    return {
        "samples": plan.samples,
        "parameters": plan.parameters,
        "gradient_bytes": plan.gradient_bytes,
        "weight_shapes": plan.weight_shapes,
    }


def examine(session: Session) -> dict[str, Any]:
    """Gives what a check must know of the data and the model."""
    from dataclasses import asdict

    return {
        "samples": session.plan.samples,
        "traits": [asdict(trait) for trait in session.group.traits()],
    }
