"""Entry points of worker processes: what `run`, `measured_plan` and `check` do with a session.

The launching process imports this module only to name the functions, so NumPy is imported where it is used.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from isotrain.core.contracts.backend.adapter_protocols import RECORDED, takes_values
from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.errors import IsotrainError, NotANumberError
from isotrain.core.launching.run_directory.run_directory import last_weights_file, last_weights_path
from isotrain.core.results.result import RunResult
from isotrain.core.session.weights.weights_file import (
    WEIGHTS,
    WEIGHTS_FILE,
    has_all_weights,
    require_storable,
    save_weights,
)
from isotrain.core.worker.fit import fit

LOST_WEIGHTS = "lost_weights"
"""Key beside a result: why the weights could not be written; None if they were."""

_WITHOUT_VALUES = (
    "model: planned without values, so that it takes no memory: whether loss, metrics and transform fit"
    " several replicas is seen when the run starts"
)
"""Plan note on checks that read values."""
_SAVE_INTERVAL_SECONDS = 30.0
_LATE_STEP = 1 << 20
"""Index of a step after which no phase of a strategy begins."""

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.adapter import Adapter
    from isotrain.core.contracts.backend.group_hooks import PassCosts
    from isotrain.core.data.batch import Batch, Slice
    from isotrain.core.pipeline.profile import ModelProfile
    from isotrain.core.session.session import Session


def _kept_weights(session: Session) -> contextlib.AbstractContextManager[None]:
    """Context in which the model has the weights that a run is for: their average, if the spec has one."""
    has_average = session.spec.weight_average is not None
    return session.averaged() if has_average else contextlib.nullcontext()


class LastWeights:
    """Saves the newest weights to `weights-after-N-steps.safetensors` in the run directory; on rank 0."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._saved_at = time.monotonic()

    def save_if_due(self) -> None:
        """Saves the weights unless that was done in the last 30 seconds, so that it costs next to nothing."""
        if time.monotonic() - self._saved_at >= _SAVE_INTERVAL_SECONDS:
            self.save()

    def save(self) -> None:
        """Saves the weights, and removes the file with earlier ones; not those that all processes gather."""
        from isotrain.core.contracts.backend.group_protocols import FullyShardedGroup

        session = self._session
        old = last_weights_file(session.run_directory)
        new = last_weights_path(session.run_directory, session.steps_done)
        is_local = has_all_weights(session.group) and not (
            session.spec.weight_average and isinstance(session.group, FullyShardedGroup)
        )
        if session.steps_done and new != old and is_local:
            with _kept_weights(session):
                save_weights(session.group, new)
            if old is not None:
                old.unlink()
        self._saved_at = time.monotonic()

    def save_if_possible(self) -> None:
        """Saves the weights after a failure, which may have left them unreadable."""
        with contextlib.suppress(Exception):
            self.save()

    def remove(self) -> None:
        """Removes the file, once the final weights are written."""
        path = last_weights_file(self._session.run_directory)
        if path is not None:
            path.unlink()


def train(session: Session) -> dict[str, Any] | None:
    """Trains to the end of the run. Collective.

    Rank 0 writes the weights into the run directory, also its last ones if the run fails or is ended.

    Returns:
        On rank 0 the fields of a `RunResult`, as JSON values; None on the others.
    """
    require_storable(session.group, WEIGHTS)
    if not session.is_main:
        fit(session)
        session.data_read()
        with _kept_weights(session):  # a gathered average takes all processes
            pass
        return None
    last_weights = LastWeights(session)
    try:
        metrics = fit(session, last_weights.save_if_due)
        data_read = session.data_read()
    except NotANumberError:
        raise  # its weights are of no use
    except BaseException as error:
        if not session.survives(error):
            last_weights.save_if_possible()
        raise
    weights_error = _save_final_weights(session, last_weights)
    last_loss, epoch_loss = session.last_loss, session.notes.get("loss")
    assert last_loss is not None
    result = RunResult(
        final_loss=last_loss if epoch_loss is None else epoch_loss,
        last_loss=last_loss,
        metrics=metrics,
        strategy_report=session.strategy_report,
        data_read=data_read,
        stopped_early=session.steps_done < session.total_steps,
        timings=session.stopwatch.timings(),
        plan=session.plan.to_dict(),
        versions=session.versions,
        restarts=[],  # the launcher fills them in
        run_directory=session.run_directory,
    )
    return {**result.to_dict(), LOST_WEIGHTS: weights_error}


def _save_final_weights(session: Session, last_weights: LastWeights) -> str | None:
    """Writes the weights into the run directory; returns the error if that fails: the result is kept."""
    try:
        with _kept_weights(session):
            save_weights(session.group, session.run_directory / WEIGHTS_FILE)
    except Exception as error:  # a full disk, a framework
        return f"{type(error).__name__}: {error}"
    last_weights.remove()
    return None


def measure_model(session: Session) -> dict[str, Any]:
    """Returns the numbers of a measured plan: those that only the data and the model have. Collective."""
    from dataclasses import asdict

    from isotrain.core.session.training.context import model_bytes

    plan = session.plan
    is_pipeline = STAGE in plan.device_mesh.sizes
    profile: ModelProfile | None = None
    sample_costs: dict[str, float] | None = None
    notes, refuses_single_sample = session.setup_notes(), None
    refusals: dict[str, str] = {}
    batch = None
    try:
        refusals = session.refusals()
        batch = session.next_batch()
        if batch is not None and session.tries_metrics:
            session.try_metrics(batch)
    except Exception as error:
        if plan.collective != RECORDED or not takes_values(_adapter_of(session), error):
            raise
        notes.append(_WITHOUT_VALUES)
        batch = session.next_batch() if batch is None else batch
    if batch is not None:
        if is_pipeline and session.is_main:  # one process alone, for undisturbed timings
            from isotrain.core.contracts.backend.group_protocols import PipelineGroup
            from isotrain.core.contracts.backend.protocol_checks import require

            profile = require(session.group, PipelineGroup).profile_layers(batch)
        notes += session.group.step_notes(batch)
        refuses_single_sample = session.group.refuses_single_sample(batch)
        is_split = (
            plan.device_mesh.positions_per_replica > 1 or plan.parallel_layout == "fully-sharded"
        )
        costs = None if is_split else _step_costs(session, batch)
        if costs is not None:
            sample_costs = asdict(costs * (1 / batch.slices[0][0].count))
    return {
        "sample_costs": sample_costs,
        "samples": plan.samples,
        "steps_per_epoch": plan.steps_per_epoch,
        "refuses_single_sample": refuses_single_sample,
        "parameters": plan.parameters,
        "gradient_bytes": plan.gradient_bytes,
        "weight_shapes": plan.weight_shapes,
        "model": asdict(model_bytes(session.spec, session.group)),
        "layers": [] if profile is None else list(map(asdict, profile.layers)),
        "loss_seconds": 0.0 if profile is None else profile.loss_seconds,
        "refused": refusals,
        "notes": notes,
    }


def _step_costs(session: Session, batch: Batch) -> PassCosts | None:
    """Costs of the passes of the first slice: those of one update after the other; None if unknown.

    An update that is made every n-th step counts with an n-th of its operations, and all of its memory.
    """
    from isotrain.core.contracts.backend.group_hooks import PassCosts

    sections = session.spec.updates or {}
    found = []
    for name, group in session.group.updates.items():
        costs = group.pass_costs(batch)
        if costs is None:
            return None
        found.append((costs, sections[name].every if name in sections else 1))
    return PassCosts(
        max(costs.peak_bytes for costs, _ in found),
        sum(costs.flops / every for costs, every in found),
        sum(costs.moved_bytes / every for costs, every in found),
    )


def record_steps(session: Session) -> list[tuple[str, int, tuple[int, ...], bool]] | None:
    """Returns the fields of each `Message` of a period of steps; None where the loop makes its batches."""
    from dataclasses import astuple, replace
    from typing import cast

    from isotrain.core.contracts.backend.adapter_protocols import RecordingBackend
    from isotrain.core.parameter_server import recorded_workers
    from isotrain.core.planning.gpu_plan import counted_steps

    batch = session.next_batch()
    if batch is None:
        return None
    if not _messages_depend_on_batch(session):
        batch = _with_two_samples_per_slice(batch)
    adapter = _adapter_of(session)
    for step in range(session.strategy.warm_up_steps):
        for update in session.updates.values():
            update.step(replace(batch, step=step), 0.0)
    sections = session.spec.updates or {}
    with (
        cast("RecordingBackend", adapter).recorded_messages() as messages,
        recorded_workers.recorded_messages() as to_workers,
    ):
        for step in range(_LATE_STEP, _LATE_STEP + counted_steps(session.spec, session.strategy)):
            for name, update in session.updates.items():
                if name not in sections or sections[name].is_due(step, batch.epoch + _LATE_STEP):
                    update.step(replace(batch, step=step), 0.0)
        return list(map(astuple, (*messages, *to_workers)))


def _adapter_of(session: Session) -> Adapter:
    from isotrain.core.plugins.manager import plugin_manager

    return plugin_manager(session.spec.plugins).backend(session.plan.backend)


def _messages_depend_on_batch(session: Session) -> bool:
    """Whether values of samples may be sent, or a model may need all samples of a slice."""
    spec = session.spec
    is_cut = session.plan.device_mesh.positions_per_replica > 1
    has_objective = any(each.objective is not None for each in spec.update_specs.values())
    are_sent = session.plan.uses_parameter_server
    return is_cut or are_sent or has_objective or spec.batch_norm == "ghost"


def _with_two_samples_per_slice(batch: Batch) -> Batch:
    """A batch that costs less; two samples, since batch normalization refuses a single one."""
    from dataclasses import replace

    from isotrain.core.data.pytree import map_parts

    def first_two(each: Slice) -> Slice:
        inputs, targets = map_parts(lambda rows: rows[:2], (each.inputs, each.targets))
        return replace(each, inputs=inputs, targets=targets, count=min(2, each.count))

    return replace(batch, slices=tuple(tuple(map(first_two, each)) for each in batch.slices))


def probe_step(session: Session) -> dict[str, Any]:
    """Returns what `check` has to know of the data, the model and a first step. Collective."""
    from dataclasses import asdict

    from isotrain.core.session.training.context import model_bytes

    model = model_bytes(session.spec, session.group)
    updates = session.group.updates.values()
    names = Counter(name for each in updates for name in each.describe_state(("trainable",)))
    refusals = session.refusals()
    fault, refuses_single_sample = _try_step(session)
    return {
        "samples": session.plan.samples,
        "model": asdict(model),
        "traits": [asdict(trait) for trait in session.group.traits()],
        "refused": refusals,
        "fault": fault,
        "refuses_single_sample": refuses_single_sample,
        "shared_weights": [name for name, count in names.items() if count > 1],
        "teacher_weights": [name for name in names if "teacher" in name.lower()],
        "notes": [*session.state_notes(), *(session.step_notes() if fault is None else ())],
    }


def _try_step(session: Session) -> tuple[str | None, str | None]:
    """Takes a step with loss and metrics.

    Returns:
        The text of an error in it; and the name of a layer that refuses a slice of one sample.
    """
    refuses_single_sample = None
    try:
        batch = session.next_batch()
        if batch is None:  # the loop makes its batches
            return None, None
        refuses_single_sample = session.group.refuses_single_sample(batch)
        session.step(batch)
        session.metrics()
    except Exception as error:  # user functions may raise anything
        text = str(error).strip()
        fault = text if isinstance(error, IsotrainError) else f"{type(error).__name__}: {text}"
        return fault, refuses_single_sample
    return None, refuses_single_sample
