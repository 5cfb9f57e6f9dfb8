"""A model that a run has trained, read from the run's directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from isotrain.core.errors import IsotrainError, SpecError
from isotrain.core.plain_records import read_json
from isotrain.core.running.weights_file import WEIGHTS_FILE
from isotrain.core.spec import references
from isotrain.core.spec.files import Source, load_spec
from isotrain.core.spec.training_spec import TrainingSpec

_OF_THE_MODEL = (
    *("name", "model", "model_args", "seed", "precision", "record", "device", "threads"),
    *("backend_options", "plugins", "timeouts"),
)
"""The fields of a spec that bear on what a trained model is and gives."""


class HasRunDirectory(Protocol):
    """What a `RunResult` is to those who take its model out."""

    @property
    def run_directory(self) -> Path:
        """Where the run's files are."""


RunLike = str | os.PathLike[str] | HasRunDirectory
"""A run that has finished: its result, or its directory."""


@dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
        weights: The file with its weights.
        backend: That it was trained under.
        fields: Of a spec, those that make the model.
        batch: Samples that are predicted for at a time, over all replicas.
        data: What it was trained on, and with which arguments; None where that cannot be found again.
    """

    weights: Path
    backend: str
    fields: Mapping[str, Any]
    batch: int
    data: tuple[Any, Mapping[str, Any]] | None

    @classmethod
    def of(cls, run: RunLike, spec: Source | None = None) -> Trained:
        """Finds out what a run has trained.

        Args:
            run: It has finished.
            spec: What was trained, where the run directory cannot say it.

        Raises:
            IsotrainError: It is no directory of a run, or there are no final weights in it.
            SpecError: The model function cannot be found again.
        """
        folder = Path(run) if isinstance(run, str | os.PathLike) else run.run_directory
        plan, written = _read(folder / "plan.json"), _read(folder / "spec.json")
        weights = folder / WEIGHTS_FILE
        if not weights.is_file():
            raise IsotrainError(
                f"{folder} has no {WEIGHTS_FILE}: the run has not finished, or it was one of"
                " isotrain.launch, which saves no weights."
            )
        if spec is None:
            fields = {**written, "model": _found_again(written.get("model"), folder)}
        else:
            given = load_spec(spec)
            fields = {name: getattr(given, name) for name in given.model_fields_set}
        data = fields.get("data")
        known = None if _is_lost(data) else (_of_this_program(data), fields.get("data_args", {}))
        batch = (written.get("evaluation") or {}).get("batch") or plan.get("global_batch", 1)
        own_fields = {name: fields[name] for name in _OF_THE_MODEL if name in fields}
        return cls(weights, str(plan.get("backend")), own_fields, batch, known)

    def spec(self, data: Any) -> TrainingSpec:
        """A spec with which the model is built, and trained no further.

        Args:
            data: What its data field has.
        """
        return load_spec(
            {
                **self.fields,
                "data": data,
                "loss": "mean_squared_error",
                "optimizer": {"name": "sgd", "lr": 1.0},  # it has no slots
                "global_batch": self.batch,
                "epochs": 1,
            }
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except FileNotFoundError as error:
        raise IsotrainError(
            f"{path} cannot be read: {error}. Expected the directory of a run: what `isotrain run` or"
            " isotrain.run left in runs/, or in --run-dir."
        ) from error
    if not isinstance(found, dict):
        raise IsotrainError(f"{path}: expected an object, received {found!r:.60}.")
    return found


def _found_again(model: Any, folder: Path) -> Any:
    """The model of a spec as it was written down; of this program's own script, the callable itself.

    Raises:
        SpecError: It is not there.
    """
    if isinstance(model, Mapping):
        return {name: _found_again(each, folder) for name, each in model.items()}
    if _is_lost(model):
        raise SpecError(
            f"{folder / 'spec.json'}: the model was {model!r}, which cannot be found again from its name."
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
