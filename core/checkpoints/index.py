"""Index of a checkpoint: the shards of each tensor and their files, validated before any is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from isotrain.core.checkpoints.dtypes import CODES, stored_dtype
from isotrain.core.checkpoints.manifest import PartRecord, TensorFileRecord
from isotrain.core.checkpoints.safetensors_shard import MAX_HEADER_BYTES
from isotrain.core.checkpoints.tensor_part import MAX_AXES, StoredTensor, is_possible_shape
from isotrain.core.errors import CheckpointError

_MAX_PARTS = 4096


@dataclass(frozen=True)
class IndexedPart:
    """A shard and the file that has it."""

    file: TensorFileRecord
    record: PartRecord


Index = Mapping[str, Mapping[str, list[IndexedPart]]]
"""Shards of each tensor, by section and tensor name."""


def index(files: Iterable[TensorFileRecord], where: str) -> Index:
    """Builds and validates the index of all writers' tensor files; errors name the location `where`.

    Raises:
        CheckpointError: A record is impossible, or the shards of a tensor do not make up the full tensor.
    """
    sections: dict[str, dict[str, list[IndexedPart]]] = {}
    for file in files:
        _check_file(file, f"{where}: {file.name}")
        tensors = sections.setdefault(file.section, {})
        for record in file.tensors:
            tensors.setdefault(record.name, []).append(IndexedPart(file, record))
    for section, tensors in sections.items():
        for name, parts in tensors.items():
            _check_tensor([part.record for part in parts], f"{where}: {section}: {name!r:.200}")
    return sections


def describe_tensor(parts: list[IndexedPart]) -> StoredTensor:
    """Describes the full tensor of these shards."""
    first = parts[0].record
    nbytes = sum(part.record.bytes for part in parts)
    return StoredTensor(tuple(first.global_shape), first.dtype, nbytes, len(parts))


def _check_file(file: TensorFileRecord, where: str) -> None:
    end = file.header_bytes
    for record in file.tensors:
        _check_part(record, f"{where}: {record.name!r:.200}")
        if record.start != end:
            raise CheckpointError(
                f"{where}: {record.name!r:.200} begins at {record.start}, expected {end}."
            )
        end += record.bytes
    if not (8 <= file.header_bytes <= MAX_HEADER_BYTES and end == file.bytes):
        raise CheckpointError(f"{where}: its tensors end at {end}, and it has {file.bytes} bytes.")


def _check_part(record: PartRecord, where: str) -> None:
    if record.dtype not in CODES:
        raise CheckpointError(
            f"{where}: expected a dtype of {', '.join(CODES)}, received {record.dtype!r:.60}."
        )
    shapes = (record.shape, record.offset, record.global_shape)
    if len({len(each) for each in shapes}) > 1 or len(record.shape) > MAX_AXES:
        raise CheckpointError(
            f"{where}: expected a shape, an offset and a global shape of the same length, up to {MAX_AXES}."
        )
    is_inside = all(
        min(first, n) >= 0 and first + n <= size for n, first, size in zip(*shapes, strict=True)
    )
    item = stored_dtype(record.dtype).itemsize
    is_possible = is_possible_shape(record.global_shape, item)
    if not (is_inside and is_possible and math.prod(record.shape) * item == record.bytes):
        raise CheckpointError(
            f"{where}: {record.bytes} bytes cannot be {record.dtype} of shape {record.shape!s:.200} at"
            f" {record.offset!s:.200} of {record.global_shape!s:.200}."
        )


def _check_tensor(records: list[PartRecord], where: str) -> None:
    """Checks that the shards belong to one tensor, do not overlap, and cover it.

    Raises:
        CheckpointError: They do not.
    """
    first = records[0]
    if any((r.dtype, r.global_shape) != (first.dtype, first.global_shape) for r in records):
        raise CheckpointError(f"{where}: its parts are of tensors of several shapes or dtypes.")
    if len(records) > _MAX_PARTS:
        raise CheckpointError(f"{where}: {len(records)} parts; at most {_MAX_PARTS} are read.")
    filled = sum(math.prod(record.shape) for record in records)
    if filled != math.prod(first.global_shape) or _overlap(records):
        raise CheckpointError(
            f"{where}: its {len(records)} parts overlap or leave gaps: they have {filled} numbers, and"
            f" it has {math.prod(first.global_shape)}. Did every writer of it write?"
        )


def _overlap(records: list[PartRecord]) -> bool:
    starts = np.array([record.offset for record in records], "int64")
    ends = starts + np.array([record.shape for record in records], "int64")
    return any(
        bool(np.all((starts[n] < ends[:n]) & (starts[:n] < ends[n]), axis=1).any())
        for n in range(1, len(records))
    )
