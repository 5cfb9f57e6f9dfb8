"""The JSON files of a checkpoint, read back with every field checked; `docs/checkpoints.md` explains them."""

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
"""The version of the format, in every JSON file of a checkpoint but `run.json`."""
MANIFEST = "manifest.json"
_MAX_BYTES = 2**27
"""A larger JSON file was not written by isotrain."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_CHECKSUM_END = re.compile(rb', "checksum": (\d{1,10})}\n\Z')

T = TypeVar("T")


@dataclass(frozen=True)
class FileRecord:
    """A file that is what it was when these were counted.

    Attributes:
        name: Without a folder.
        bytes: How many.
        checksum: CRC-32 of all of them.
    """

    name: str
    bytes: int
    checksum: int


@dataclass(frozen=True)
class PartRecord:
    """A tensor, or a part of one, in a file.

    Attributes:
        name: Of the tensor.
        dtype: Its own.
        start: Where its bytes begin in the file.
        bytes: How many they are.
        checksum: CRC-32 of them.
        shape: Of the part.
        global_shape: Of the whole tensor.
        offset: Of the part in it.
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
        name: Without a folder.
        section: Whose tensors it has.
        bytes: How many.
        header_bytes: How many lie before the tensors.
        header_checksum: CRC-32 of these.
        tensors: In the order of their bytes, without gaps.
    """

    name: str
    section: str
    bytes: int
    header_bytes: int
    header_checksum: int
    tensors: list[PartRecord]


@dataclass(frozen=True)
class WriterRecord:
    """What one writer wrote."""

    format: int
    writer: int
    files: list[TensorFileRecord]


@dataclass(frozen=True)
class Manifest:
    """What makes a checkpoint.

    Attributes:
        format: The version.
        step: Steps that were done.
        token: The folder with all other files.
        run: `run.json`.
        writers: The record of each writer, in their order.
        files: The bytes of every safetensors file.
    """

    format: int
    step: int
    token: str
    run: FileRecord
    writers: list[FileRecord]
    files: dict[str, int]


def plain_name(name: str, where: str) -> str:
    """A name that may be a file's or a folder's.

    Raises:
        CheckpointError: It leads elsewhere, or has letters that not every file system has.
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
        CheckpointError: It holds what JSON cannot.
        OSError: It cannot be written.
    """
    try:
        content = f"{json_line(fields, default=None)}\n".encode()
    except TypeError as error:
        raise CheckpointError(f"{storage.where(path)}: {error}.") from None
    storage.replace(path, content)
    return FileRecord(path.rpartition("/")[2], len(content), zlib.crc32(content))


def write_manifest(storage: Storage, path: str, manifest: Manifest) -> None:
    """Writes the last file of a checkpoint, which ends with the checksum of itself."""
    content = json_line(asdict(manifest)).removesuffix("}").encode()
    storage.replace(path, content + b', "checksum": %d}\n' % zlib.crc32(content))


def read_manifest(storage: Storage, path: str) -> Manifest:
    """Reads a manifest.

    Raises:
        FileNotFoundError: It is not there.
        CheckpointError: It cannot be read, or is not as it was written.
    """
    content = _content(storage, path)
    seal = _CHECKSUM_END.search(content, max(0, len(content) - 40))
    if not seal:
        raise CheckpointError(
            f"{storage.where(path)} is no manifest of a checkpoint, or is cut off."
        )
    if zlib.crc32(content[: seal.start()]) != int(seal[1]):
        raise CheckpointError(
            f"{storage.where(path)} is not as it was written: its checksum differs."
        )
    found = _parsed(Manifest, content[: seal.start()] + b"}", storage.where(path))
    files = (found.run, *found.writers)
    for name in (found.token, *(each.name for each in files), *found.files):
        plain_name(name, storage.where(path))
    return found


def read_record(storage: Storage, folder: str, cls: type[T], file: FileRecord) -> T:
    """Reads a JSON file whose size and checksum are known.

    Raises:
        CheckpointError: It is not there, cannot be read, or is not as it was written.
    """
    path = f"{folder}/{file.name}"
    return _parsed(cls, _checked(storage, path, file), storage.where(path))


def read_json(storage: Storage, folder: str, file: FileRecord) -> dict[str, Any]:
    """Reads any JSON object whose size and checksum are known.

    Raises:
        CheckpointError: It is not there, cannot be read, or is not as it was written.
    """
    path = f"{folder}/{file.name}"
    return _object(_checked(storage, path, file), storage.where(path))


def read_new_record(storage: Storage, path: str) -> tuple[FileRecord, WriterRecord]:
    """Reads what a writer has written just now, and counts it.

    Raises:
        CheckpointError: It is not there any more, cannot be read, or is none.
    """
    name, where = path.rpartition("/")[2], storage.where(path)
    try:
        content = _content(storage, path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{where} is gone: does somebody else remove checkpoints here?"
        ) from None
    file = FileRecord(name, len(content), zlib.crc32(content))
    return file, _parsed(WriterRecord, content, where)


def _checked(storage: Storage, path: str, file: FileRecord) -> bytes:
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
    """What is in a file that is there (`FileNotFoundError`) and small."""
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
