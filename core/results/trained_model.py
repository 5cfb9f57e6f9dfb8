"""A trained model: weights from a run directory or a checkpoint, and the spec that builds the model.

The code that builds the model is found by what the user passes: a spec, or a run directory with a spec. A
checkpoint may come from anywhere and is treated as data: the import strings in it are never imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.folder import checkpoint_at
from isotrain.core.errors import CheckpointError, IsotrainError, SpecError
from isotrain.core.json_records import value
from isotrain.core.launching.run_directory.run_directory import (
    PLAN_FILE,
    SPEC_FILE,
    RunDirectory,
    has_checkpoints_itself,
    read_fields,
    steps_taken,
)
from isotrain.core.session.weights.weights_file import WEIGHTS_FILE
from isotrain.core.spec.collate import Pad
from isotrain.core.spec.loading import SpecLike, load_spec
from isotrain.core.spec.step_values import values_at
from isotrain.core.spec.stored_references import is_unresolvable, resolve_in_main, resolve_stored
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.files import is_url

_MODEL_FIELDS = (
    *("name", "model_args", "seed", "precision", "capture", "device", "threads"),
    *("backend_options", "plugins", "timeouts"),
)
"""Spec fields that affect how a trained model is built and what it computes."""
_EVALUATION_FIELDS = ("loss_weights", "metrics", "metrics_over_all", "values", "frozen")
"""Spec fields that affect what an evaluation computes, besides those."""
_UPDATE_FIELDS = ("loss", "objective", "metrics", "weights")
"""Fields of a named update that affect what an evaluation computes."""
_PASS_SPEC = "Pass the spec that was run, as spec=..., or --spec on the command line."
_STATELESS_OPTIMIZER = {"name": "sgd", "lr": 1.0}


class HasRunDirectory(Protocol):
    """Anything with a run directory, such as a `RunResult`."""

    @property
    def run_directory(self) -> Path:
        """Directory of the run's files."""


RunLike = str | os.PathLike[str] | HasRunDirectory | Checkpoint
"""A run, by its result or directory; or a checkpoint, by its path or URL or by a folder of checkpoints."""


@dataclass(frozen=True)
class TrainedModel:
    """A trained model: the location of its weights, and the spec fields that build it.

    Attributes:
        location: Path or URL of the run directory or checkpoint with the weights.
        backend: Backend that it was trained with.
        batch: Global batch size for predictions.
        fields: Spec fields, callables possibly as import strings; None for a checkpoint without a spec.
        checkpoint: The checkpoint with the weights; None for the final weights of a run.
    """

    location: str
    backend: str
    batch: int
    fields: Mapping[str, Any] | None
    checkpoint: Checkpoint | None

    @classmethod
    def of(cls, run: RunLike, spec: SpecLike | None = None) -> TrainedModel:
        """Locates the weights and the spec of a trained model.

        Args:
            run: A finished run, or one with a checkpoint; or a checkpoint.
            spec: Spec of the run, or directory of the run; needed where the run directory has no usable one.

        Raises:
            IsotrainError: There is neither a run with weights nor a checkpoint, or one of its files is
                damaged.
        """
        location = _location(run)
        if not _is_run(run, location):
            checkpoint = run if isinstance(run, Checkpoint) else _checkpoint(location)
            where = f"{checkpoint.location}: run.json: plan"
            plan = value(dict[str, Any], checkpoint.run.get("plan"), where)
            fields, batch = (None, None) if spec is None else _passed_spec(spec)
            backend_and_batch = _backend_and_batch(plan, where, batch)
            return cls(checkpoint.location, *backend_and_batch, fields, checkpoint)
        folder = Path(location)
        plan = read_fields(folder, PLAN_FILE)
        fields, batch = _stored_spec(folder) if spec is None else _passed_spec(spec)
        backend_and_batch = _backend_and_batch(plan, str(folder / PLAN_FILE), batch)
        if (folder / WEIGHTS_FILE).is_file():
            return cls(location, *backend_and_batch, fields, None)
        checkpoint = _checkpoint(location)
        return cls(checkpoint.location, *backend_and_batch, fields, checkpoint)

    @property
    def model(self) -> Any:
        """The model field of the spec.

        Raises:
            SpecError: The model cannot be found by its name, or there is a checkpoint only.
        """
        return self._resolved_field("model", self._trusted_fields)

    @property
    def data(self) -> tuple[Any, Mapping[str, Any]] | None:
        """The training data as in the spec, and its arguments; None if it cannot be found by its name.

        Raises:
            SpecError: There is a checkpoint only.
        """
        data = self._trusted_fields.get("data")
        if is_unresolvable(data):
            return None
        return resolve_in_main(data), self._trusted_fields.get("data_args", {})

    @property
    def _trusted_fields(self) -> Mapping[str, Any]:
        if self.fields is None:
            raise SpecError(
                f"{self.location}: a checkpoint is not taken at its word for the code that makes its model:"
                " it may come from anywhere. Pass the spec that was run, as spec=..., or --spec on the"
                " command line: your file, or the directory of the run if that is yours."
            )
        return self.fields

    @property
    def _collate(self) -> Any:
        """The collate field of the spec.

        Raises:
            SpecError: The function cannot be found by its name.
        """
        collate = self._trusted_fields.get("collate")
        is_padding = collate is None or isinstance(collate, Mapping | Pad)
        return collate if is_padding else self._resolved_field("collate", self._trusted_fields)

    def evaluation_spec(self, data: Any, changes: Mapping[str, Any]) -> TrainingSpec:
        """A spec that builds the model and its loss, for evaluation, with the values of the last step.

        Args:
            data: Data function; None: the run's data.
            changes: Metrics in place of the run's, by field.

        Raises:
            IsotrainError: The values change from step to step, and how many steps were taken is not known.
            SpecError: Model, loss or data cannot be found by their names.
        """
        fields = self._trusted_fields
        if data is None and self.data is None:
            raise SpecError(
                f"{self.location}: the data cannot be found again by their name. Pass data, or spec=..."
            )
        copied = {name: fields[name] for name in _EVALUATION_FIELDS if fields.get(name)}
        losses = {each: self._resolved_field(each, fields) for each in ("loss", "objective")}
        updates = {
            name: self._update_fields(update, changes)
            for name, update in (fields.get("updates") or {}).items()
        }
        if data is None and self.data is not None:
            data, copied["data_args"] = self.data
            copied["validation_split"] = fields.get("validation_split")
        spec = self.spec(data, {**copied, **losses, "updates": updates or None, **changes})
        has_objective = spec.objective is not None or spec.updates
        return spec.replace(values=self._last_values(spec)) if has_objective else spec

    def _last_values(self, spec: TrainingSpec) -> dict[str, float]:
        """Scalars that the objective got in the last step, by name."""
        if self.checkpoint is None:
            is_constant = all(isinstance(each, float) for each in spec.values.values())
            steps = 0 if is_constant else steps_taken(Path(self.location))
            return values_at(spec.values, max(0, steps - 1))
        where = f"{self.location}: run.json: trainer_state"
        state = value(dict[str, Any], self.checkpoint.run.get("trainer_state"), where)
        saved: dict[str, float] = value(
            dict[str, float], state.get("values", {}), f"{where}: values"
        )
        return values_at(spec.values, max(0, self.checkpoint.step - 1)) | saved

    def _update_fields(self, update: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a named update for evaluation; metrics in `changes` replace its metrics."""
        fields = dict(update)
        copied = {each: self._resolved_field(each, fields) for each in _UPDATE_FIELDS}
        if "metrics" in changes:
            del copied["metrics"]
        return {**copied, "optimizer": _STATELESS_OPTIMIZER}

    def _resolved_field(self, field: str, fields: Mapping[str, Any]) -> Any:
        return resolve_stored(field, fields.get(field), self.location, _PASS_SPEC)

    def spec(self, data: Any, changes: Mapping[str, Any] | None = None) -> TrainingSpec:
        """A spec that builds the model, for prediction or export.

        Args:
            data: Data function.
            changes: Further fields.

        Raises:
            SpecError: The model cannot be found by its name.
        """
        fields = self._trusted_fields
        return load_spec(
            {
                **{name: value for name, value in fields.items() if name in _MODEL_FIELDS},
                "model": self.model,
                "call": self._resolved_field("call", fields),
                "data": data,
                "collate": self._collate,
                "objective": _no_objective,
                "optimizer": _STATELESS_OPTIMIZER,
                "global_batch_size": self.batch,
                "epochs": 1,
                **(changes or {}),
            }
        )


def _location(run: RunLike) -> str:
    """Absolute path or URL of a run or checkpoint."""
    if isinstance(run, Checkpoint):
        return run.location
    text = os.fspath(run) if isinstance(run, str | os.PathLike) else str(run.run_directory)
    return text if is_url(text) else str(Path(text).expanduser().resolve())


def _is_run(run: RunLike, location: str) -> bool:
    """Whether it is a run; else it is a checkpoint, or a folder of checkpoints.

    A folder with the files of a checkpoint is no run, even with a `spec.json` beside them.
    """
    if not isinstance(run, str | os.PathLike):
        return not isinstance(run, Checkpoint)
    if is_url(location) or not (Path(location) / SPEC_FILE).is_file():
        return False
    return not has_checkpoints_itself(Path(location))


def _checkpoint(location: str) -> Checkpoint:
    """The checkpoint at a path or URL; of several the newest.

    Raises:
        IsotrainError: There is no checkpoint.
    """
    try:
        return checkpoint_at(location)
    except CheckpointError as error:
        raise IsotrainError(
            f"{location}: expected the directory of a run that has finished, or a checkpoint. It has no"
            f" {SPEC_FILE} with {WEIGHTS_FILE} (isotrain.launch saves no weights), and: {error}"
        ) from error


def _passed_spec(spec: SpecLike) -> tuple[Mapping[str, Any], int | None]:
    """Fields and batch size of the spec that the user passes, directly or by the directory of its run."""
    if isinstance(spec, str | os.PathLike) and Path(spec).expanduser().is_dir():
        return _stored_spec(RunDirectory.reopen(Path(spec).expanduser()).path)
    loaded = load_spec(spec)
    fields = {name: getattr(loaded, name) for name in loaded.model_fields_set}
    return fields, loaded.evaluation.batch or loaded.global_batch_size


def _stored_spec(folder: Path) -> tuple[Mapping[str, Any], int | None]:
    """Fields and batch size of the `spec.json` in a run directory."""
    fields, where = read_fields(folder, SPEC_FILE), folder / SPEC_FILE
    evaluation = value(dict[str, Any] | None, fields.get("evaluation"), f"{where}: evaluation")
    batch = (evaluation or {}).get("batch") or fields.get("global_batch_size")
    return fields, value(int | None, batch, f"{where}: batch")


def _backend_and_batch(plan: Mapping[str, Any], where: str, batch: int | None) -> tuple[str, int]:
    """Backend and global batch size of a plan; `batch` has precedence."""
    backend = value(str, plan.get("backend"), f"{where}: backend")
    count = batch or value(int, plan.get("global_batch_size", 1), f"{where}: global_batch_size")
    if count < 1:
        raise IsotrainError(f"{where}: expected a batch of at least 1, received {count}.")
    return backend, count


def _no_objective(model: Any, batch: Any) -> Any:
    """Objective of specs that predict and export: nothing is trained, and the data need no targets."""
    raise NotImplementedError
