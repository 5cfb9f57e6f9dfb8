"""Where initial weights are read from, whatever their form: names, and arrays read when asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.finding import checkpoint_at
from isotrain.core.checkpoints.safetensors_file import SafetensorsFile
from isotrain.core.contracts.group import ReplicaGroup
from isotrain.core.data.sources import as_array
from isotrain.core.errors import IsotrainError
from isotrain.core.running.weights_file import WEIGHTS_FILE
from isotrain.core.spec import references

Weights = Mapping[str, np.ndarray]
_OTHER_STATE = ("optimizer/", "loss-scale/", "random/", "metrics/", "exchange/")


def weights_at(source: Any, group: ReplicaGroup) -> Weights:
    """Opens what a spec names as a source of weights.

    Args:
        source: A path or URL; or a callable, or a reference of one.
        group: Reads the files that are its framework's own.

    Raises:
        IsotrainError: There is nothing of the kind, or it cannot be read.
    """
    if callable(source) or references.syntax_problem(source) is None:
        return _given_by(references.resolve(source))
    path = Path(source)
    if "://" in source or path.is_dir():
        return _of_folder(source)
    if not path.is_file():
        raise IsotrainError(f"initial_weights: there is no file or folder {source}.")
    reader: Callable[[Path], Weights] | None = _READERS.get(path.suffix)
    return group.read_weights_file(path) if reader is None else reader(path)


def _given_by(function: Callable[[], Any]) -> Weights:
    found = function()
    if not isinstance(found, Mapping):
        raise IsotrainError(
            f"initial_weights: {references.describe(function)} returned {type(found).__name__!r}; expected"
            " {name: array}."
        )
    return {str(name): as_array(value, str(name)) for name, value in found.items()}


def _of_folder(source: str) -> Weights:
    """The weights of a run that has finished; else those of a checkpoint."""
    file = Path(source) / WEIGHTS_FILE
    if file.is_file():
        return _Lazy(SafetensorsFile(file))
    return _OfCheckpoint(checkpoint_at(source))


class _Lazy(Mapping[str, np.ndarray]):
    """A safetensors file of which each tensor is read when it is asked for."""

    def __init__(self, file: SafetensorsFile) -> None:
        self._file = file

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.dtypes)

    def __len__(self) -> int:
        return len(self._file.dtypes)


class _OfCheckpoint(Mapping[str, np.ndarray]):
    """The weights in a checkpoint; those of replica 0 where replicas held different ones."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._homes = {
            name: section
            for section in ("replica-0", "state")
            if section in checkpoint.sections()
            for name in checkpoint.tensors(section)
            if not name.startswith(_OTHER_STATE)
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._checkpoint.read_part(self._homes[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


def _npz(path: Path) -> Weights:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError) as error:
        raise IsotrainError(
            f"initial_weights: {os.fspath(path)} cannot be read: {error}."
        ) from error


_READERS: dict[str, Callable[[Path], Weights]] = {
    ".safetensors": lambda path: _Lazy(SafetensorsFile(path)),
    ".npz": _npz,
}
