"""A model that a run has trained, read from the run's directory or a checkpoint.

What makes a model is code. It is found by what the person names: a spec, or a run, whose directory has one.
A checkpoint may come from anywhere, and is numbers: what it says of its own model is not imported or called.
"""

from __future__ import annotations

import os
import sys
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
)
from isotrain.core.session.weights.weights_file import WEIGHTS_FILE
from isotrain.core.spec import import_strings
from isotrain.core.spec.loading import SpecLike, load_spec
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.files import is_url

_OF_THE_MODEL = (
    *("name", "model_args", "seed", "precision", "capture", "device", "threads"),
    *("backend_options", "plugins", "timeouts"),
)
"""The fields of a spec that bear on what a trained model is and gives."""


class HasRunDirectory(Protocol):
    """What a `RunResult` is to those who take its model out."""

    @property
    def run_directory(self) -> Path:
        """Where the run's files are."""


RunLike = str | os.PathLike[str] | HasRunDirectory | Checkpoint
"""A run: its result, or its directory; or a checkpoint: its folder or URL, or a folder of them."""


@dataclass(frozen=True)
class TrainedModel:
    """A trained model: its weights, and what is known of the code that makes it.

    Attributes:
        location: Of the run's directory or the checkpoint, with the weights.
        backend: The one that it was trained under.
        batch: Samples that are predicted for at once.
        fields: Of the spec that says how it is made, callables also by name: the person's own, or that of
            the run they named; None where they named a checkpoint, and no spec.
    """

    location: str
    backend: str
    batch: int
    fields: Mapping[str, Any] | None

    @classmethod
    def of(cls, run: RunLike, spec: SpecLike | None = None) -> TrainedModel:
        """Finds out what a run has trained.

        Args:
            run: Which has finished, or left a checkpoint.
            spec: What was trained, where it has not been written down by a run that the person names; also
                the directory of a run.

        Raises:
            IsotrainError: There is neither a run with weights nor a checkpoint, or a file of it is damaged.
        """
        location = _location(run)
        if not _is_of_a_run(run, location):
            checkpoint = run if isinstance(run, Checkpoint) else _checkpoint(location)
            where = f"{checkpoint.location}: run.json: plan"
            plan = value(dict[str, Any], checkpoint.run.get("plan"), where)
            fields, batch = (None, None) if spec is None else _named(spec)
            return cls(checkpoint.location, *_told(plan, where, batch), fields)
        folder = Path(location)
        plan = read_fields(folder, PLAN_FILE)
        fields, batch = _written(folder) if spec is None else _named(spec)
        told = _told(plan, str(folder / PLAN_FILE), batch)
        if not (folder / WEIGHTS_FILE).is_file():
            location = _checkpoint(location).location
        return cls(location, *told, fields)

    @property
    def model(self) -> Any:
        """What makes it, as in a spec.

        Raises:
            SpecError: It cannot be found again, or only the checkpoint says so.
        """
        return _found_again(self._known.get("model"), self.location)

    @property
    def data(self) -> tuple[Any, Mapping[str, Any]] | None:
        """What it was trained on, and with which arguments; None where that cannot be found again.

        Raises:
            SpecError: Only the checkpoint says so.
        """
        data = self._known.get("data")
        if _is_lost(data):
            return None
        return _of_this_program(data), self._known.get("data_args", {})

    @property
    def _known(self) -> Mapping[str, Any]:
        if self.fields is None:
            raise SpecError(
                f"{self.location}: a checkpoint is not taken at its word for the code that makes its model:"
                " it may come from anywhere. Pass the spec that was run, as spec=..., or --spec on the"
                " command line: your file, or the directory of the run if that is yours."
            )
        return self.fields

    def spec(self, data: Any) -> TrainingSpec:
        """A spec with which the model is built, and trained no further.

        Args:
            data: What its data field has.

        Raises:
            SpecError: The model cannot be found again.
        """
        return load_spec(
            {
                **{name: value for name, value in self._known.items() if name in _OF_THE_MODEL},
                "model": self.model,
                "data": data,
                "loss": "mean_squared_error",
                "optimizer": {"name": "sgd", "lr": 1.0},  # it has no slots
                "global_batch_size": self.batch,
                "epochs": 1,
            }
        )


def _location(run: RunLike) -> str:
    """An absolute path, or a URL."""
    if isinstance(run, Checkpoint):
        return run.location
    text = os.fspath(run) if isinstance(run, str | os.PathLike) else str(run.run_directory)
    return text if is_url(text) else str(Path(text).expanduser().resolve())


def _is_of_a_run(run: RunLike, location: str) -> bool:
    """Whether a person names a run; else it is a checkpoint, or a folder of them.

    A `spec.json` that lies beside the files of a checkpoint makes it no run.
    """
    if not isinstance(run, str | os.PathLike):
        return not isinstance(run, Checkpoint)
    if is_url(location) or not (Path(location) / SPEC_FILE).is_file():
        return False
    return not has_checkpoints_itself(Path(location))


def _checkpoint(location: str) -> Checkpoint:
    """The one at a path or URL; of several the newest.

    Raises:
        IsotrainError: There is none.
    """
    try:
        return checkpoint_at(location)
    except CheckpointError as error:
        raise IsotrainError(
            f"{location}: expected the directory of a run that has finished, or a checkpoint. It has no"
            f" {SPEC_FILE} with {WEIGHTS_FILE} (isotrain.launch saves no weights), and: {error}"
        ) from error


def _named(spec: SpecLike) -> tuple[Mapping[str, Any], int | None]:
    """The fields of a spec that a person passes, or names by the directory of its run; and its batch."""
    if isinstance(spec, str | os.PathLike) and Path(spec).expanduser().is_dir():
        return _written(RunDirectory.reopen(Path(spec).expanduser()).path)
    given = load_spec(spec)
    fields = {name: getattr(given, name) for name in given.model_fields_set}
    return fields, given.evaluation.batch or given.global_batch_size


def _written(folder: Path) -> tuple[Mapping[str, Any], int | None]:
    """The same of a run, as it has written them down."""
    fields, where = read_fields(folder, SPEC_FILE), folder / SPEC_FILE
    evaluation = value(dict[str, Any] | None, fields.get("evaluation"), f"{where}: evaluation")
    batch = (evaluation or {}).get("batch") or fields.get("global_batch_size")
    return fields, value(int | None, batch, f"{where}: batch")


def _told(plan: Mapping[str, Any], where: str, batch: int | None) -> tuple[str, int]:
    """Backend and batch by what a plan says; `batch` goes before that.

    Raises:
        IsotrainError: It says nothing of the kind.
    """
    backend = value(str, plan.get("backend"), f"{where}: backend")
    count = batch or value(int, plan.get("global_batch_size", 1), f"{where}: global_batch_size")
    if count < 1:
        raise IsotrainError(f"{where}: expected a batch of at least 1, received {count}.")
    return backend, count


def _found_again(model: Any, where: str) -> Any:
    """The model of a spec as it was written down; of this program's own script, the callable itself.

    Raises:
        SpecError: It is not there.
    """
    if isinstance(model, Mapping):
        return {name: _found_again(each, where) for name, each in model.items()}
    if _is_lost(model):
        raise SpecError(
            f"{where}: the model was {model!r}, which cannot be found again from its name."
            " Pass the spec that was run, as spec=..., or --spec on the command line."
        )
    return _of_this_program(model)


def _of_this_program(reference: Any) -> Any:
    is_own = isinstance(reference, str) and reference.startswith("__main__:")
    return import_strings.resolve(reference) if is_own else reference


def _is_lost(written: Any) -> bool:
    """Whether what a spec held is described in words from which nobody finds it again."""
    if not isinstance(written, str):
        return written is None
    if written.startswith("__main__:"):
        own = vars(sys.modules["__main__"])
        return written.partition(":")[2].partition(".")[0] not in own or "<" in written
    return written.startswith("<") or "<locals>" in written or "<lambda>" in written
