"""Readers of initial weights: files, run directories, checkpoints and functions, as lazy mappings."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.folder import checkpoint_at
from isotrain.core.checkpoints.safetensors_file import SafetensorsFile
from isotrain.core.checkpoints.tensor_part import StoredTensor
from isotrain.core.contracts.backend.group_protocols import WeightsFileGroup
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.data.arrays import as_array
from isotrain.core.errors import IsotrainError, UnsupportedError
from isotrain.core.session.weights.weights_file import AVERAGE, WEIGHTS_FILE
from isotrain.core.spec import import_strings
from isotrain.core.system.files import is_url

PORTION_BYTES = 2**26
"""Bytes of state that are read at a time; a larger tensor is read by itself."""


def portions(names: Iterable[str], nbytes: Callable[[str], int]) -> Iterator[list[str]]:
    """Groups tensor names into portions of at most `PORTION_BYTES`, in order."""
    portion, filled = list[str](), 0
    for name in names:
        if portion and filled + nbytes(name) > PORTION_BYTES:
            yield portion
            portion, filled = [], 0
        portion.append(name)
        filled += nbytes(name)
    if portion:
        yield portion


Weights = Mapping[str, np.ndarray]
_OTHER_STATE = ("optimizer/", "loss-scale/", "random/", "metrics/", "execution/")


def open_weights(source: Any, group: ReplicaGroup) -> Weights:
    """Opens the `initial_weights` source of a spec.

    Args:
        source: Path or URL; or a callable that returns weights or a Keras model, or an import string of one.
        group: Replica group, which reads file formats of its framework.

    Returns:
        Arrays by name; they may be read from storage when accessed.

    Raises:
        IsotrainError: The source does not exist, or cannot be read.
    """
    if callable(source) or import_strings.syntax_problem(source) is None:
        return _returned_by(import_strings.resolve(source))
    path = Path(source)
    if is_url(source) or path.is_dir():
        return stored_weights(source)
    if not path.is_file():
        raise IsotrainError(f"initial_weights: there is no file or folder {source}.")
    reader: Callable[[Path], Weights] | None = _READERS.get(path.suffix)
    if reader is not None:
        return reader(path)
    if not isinstance(group, WeightsFileGroup):
        raise UnsupportedError(
            f"initial_weights: {path}: this backend reads weights from .safetensors and .npz files only."
        )
    return group.read_weights_file(path)


def _returned_by(function: Callable[[], Any]) -> Weights:
    returned = function()
    if not isinstance(returned, Mapping):
        weights = list(getattr(returned, "weights", None) or ())
        if not weights or not all(hasattr(each, "path") for each in weights):
            raise IsotrainError(
                f"initial_weights: {import_strings.describe(function)} returned"
                f" {type(returned).__name__!r}; expected {{name: array}}, or a Keras model."
            )
        returned = {each.path: each.numpy() for each in weights}
        if len(returned) < len(weights):
            raise IsotrainError(
                f"initial_weights: {import_strings.describe(function)}: several weights of that model have"
                " the same name. Return {name: array}."
            )
    return {str(name): as_array(value, str(name)) for name, value in returned.items()}


class StoredWeights(Mapping[str, np.ndarray]):
    """Weights in a run directory or checkpoint, by name; each is read when it is accessed.

    Attributes:
        dtypes: Stored dtype of each weight; bfloat16 is read as float32.
    """

    def __init__(self, dtypes: Mapping[str, str], read: Callable[[str], np.ndarray]) -> None:
        self.dtypes = dtypes
        self._read = read

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads one weight, in its stored shape and dtype."""
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.dtypes)

    def __len__(self) -> int:
        return len(self.dtypes)


def stored_weights(location: str) -> StoredWeights:
    """The final weights in a run directory; else the weights of the checkpoint at a path or URL.

    Raises:
        CheckpointError: There are no weights, or they cannot be read.
    """
    file = Path(location) / WEIGHTS_FILE
    return _from_file(file) if file.is_file() else _from_checkpoint(checkpoint_at(location))


def _from_file(path: Path) -> StoredWeights:
    file = SafetensorsFile(path)
    return StoredWeights(file.dtypes, file.read)


def _from_checkpoint(checkpoint: Checkpoint) -> StoredWeights:
    """The weights in a checkpoint: their average (`ema`, `swa`); else those of replica 0 if these differ."""
    sections, dtypes = {}, {}
    for section in ("state", "replica-0", AVERAGE):
        for name, tensor in _tensors(checkpoint, section).items():
            if not name.startswith(_OTHER_STATE):
                sections[name], dtypes[name] = section, tensor.dtype
    return StoredWeights(dtypes, lambda name: checkpoint.read_part(sections[name], name))


def _tensors(checkpoint: Checkpoint, section: str) -> Mapping[str, StoredTensor]:
    return checkpoint.tensors(section) if section in checkpoint.sections() else {}


def _npz(path: Path) -> Weights:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise IsotrainError(
            f"initial_weights: {os.fspath(path)} cannot be read: {error}."
        ) from error


_READERS: dict[str, Callable[[Path], Weights]] = {
    ".safetensors": _from_file,
    ".npz": _npz,
}
