"""A complete checkpoint, opened for lazy reading."""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from isotrain.core.checkpoints.dtypes import array_dtype, block_index
from isotrain.core.checkpoints.index import Index, IndexedPart, describe_tensor, index
from isotrain.core.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    TensorFileRecord,
    WriterRecord,
    read_json,
    read_manifest,
    read_record,
)
from isotrain.core.checkpoints.safetensors_shard import check_header, read_blocks, read_into
from isotrain.core.checkpoints.storage import Storage
from isotrain.core.checkpoints.tensor_part import StoredTensor
from isotrain.core.errors import CheckpointError, unknown_name

PARALLEL_READ_BYTES = 2**24
"""Bytes of one file from which on several threads read faster than one."""
HUGE_PAGE_BYTES = 2**22
"""Bytes of an array from which on NumPy asks for huge pages."""


class Checkpoint:
    """A complete checkpoint; `open_checkpoint` or `CheckpointFolder` opens it.

    Attributes:
        location: Path or URL of its folder.
        step: Number of steps done.
        token: Token of the attempt that wrote it: the name of the folder with its files.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        self._storage = storage
        self._folder = folder
        self._manifest = manifest
        self.location = storage.where(folder)
        self.step = manifest.step
        self.token = manifest.token

    @functools.cached_property
    def run(self) -> dict[str, Any]:
        """Content of `run.json`: what was passed to `commit`.

        Raises:
            CheckpointError: The file cannot be read, or is corrupted.
        """
        return read_json(self._storage, self._path(""), self._manifest.run)

    def sections(self) -> list[str]:
        """Names of the sections, sorted."""
        return sorted(self._index)

    def tensors(self, section: str) -> dict[str, StoredTensor]:
        """Descriptions of the tensors in a section, by name.

        Raises:
            CheckpointError: There is no such section, or a record cannot be read.
        """
        return {name: describe_tensor(parts) for name, parts in self._section(section).items()}

    def read(self, section: str, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Reads full tensors of a section (default: all), with threads; verifies their checksums.

        Returns:
            New arrays by name; float32 for bfloat16.

        Raises:
            CheckpointError: The section has no tensor of a name; or a file is missing, cannot be read, or
                is corrupted.
        """
        tensors = self.tensors(section)
        selected = list(tensors if names is None else names)
        parts = [part for name in selected for part in self._parts(section, name)]
        arrays = {name: _array(tensors[name].shape, tensors[name].dtype, name) for name in selected}
        parts.sort(key=lambda part: (part.file.name, part.record.start))
        files = itertools.groupby(parts, key=lambda part: part.file)
        tasks = [
            task for _, group in files for task in _read_tasks(list(group), self._storage.readers)
        ]
        with ThreadPoolExecutor(self._storage.readers) as readers:
            for _ in readers.map(functools.partial(self._read_parts, arrays), tasks):
                pass
        return arrays

    def _read_parts(self, arrays: Mapping[str, np.ndarray], parts: Sequence[IndexedPart]) -> None:
        """Reads shards of one file into arrays by name, of unsharded shapes; runs on a reader thread."""
        with self._opened(parts[0].file) as stream:
            for part in parts:
                target = arrays[part.record.name]
                self._read_into(target, [0] * target.ndim, stream, part)

    def read_part(
        self,
        section: str,
        name: str,
        offset: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Reads a part (a box) of a tensor, only from the files that overlap it.

        Args:
            section: Name of the section.
            name: Name of the tensor.
            offset: Offset of the part in the tensor, an index per axis; zeros when left out.
            shape: Shape of the part; up to the end of each axis when left out.

        Returns:
            A new array of that shape; float32 for bfloat16.

        Raises:
            CheckpointError: See `read`; or the part does not lie in the tensor.
        """
        parts = self._parts(section, name)
        tensor = describe_tensor(parts)
        start = (0,) * len(tensor.shape) if offset is None else tuple(offset)
        extent = _remaining(tensor.shape, start) if shape is None else tuple(shape)
        _check_inside(tensor.shape, start, extent, name)
        target = _array(extent, tensor.dtype, name)
        for part in parts:
            if _overlap(start, extent, part.record.offset, part.record.shape) is not None:
                with self._opened(part.file) as stream:
                    self._read_into(target, start, stream, part)
        return target

    def verify(self) -> None:
        """Reads every byte, and verifies all checksums.

        Raises:
            CheckpointError: A file is missing, cannot be read, or is corrupted.
        """
        assert self.run is not None
        assert self._index is not None
        for file in self._files:
            with self._opened(file) as stream:
                check_header(stream, file, self._where(file))
                for record in file.tensors:
                    for _ in read_blocks(stream, record, self._where(file)):
                        pass

    def _read_into(
        self, target: np.ndarray, start: Sequence[int], stream: IO[bytes], part: IndexedPart
    ) -> None:
        """Reads the elements that a shard and `target`, a box of its shape at offset `start`, share."""
        has_same_offset = list(start) == list(part.record.offset)
        if has_same_offset and read_into(stream, part.record, target, self._where(part.file)):
            return
        for offset, block in read_blocks(stream, part.record, self._where(part.file)):
            block_start = [a + b for a, b in zip(part.record.offset, offset, strict=True)]
            overlap = _overlap(start, target.shape, block_start, block.shape)
            if overlap is not None:
                target[overlap[0]] = block[overlap[1]]

    @functools.cached_property
    def _files(self) -> list[TensorFileRecord]:
        """Records of all safetensors files, checked against the sizes in the manifest."""
        files: list[TensorFileRecord] = []
        for number, file in enumerate(self._manifest.writers):
            writer = read_record(self._storage, self._path(""), WriterRecord, file)
            if writer.writer != number:
                raise CheckpointError(
                    f"{self._storage.where(self._path(file.name))} is of writer {writer.writer}."
                )
            files += writer.files
        sizes = {file.name: file.bytes for file in files}
        if sizes != self._manifest.files or len(sizes) != len(files):
            raise CheckpointError(
                f"{self.location}: its writers name other files than its manifest."
            )
        return files

    @functools.cached_property
    def _index(self) -> Index:
        return index(self._files, self.location)

    def _section(self, section: str) -> dict[str, list[IndexedPart]]:
        if section not in self._index:
            raise CheckpointError(
                f"{self.location}: {unknown_name('section', section, self._index)}"
            )
        return dict(self._index[section])

    def _parts(self, section: str, name: str) -> list[IndexedPart]:
        tensors = self._section(section)
        if name not in tensors:
            raise CheckpointError(
                f"{self.location}: {section}: {unknown_name('tensor', name, tensors)}"
            )
        return tensors[name]

    @contextmanager
    def _opened(self, file: TensorFileRecord) -> Iterator[IO[bytes]]:
        try:
            with self._storage.reading(self._path(file.name)) as stream:
                yield stream
        except OSError as error:
            raise CheckpointError(f"{self._where(file)} cannot be read: {error}.") from error

    def _where(self, file: TensorFileRecord) -> str:
        return self._storage.where(self._path(file.name))

    def _path(self, name: str) -> str:
        return posixpath.join(self._folder, self._manifest.token, name).rstrip("/")


def open_checkpoint(storage: Storage, folder: str) -> Checkpoint:
    """Opens a checkpoint, after checking that all files in its manifest exist with their sizes.

    Raises:
        FileNotFoundError: It has no manifest.
        CheckpointError: It is incomplete or damaged.
    """
    manifest = read_manifest(storage, posixpath.join(folder, MANIFEST))
    attempt_folder = posixpath.join(folder, manifest.token)
    sizes = storage.sizes(attempt_folder)
    expected = {file.name: file.bytes for file in (manifest.run, *manifest.writers)}
    for name, size in {**expected, **manifest.files}.items():
        if sizes.get(name) != size:
            state = f"has {sizes[name]}" if name in sizes else "is missing; it had"
            end = f" bytes instead of {size}." if name in sizes else f" {size} bytes."
            raise CheckpointError(f"{storage.where(f'{attempt_folder}/{name}')} {state}{end}")
    return Checkpoint(storage, folder, manifest)


def _array(shape: Sequence[int], dtype: str, name: str) -> np.ndarray:
    """Allocates an uninitialized array of a shape and dtype, in pages of the base size.

    A virtual machine that has not had a huge page before can take five times as long to give it.
    Raises:
        CheckpointError: There is not enough memory.
    """
    numpy_dtype = array_dtype(dtype)
    nbytes = math.prod(shape) * numpy_dtype.itemsize
    try:
        if nbytes < HUGE_PAGE_BYTES:
            return np.empty(shape, numpy_dtype)
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (MemoryError, OSError, OverflowError):
        raise CheckpointError(
            f"{name}: {dtype} of shape {tuple(shape)} has no room in memory."
        ) from None
    return np.frombuffer(memory, numpy_dtype).reshape(shape)


def _read_tasks(parts: Sequence[IndexedPart], readers: int) -> list[list[IndexedPart]]:
    """Distributes shards of one file over reader threads by size (greedy); one task if they are small."""
    if readers == 1 or sum(part.record.bytes for part in parts) < PARALLEL_READ_BYTES:
        return [list(parts)]
    tasks: list[list[IndexedPart]] = [[] for _ in range(readers)]
    sizes = [0] * readers
    for part in sorted(parts, key=lambda part: -part.record.bytes):
        smallest = sizes.index(min(sizes))
        tasks[smallest].append(part)
        sizes[smallest] += part.record.bytes
    return [task for task in tasks if task]


def _remaining(global_shape: Sequence[int], offset: Sequence[int]) -> tuple[int, ...]:
    return tuple(size - first for size, first in zip(global_shape, offset, strict=False))


def _check_inside(
    global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int], name: str
) -> None:
    is_inside = len(global_shape) == len(offset) == len(shape) and all(
        first >= 0 and n >= 0 and first + n <= size
        for size, first, n in zip(global_shape, offset, shape, strict=True)
    )
    if not is_inside:
        raise CheckpointError(
            f"{name}: a part of shape {tuple(shape)} at {tuple(offset)} does not lie in"
            f" {tuple(global_shape)}."
        )


def _overlap(
    start: Sequence[int],
    shape: Sequence[int],
    other_start: Sequence[int],
    other_shape: Sequence[int],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The overlap of two boxes, as an index into each; None if they do not overlap."""
    firsts = [max(a, b) for a, b in zip(start, other_start, strict=True)]
    ends = [
        min(a + n, b + m) for a, n, b, m in zip(start, shape, other_start, other_shape, strict=True)
    ]
    if any(first >= end for first, end in zip(firsts, ends, strict=True)):
        return None
    extent = tuple(end - first for first, end in zip(firsts, ends, strict=True))
    offset = tuple(first - a for first, a in zip(firsts, start, strict=True))
    other_offset = tuple(first - b for first, b in zip(firsts, other_start, strict=True))
    return block_index(offset, extent), block_index(other_offset, extent)
