"""Standalone safetensors files, from any writer: the header is validated before tensors are read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.core.checkpoints.dtypes import CODES, from_stored, stored_dtype
from isotrain.core.checkpoints.open_storage import storage_at
from isotrain.core.checkpoints.safetensors_shard import (
    MAX_HEADER_BYTES,
    METADATA_KEY,
    write_tensors,
)
from isotrain.core.checkpoints.tensor_part import MAX_AXES, Section, is_possible_shape
from isotrain.core.errors import CheckpointError

_LENGTH_BYTES = 8
_DTYPES = {code: name for name, code in CODES.items()}


def write_safetensors(path: Path, tensors: Section) -> None:
    """Writes a safetensors file atomically.

    Raises:
        CheckpointError: A tensor cannot be stored.
        OSError: The file cannot be written.
    """
    write_tensors(storage_at(path.parent), ".", path.name, "", tensors)


@dataclass(frozen=True)
class _Entry:
    """Header entry of a tensor; `start` and `stop` are byte offsets from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """A safetensors file whose tensors are read lazily.

    Attributes:
        path: Path of the file.
        dtypes: Stored dtype of each tensor, by name; bfloat16 is read as float32.
    """

    def __init__(self, path: Path) -> None:
        """Reads and validates the header.

        Raises:
            CheckpointError: The file cannot be read, or its header is invalid.
        """
        self.path = path
        try:
            self._entries = self._read_entries()
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}.") from None
        self.dtypes = {name: entry.dtype for name, entry in self._entries.items()}

    def _read_entries(self) -> dict[str, _Entry]:
        size = self.path.stat().st_size
        with self.path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            first = _LENGTH_BYTES + length
            if first > size or length > MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            header = json.loads(stream.read(length).decode())
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        header.pop(METADATA_KEY, None)
        entries = {name: _parsed_entry(name, each, first, size) for name, each in header.items()}
        _require_disjoint(entries)
        return entries

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor into a new array; float32 for bfloat16.

        Raises:
            CheckpointError: The file has become shorter since it was opened.
        """
        entry = self._entries[name]
        dtype = stored_dtype(entry.dtype)
        with self.path.open("rb") as stream:
            stream.seek(entry.start)
            stored = np.fromfile(stream, dtype, (entry.stop - entry.start) // dtype.itemsize)
        if stored.nbytes != entry.stop - entry.start:
            raise CheckpointError(f"{self.path} is cut off in {name!r}.")
        native = stored.astype(dtype.newbyteorder("="), copy=False)
        return from_stored(native, entry.dtype).reshape(entry.shape)

    def read_all(self) -> dict[str, np.ndarray]:
        """Reads every tensor, by name, in its stored shape and dtype (bfloat16 as float32)."""
        return {name: self.read(name) for name in self._entries}


def _parsed_entry(name: str, plain: Any, first: int, size: int) -> _Entry:
    """Parses and validates a tensor's header entry, with the first byte of tensors and the size of the file.

    Raises:
        ValueError: The entry is invalid.
    """
    if not isinstance(plain, Mapping):
        raise ValueError(f"{name!r} is described by {plain!r:.60}")
    dtype = _DTYPES.get(str(plain.get("dtype")))
    if dtype is None:
        raise ValueError(
            f"{name!r} has the dtype {plain.get('dtype')!r:.20}; known are {', '.join(_DTYPES)}"
        )
    shape, offsets = _integers(name, plain.get("shape")), _integers(name, plain.get("data_offsets"))
    if len(shape) > MAX_AXES or len(offsets) != 2:
        raise ValueError(f"{name!r} has the shape {shape!r:.60} at {offsets!r:.60}")
    start, stop = (first + each for each in offsets)
    item = stored_dtype(dtype).itemsize
    if not (
        is_possible_shape(shape, item) and stop - start == math.prod(shape) * item and stop <= size
    ):
        raise ValueError(
            f"{name!r} of shape {shape} would be the bytes {start} to {stop} of {size}"
        )
    return _Entry(dtype, shape, start, stop)


def _require_disjoint(entries: Mapping[str, _Entry]) -> None:
    """Refuses overlapping tensors, with which a small file could expand to many large ones."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start < end and entry.start < entry.stop:
            raise ValueError(f"{name!r} begins at byte {entry.start}, within another tensor")
        end = max(end, entry.stop)


def _integers(name: str, plain: Any) -> tuple[int, ...]:
    """Parses a list of integers of at least 0."""
    is_valid = isinstance(plain, list) and all(type(each) is int and each >= 0 for each in plain)
    if not is_valid:
        raise ValueError(f"{name!r} has a shape or data offsets {plain!r:.60}")
    return tuple(plain)
