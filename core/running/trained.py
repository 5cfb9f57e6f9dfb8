"""A model that a run has trained, read from the run's directory or a checkpoint."""

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
from isotrain.core.launching.run_directory import PLAN_FILE, SPEC_FILE, read_fields
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


@dataclass(frozen=True)
class Trained:
    """A trained model, as the run that trained it has written it down.

    Attributes:
        location: Of the run's directory or the checkpoint, with the weights.
        plan: What the run followed.
        written: Its spec; callables by name.
        given: The spec from whoever knows it; None where what was written must do.
    """

    location: str
    plan: Mapping[str, Any]
    written: Mapping[str, Any]
    given: TrainingSpec | None

    @classmethod
    def of(cls, run: RunLike, spec: SpecLike | None = None) -> Trained:
        """Finds out what a run has trained.

        Args:
            run: Which has finished, or left a checkpoint.
            spec: What was trained, where it has not been written down.

        Raises:
            IsotrainError: There is neither a run with weights nor a checkpoint.
        """
        location = _location(run)
        given = None if spec is None else load_spec(spec)
        if (Path(location) / WEIGHTS_FILE).is_file():
            folder = Path(location)
            plan, written = (read_fields(folder, name) for name in (PLAN_FILE, SPEC_FILE))
            return cls(location, plan, written, given)
        try:
            checkpoint = checkpoint_at(location)
        except CheckpointError as error:
            raise IsotrainError(
                f"{location}: expected the directory of a run that has finished, or a checkpoint. It has no"
                f" {WEIGHTS_FILE} (isotrain.launch saves none), and: {error}"
            ) from error
        written = checkpoint.run
        return cls(checkpoint.location, written.get("plan", {}), written.get("spec", {}), given)

    @property
    def backend(self) -> str:
        """The one that it was trained under."""
        return str(self.plan.get("backend"))

    @property
    def model(self) -> Any:
        """What makes it, as in a spec.

        Raises:
            SpecError: It cannot be found again.
        """
        return _found_again(self._fields.get("model"), self.location)

    @property
    def data(self) -> tuple[Any, Mapping[str, Any]] | None:
        """What it was trained on, and with which arguments; None where that cannot be found again."""
        data = self._fields.get("data")
        if _is_lost(data):
            return None
        return _of_this_program(data), self._fields.get("data_args", {})

    @property
    def _fields(self) -> Mapping[str, Any]:
        if self.given is None:
            return self.written
        return {name: getattr(self.given, name) for name in self.given.model_fields_set}

    def spec(self, data: Any) -> TrainingSpec:
        """A spec with which the model is built, and trained no further.

        Args:
            data: What its data field has.

        Raises:
            SpecError: The model cannot be found again.
        """
        evaluated = (self.written.get("evaluation") or {}).get("batch")
        return load_spec(
            {
                **{name: value for name, value in self._fields.items() if name in _OF_THE_MODEL},
                "model": self.model,
                "data": data,
                "loss": "mean_squared_error",
                "optimizer": {"name": "sgd", "lr": 1.0},  # it has no slots
                "global_batch": evaluated or self.plan.get("global_batch", 1),
                "epochs": 1,
            }
        )


def _location(run: RunLike) -> str:
    """An absolute path, or a URL."""
    if isinstance(run, Checkpoint):
        return run.location
    text = os.fspath(run) if isinstance(run, str | os.PathLike) else str(run.run_directory)
    return text if is_url(text) else str(Path(text).expanduser().resolve())


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
