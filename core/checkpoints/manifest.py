"""JSON files of a checkpoint, validated when read; `docs/checkpoints.md` describes the format."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from isotrain.core.checkpoints.storage import Storage
from isotrain.core.errors import CheckpointError, IsotrainError
from isotrain.core.json_format import json_line
from isotrain.core.json_records import json_value, record

FORMAT = 1
"""Version of the format, in every JSON file of a checkpoint but `run.json`."""
MANIFEST = "manifest.json"
_MAX_BYTES = 2**27
"""Limit on the size of a JSON file: isotrain writes no larger one."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_CHECKSUM_END = re.compile(rb', "checksum": (\d{1,10})}\n\Z')

T = TypeVar("T")


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file.

    Attributes:
        name: Name of the file, without folder.
        bytes: Size in bytes.
        checksum: CRC-32 of the content.
    """

    name: str
    bytes: int
    checksum: int


@dataclass(frozen=True)
class PartRecord:
    """A tensor, or a shard of one, in a file.

    Attributes:
        name: Name of the tensor.
        dtype: Dtype of the tensor.
        start: Byte offset of the shard in the file.
        bytes: Size of the shard in bytes.
        checksum: CRC-32 of the shard's bytes.
        shape: Shape of the shard.
        global_shape: Shape of the full tensor.
        offset: Offset of the shard in the full tensor, an index per axis.
    """

    name: str
    dtype: str
    start: int
    bytes: int
    checksum: int
    shape: list[int]
    global_shape: list[int]
    offset: list[int]


@dataclass(frozen=True)
class TensorFileRecord:
    """A safetensors file.

    Attributes:
        name: Name of the file, without folder.
        section: Name of the section whose tensors it has.
        bytes: Size of the file in bytes.
        header_bytes: Size of the header in bytes; the tensors follow it.
        header_checksum: CRC-32 of the header.
        tensors: Tensors or shards in the order of their bytes, without gaps.
    """

    name: str
    section: str
    bytes: int
    header_bytes: int
    header_checksum: int
    tensors: list[PartRecord]


@dataclass(frozen=True)
class WriterRecord:
    """The files of one writer.

    Attributes:
        format: Version of the format.
        writer: Index of the writer.
        files: Records of its tensor files.
    """

    format: int
    writer: int
    files: list[TensorFileRecord]


@dataclass(frozen=True)
class Manifest:
    """The manifest, which commits a checkpoint.

    Attributes:
        format: Version of the format.
        step: Number of steps done.
        token: Name of the folder with all other files.
        run: Record of `run.json`.
        writers: Record of each writer's JSON file, by index of the writer.
        files: Size of each safetensors file in bytes, by name.
    """

    format: int
    step: int
    token: str
    run: FileRecord
    writers: list[FileRecord]
    files: dict[str, int]


def plain_name(name: str, where: str) -> str:
    """Validates a name of a file or folder, and returns it.

    Raises:
        CheckpointError: The name has a path separator or other characters that are not portable.
    """
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{where}: {name[:80]!r} is no name of a file: expected letters, digits, `_`, `-` and `.`."
        )
    return name


def write_record(storage: Storage, path: str, record: WriterRecord) -> FileRecord:
    """Writes the record of a writer."""
    return write_json(storage, path, asdict(record))


def write_json(storage: Storage, path: str, fields: Mapping[str, Any]) -> FileRecord:
    """Writes a JSON file; NaN and infinite numbers become texts.

    Raises:
        CheckpointError: A value is not JSON-serializable.
        OSError: The file cannot be written.
    """
    try:
        content = f"{json_line(fields, default=None)}\n".encode()
    except TypeError as error:
        raise CheckpointError(f"{storage.where(path)}: {error}.") from None
    storage.replace(path, content)
    return FileRecord(path.rpartition("/")[2], len(content), zlib.crc32(content))


def write_manifest(storage: Storage, path: str, manifest: Manifest) -> None:
    """Writes the manifest, the last file of a checkpoint; it ends with its own CRC-32."""
    content = json_line(asdict(manifest)).removesuffix("}").encode()
    storage.replace(path, content + b', "checksum": %d}\n' % zlib.crc32(content))


def read_manifest(storage: Storage, path: str) -> Manifest:
    """Reads and verifies a manifest.

    Raises:
        FileNotFoundError: There is no manifest.
        CheckpointError: The manifest cannot be read, or is corrupted.
    """
    content = _content(storage, path)
    checksum = _CHECKSUM_END.search(content, max(0, len(content) - 40))
    if not checksum:
        raise CheckpointError(
            f"{storage.where(path)} is no manifest of a checkpoint, or is cut off."
        )
    if zlib.crc32(content[: checksum.start()]) != int(checksum[1]):
        raise CheckpointError(
            f"{storage.where(path)} is not as it was written: its checksum differs."
        )
    manifest = _parsed(Manifest, content[: checksum.start()] + b"}", storage.where(path))
    files = (manifest.run, *manifest.writers)
    for name in (manifest.token, *(each.name for each in files), *manifest.files):
        plain_name(name, storage.where(path))
    return manifest


def read_record(storage: Storage, folder: str, cls: type[T], file: FileRecord) -> T:
    """Reads a JSON file as a dataclass, and verifies size and checksum.

    Raises:
        CheckpointError: The file is missing, cannot be read, or is corrupted.
    """
    path = f"{folder}/{file.name}"
    return _parsed(cls, _verified_content(storage, path, file), storage.where(path))


def read_json(storage: Storage, folder: str, file: FileRecord) -> dict[str, Any]:
    """Reads a JSON object, and verifies size and checksum.

    Raises:
        CheckpointError: The file is missing, cannot be read, or is corrupted.
    """
    path = f"{folder}/{file.name}"
    return _object(_verified_content(storage, path, file), storage.where(path))


def read_new_record(storage: Storage, path: str) -> tuple[FileRecord, WriterRecord]:
    """Reads a writer's new record; returns it with the size and checksum of its file.

    Raises:
        CheckpointError: The file was removed, cannot be read, or is invalid.
    """
    name, where = path.rpartition("/")[2], storage.where(path)
    try:
        content = _content(storage, path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{where} is gone: does another process remove checkpoints here?"
        ) from None
    file = FileRecord(name, len(content), zlib.crc32(content))
    return file, _parsed(WriterRecord, content, where)


def _verified_content(storage: Storage, path: str, file: FileRecord) -> bytes:
    try:
        content = _content(storage, path)
    except FileNotFoundError:
        raise CheckpointError(f"{storage.where(path)} is missing.") from None
    if len(content) != file.bytes or zlib.crc32(content) != file.checksum:
        raise CheckpointError(
            f"{storage.where(path)} is not as it was written: {len(content)} bytes with the checksum"
            f" {zlib.crc32(content)}; the manifest has {file.bytes} with {file.checksum}."
        )
    return content


def _content(storage: Storage, path: str) -> bytes:
    """The content of a JSON file.

    Raises:
        FileNotFoundError: The file does not exist.
        CheckpointError: The file is too large, or cannot be read.
    """
    try:
        with storage.reading(path) as stream:
            size = stream.seek(0, os.SEEK_END)
            if size > _MAX_BYTES:
                raise CheckpointError(f"{storage.where(path)} is too large: {size} bytes.")
            stream.seek(0)
            return stream.read(size)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{storage.where(path)} cannot be read: {error}.") from error


def _parsed(cls: type[T], content: bytes, where: str) -> T:
    try:
        plain = _object(content, where)
        version = plain.get("format")
        if isinstance(version, int) and version > FORMAT:
            raise CheckpointError(
                f"{where}: format {version}; this isotrain reads up to {FORMAT}: install a newer one."
            )
        return record(cls, plain, where)
    except CheckpointError:
        raise
    except IsotrainError as error:
        raise CheckpointError(str(error)) from None


def _object(content: bytes, where: str) -> dict[str, Any]:
    try:
        plain = json_value(content, where)
    except IsotrainError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(plain, dict):
        raise CheckpointError(f"{where}: expected an object, received {plain!r:.60}.")
    return plain
