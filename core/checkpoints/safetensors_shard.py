"""Safetensors files of a checkpoint: written, read and checksummed (CRC-32) block by block."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from isotrain.core.checkpoints import dtypes
from isotrain.core.checkpoints.dtypes import (
    CODES,
    block_index,
    blocks,
    from_stored,
    stored_dtype,
    to_stored,
)
from isotrain.core.checkpoints.manifest import PartRecord, TensorFileRecord
from isotrain.core.checkpoints.storage import Sink, Storage
from isotrain.core.checkpoints.tensor_part import Section, TensorPart
from isotrain.core.errors import CheckpointError

METADATA_KEY = "__metadata__"
"""Key of the metadata in a safetensors header, beside the names of tensors."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""


def write_tensors(
    storage: Storage, folder: str, name: str, section: str, tensors: Section
) -> TensorFileRecord:
    """Writes a safetensors file block by block, without copying a tensor in full.

    Returns:
        The record of the file.

    Raises:
        CheckpointError: A tensor cannot be stored.
        OSError: The file cannot be written.
    """
    if METADATA_KEY in tensors:
        raise CheckpointError(f"a tensor cannot be called {METADATA_KEY!r} in a safetensors file.")
    ordered = dict(sorted(tensors.items(), key=_by_item_size))
    header = _header(ordered)
    records = []
    with storage.writing(f"{folder}/{name}") as sink:
        sink.write(header)
        end = len(header)
        for each, part in ordered.items():
            checksum = _write(sink, each, part)
            records.append(_record(each, part, end, checksum))
            end += part.nbytes
    return TensorFileRecord(name, section, end, len(header), zlib.crc32(header), records)


def _by_item_size(item: tuple[str, TensorPart]) -> tuple[int, str]:
    """Sort key, largest item size first: aligns every tensor to its item size."""
    return -stored_dtype(item[1].dtype).itemsize, item[0]


def _header(tensors: Section) -> bytes:
    """The header: length of the JSON text in 8 bytes, and the text, padded to a multiple of 8 bytes."""
    entries, end = {}, 0
    for name, part in tensors.items():
        start, end = end, end + part.nbytes
        entries[name] = _entry(part.dtype, part.array.shape, start, end)
    return _text(entries)


def _entry(dtype: str, shape: Sequence[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}


def _text(entries: Mapping[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(sink: Sink, name: str, part: TensorPart) -> int:
    """Writes the elements; returns their CRC-32."""
    checksum = 0
    for offset, extent in blocks(part.array.shape, stored_dtype(part.dtype).itemsize):
        try:
            block = to_stored(part.array[block_index(offset, extent)], part.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None
        data = block.reshape(-1).data.cast("B")
        checksum = zlib.crc32(data, checksum)
        sink.write(data)
    return checksum


def _record(name: str, part: TensorPart, start: int, checksum: int) -> PartRecord:
    shapes = list(part.array.shape), list(part.global_shape), list(part.offset)
    return PartRecord(name, part.dtype, start, part.nbytes, checksum, *shapes)


def check_header(stream: IO[bytes], file: TensorFileRecord, where: str) -> None:
    """Checks that the header of a file agrees with its writer's record.

    Raises:
        CheckpointError: It does not.
        OSError: The file cannot be read.
    """
    stream.seek(0)
    header = bytearray(file.header_bytes)
    _fill(stream, memoryview(header), where)
    if zlib.crc32(header) != file.header_checksum:
        raise CheckpointError(
            f"{where} is not as it was written: the checksum of its header differs."
        )
    first = file.header_bytes
    entries = {
        each.name: _entry(
            each.dtype, each.shape, each.start - first, each.start - first + each.bytes
        )
        for each in file.tensors
    }
    if header != _text(entries):
        raise CheckpointError(f"{where}: its header does not agree with the record of its writer.")


def read_into(stream: IO[bytes], part: PartRecord, target: np.ndarray, where: str) -> bool:
    """Reads a stored shard directly into an array, if dtype, shape and layout are those in the file.

    Returns:
        Whether it was read.

    Raises:
        CheckpointError: The checksum differs, or the file is too short.
        OSError: The file cannot be read.
    """
    matches = target.dtype == stored_dtype(part.dtype) and target.shape == tuple(part.shape)
    if not (matches and target.flags.c_contiguous):
        return False
    stream.seek(part.start)
    checksum, data = 0, target.reshape(-1).view(np.uint8).data
    for start in range(0, part.bytes, dtypes.BLOCK_BYTES):
        block = data[start : start + dtypes.BLOCK_BYTES]
        _fill(stream, block, where)
        checksum = zlib.crc32(block, checksum)
    _require_checksum(checksum, part, where)
    return True


def read_blocks(
    stream: IO[bytes], part: PartRecord, where: str
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Reads a stored shard block by block, each in a shape of its own and the dtype of `array_dtype`.

    Yields:
        Offset of each block in the shard, an index per axis, and the block.

    Raises:
        CheckpointError: The checksum differs (after the last block), or the file is too short.
        OSError: The file cannot be read.
    """
    dtype = stored_dtype(part.dtype)
    stream.seek(part.start)
    checksum = 0
    for offset, extent in blocks(tuple(part.shape), dtype.itemsize):
        block = np.empty(extent, dtype)
        data = block.reshape(-1).data.cast("B")
        _fill(stream, data, where)
        checksum = zlib.crc32(data, checksum)
        yield offset, from_stored(block, part.dtype)
    _require_checksum(checksum, part, where)


def _require_checksum(checksum: int, part: PartRecord, where: str) -> None:
    if checksum != part.checksum:
        raise CheckpointError(
            f"{where} is not as it was written: the checksum of {part.name!r} is {checksum}; it was"
            f" {part.checksum}."
        )


def _fill(stream: IO[bytes], data: memoryview, where: str) -> None:
    while data:
        count = stream.readinto(data)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{where} is cut off.")
        data = data[count:]
