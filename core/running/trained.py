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
from isotrain.core.checkpoints.finding import checkpoint_at
from isotrain.core.errors import CheckpointError, IsotrainError, SpecError
from isotrain.core.launching.run_directory import (
    PLAN_FILE,
    SPEC_FILE,
    has_checkpoints_itself,
    read_fields,
)
from isotrain.core.plain_records import value
from isotrain.core.running.weights_file import WEIGHTS_FILE
from isotrain.core.spec import references
from isotrain.core.spec.files import SpecLike, load_spec
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.urls import is_url

_OF_THE_MODEL = (
    *("name", "model_args", "seed", "precision", "record", "device", "threads"),
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


_Table = dict[str, Any]


@dataclass(frozen=True)
class Trained:
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
    def of(cls, run: RunLike, spec: SpecLike | None = None) -> Trained:
        """Finds out what a run has trained.

        Args:
            run: Which has finished, or left a checkpoint.
            spec: What was trained, where it has not been written down by a run that the person names.

        Raises:
            IsotrainError: There is neither a run with weights nor a checkpoint, or a file of it is damaged.
        """
        given = None if spec is None else load_spec(spec)
        location = _location(run)
        if not _is_of_a_run(run, location):
            checkpoint = run if isinstance(run, Checkpoint) else _checkpoint(location)
            return cls._of_checkpoint(checkpoint, given)
        folder = Path(location)
        plan, written = (read_fields(folder, name) for name in (PLAN_FILE, SPEC_FILE))
        evaluation = value(
            _Table | None, written.get("evaluation"), f"{folder / SPEC_FILE}: evaluation"
        )
        told = _told(plan, str(folder / PLAN_FILE), (evaluation or {}).get("batch"))
        if not (folder / WEIGHTS_FILE).is_file():
            location = _checkpoint(location).location
        return cls(location, *told, written if given is None else _fields(given))

    @classmethod
    def _of_checkpoint(cls, checkpoint: Checkpoint, given: TrainingSpec | None) -> Trained:
        """Takes from the checkpoint a backend's name, and from the person what names code."""
        where = f"{checkpoint.location}: run.json: plan"
        plan = value(_Table, checkpoint.run.get("plan"), where)
        if given is None:
            return cls(checkpoint.location, *_told(plan, where, None), None)
        told = _told(plan, where, given.evaluation.batch or given.global_batch)
        return cls(checkpoint.location, *told, _fields(given))

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
                " command line: your file, or the spec.json of the run's directory. Or name that directory"
                " instead, if the run is yours."
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
                "global_batch": self.batch,
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


def _fields(spec: TrainingSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.model_fields_set}


def _told(plan: Mapping[str, Any], where: str, batch: Any) -> tuple[str, int]:
    """Backend and batch by what a plan says; `batch` goes before that.

    Raises:
        IsotrainError: It says nothing of the kind.
    """
    backend = value(str, plan.get("backend"), f"{where}: backend")
    count = value(int, plan.get("global_batch", 1) if batch is None else batch, f"{where}: batch")
    if count < 1:
        raise IsotrainError(f"{where}: batch: expected at least 1, received {count}.")
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
    return references.resolve(reference) if is_own else reference


def _is_lost(written: Any) -> bool:
    """Whether what a spec held is described in words from which nobody finds it again."""
    if not isinstance(written, str):
        return written is None
    if written.startswith("__main__:"):
        own = vars(sys.modules["__main__"])
        return written.partition(":")[2].partition(".")[0] not in own or "<" in written
    return written.startswith("<") or "<locals>" in written or "<lambda>" in written
