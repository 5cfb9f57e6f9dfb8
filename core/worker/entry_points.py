"""What the processes of `run`, `measured_plan` and `check` do with their session.

The process that launches them names these functions without calling them: NumPy is imported where it
is used, so that a run's start does not wait for it twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.errors import IsotrainError, NotANumberError
from isotrain.core.results.result import RunResult
from isotrain.core.session.weights.weights_file import (
    WEIGHTS,
    WEIGHTS_FILE,
    require_storable,
    save_weights,
)
from isotrain.core.worker.fit import fit
from isotrain.core.worker.last_weights import LastWeights

LOST_WEIGHTS = "lost_weights"
"""Beside a result: why the weights could not be written; None where they were."""

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isotrain.core.pipeline.profile import LayerCost
    from isotrain.core.session.session import Session


def train(session: Session) -> dict[str, Any] | None:
    """Trains to the end; rank 0 leaves the weights in the run directory and gives the plain result.

    Rank 0 leaves its last weights there too where the run fails or is ended.
    """
    require_storable(session.group, WEIGHTS)
    if not session.is_main:
        fit(session)
        return None
    kept = LastWeights(session)
    try:
        metrics = fit(session, kept.keep_if_due)
    except NotANumberError:
        raise  # its weights are of no use
    except BaseException:
        kept.keep_if_possible()
        raise
    lost = _lost_weights(session, kept)
    assert session.last_loss is not None
    result = RunResult(
        final_loss=session.last_loss,
        metrics=metrics,
        strategy_report=session.strategy_report,
        timings=session.stopwatch.timings(),
        plan=session.plan.to_dict(),
        versions=session.versions,
        restarts=[],  # whoever launched this process knows
        run_directory=session.run_directory,
    )
    return {**result.to_dict(), LOST_WEIGHTS: lost}


def _lost_weights(session: Session, kept: LastWeights) -> str | None:
    """Leaves the weights in the run directory; why they are not there, where that fails: all else is kept."""
    try:
        save_weights(session.group, session.run_directory / WEIGHTS_FILE)
    except Exception as error:  # of a full disk, or of a framework
        return f"{type(error).__name__}: {error}"
    kept.forget()
    return None


def measure_model(session: Session) -> dict[str, Any]:
    """Gives the numbers that only the data and the model know."""
    from dataclasses import asdict

    from isotrain.core.session.training.context import model_bytes

    plan = session.plan
    in_stages = STAGE in plan.device_mesh.sizes
    layers: Sequence[LayerCost] = ()
    refused = session.refusals()
    notes, refuses_single_sample = session.setup_notes(), None
    if (batch := session.next_batch()) is not None:
        if session.tries_metrics:
            session.try_metrics(batch)
        if in_stages and session.is_main:  # alone, so that nobody disturbs it
            layers = session.group.profile_layers(batch).layers
        notes += session.group.step_notes(batch)
        refuses_single_sample = session.group.refuses_single_sample(batch)
    return {
        "samples": plan.samples,
        "refuses_single_sample": refuses_single_sample,
        "parameters": plan.parameters,
        "gradient_bytes": plan.gradient_bytes,
        "weight_shapes": plan.weight_shapes,
        "model": asdict(model_bytes(session.spec, session.group)),
        "layers": list(map(asdict, layers)),
        "refused": refused,
        "notes": notes,
    }


def probe_step(session: Session) -> dict[str, Any]:
    """Gives what a check must know of the data, the model and a first step."""
    from dataclasses import asdict

    from isotrain.core.session.training.context import model_bytes

    model = model_bytes(session.spec, session.group)
    refused = session.refusals()
    fault, refuses_single_sample = _tried(session)
    return {
        "samples": session.plan.samples,
        "model": asdict(model),
        "traits": [asdict(trait) for trait in session.group.traits()],
        "refused": refused,
        "fault": fault,
        "refuses_single_sample": refuses_single_sample,
        "notes": [*session.state_notes(), *(session.step_notes() if fault is None else ())],
    }


def _tried(session: Session) -> tuple[str | None, str | None]:
    """Takes a step with loss and metrics.

    Returns:
        What goes wrong in it; and a layer that refuses a slice of one sample.
    """
    refuses_single_sample = None
    try:
        batch = session.next_batch()
        assert batch is not None, "a run has at least one step"
        refuses_single_sample = session.group.refuses_single_sample(batch)
        session.step(batch)
        session.metrics()
    except Exception as error:  # a person's functions raise anything
        text = str(error).strip()
        told = text if isinstance(error, IsotrainError) else f"{type(error).__name__}: {text}"
        return told, refuses_single_sample
    return None, refuses_single_sample
