"""One complete checkpoint, of which only what is asked for is read."""

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
from isotrain.core.checkpoints.index import Index, PlacedPart, described, index
from isotrain.core.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    TensorFileRecord,
    WriterRecord,
    read_json,
    read_manifest,
    read_record,
)
from isotrain.core.checkpoints.safetensors_shard import check_header, read_blocks, read_whole
from isotrain.core.checkpoints.storage import Storage
from isotrain.core.checkpoints.tensor_part import StoredTensor
from isotrain.core.errors import CheckpointError, unknown_name

FEW_BYTES = 2**24
"""Up to so many, one thread reads a file as quickly as several."""
LARGE_BYTES = 2**22
"""From so many on, NumPy asks for huge pages."""


class Checkpoint:
    """A checkpoint that is there as a whole: made by `CheckpointFolder`, which sees to that.

    Attributes:
        location: Its path or URL.
        step: Steps that were done.
        token: Of the attempt that wrote it: the name of the folder with its files.
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
        """Where the run was: what was given to `commit`.

        Raises:
            CheckpointError: It cannot be read, or is not as it was written.
        """
        return read_json(self._storage, self._path(""), self._manifest.run)

    def sections(self) -> list[str]:
        """The names of the sections, sorted."""
        return sorted(self._index)

    def tensors(self, section: str) -> dict[str, StoredTensor]:
        """What a section holds, by name.

        Raises:
            CheckpointError: There is no such section, or a record cannot be read.
        """
        return {name: described(parts) for name, parts in self._section(section).items()}

    def read(self, section: str, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Reads whole tensors, whoever wrote their parts, and checks every byte of them.

        Args:
            section: Of these.
            names: Which; left out: all.

        Returns:
            Arrays that are the caller's own; float32 for bfloat16.

        Raises:
            CheckpointError: A name is none of the section's; a file is missing, cannot be read, or is
                not as it was written.
        """
        tensors = self.tensors(section)
        wanted = list(tensors if names is None else names)
        parts = [part for name in wanted for part in self._parts(section, name)]
        found = {name: _array(tensors[name].shape, tensors[name].dtype, name) for name in wanted}
        files = itertools.groupby(sorted(parts, key=_place), key=lambda part: part.file)
        shares = [share for _, own in files for share in _shares(list(own), self._storage.readers)]
        with ThreadPoolExecutor(self._storage.readers) as readers:
            for _ in readers.map(functools.partial(self._read_share, found), shares):
                pass
        return found

    def _read_share(self, found: Mapping[str, np.ndarray], share: Sequence[PlacedPart]) -> None:
        """Reads some parts of one file to where they belong; by a thread of several."""
        with self._opened(share[0].file) as stream:
            for part in share:
                target = found[part.record.name]
                self._read_into(target, [0] * target.ndim, stream, part)

    def read_part(
        self,
        section: str,
        name: str,
        offset: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Reads the part of a tensor that somebody needs: of the files only those that have some of it.

        Args:
            section: Of the tensor.
            name: Of it.
            offset: Where the part begins, an index along each axis; left out: at the start.
            shape: Of the part; left out: up to the end.

        Raises:
            CheckpointError: As `read`; or the part does not lie in the tensor.
        """
        parts = self._parts(section, name)
        whole = described(parts)
        first = (0,) * len(whole.shape) if offset is None else tuple(offset)
        extent = _rest(whole.shape, first) if shape is None else tuple(shape)
        _check_inside(whole.shape, first, extent, name)
        target = _array(extent, whole.dtype, name)
        for part in parts:
            if _common(first, extent, part.record.offset, part.record.shape) is not None:
                with self._opened(part.file) as stream:
                    self._read_into(target, first, stream, part)
        return target

    def verify(self) -> None:
        """Reads every byte.

        Raises:
            CheckpointError: A file is missing, cannot be read, or is not as it was written.
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
        self, target: np.ndarray, first: Sequence[int], stream: IO[bytes], part: PlacedPart
    ) -> None:
        """Reads what a part has of the numbers of `target`, which begins at `first` of the whole."""
        is_first = list(first) == list(part.record.offset)
        if is_first and read_whole(stream, part.record, target, self._where(part.file)):
            return
        for offset, block in read_blocks(stream, part.record, self._where(part.file)):
            start = [a + b for a, b in zip(part.record.offset, offset, strict=True)]
            common = _common(first, target.shape, start, block.shape)
            if common is not None:
                target[common[0]] = block[common[1]]

    @functools.cached_property
    def _files(self) -> list[TensorFileRecord]:
        """All safetensors files, each at the size that the manifest has."""
        found: list[TensorFileRecord] = []
        for number, file in enumerate(self._manifest.writers):
            writer = read_record(self._storage, self._path(""), WriterRecord, file)
            if writer.writer != number:
                raise CheckpointError(
                    f"{self._storage.where(self._path(file.name))} is of writer {writer.writer}."
                )
            found += writer.files
        sizes = {file.name: file.bytes for file in found}
        if sizes != self._manifest.files or len(sizes) != len(found):
            raise CheckpointError(
                f"{self.location}: its writers name other files than its manifest."
            )
        return found

    @functools.cached_property
    def _index(self) -> Index:
        return index(self._files, self.location)

    def _section(self, section: str) -> dict[str, list[PlacedPart]]:
        if section not in self._index:
            raise CheckpointError(
                f"{self.location}: {unknown_name('section', section, self._index)}"
            )
        return dict(self._index[section])

    def _parts(self, section: str, name: str) -> list[PlacedPart]:
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
    """Opens a checkpoint if all files that its manifest names are there, with their sizes.

    Raises:
        FileNotFoundError: It has no manifest.
        CheckpointError: It is incomplete or damaged.
    """
    manifest = read_manifest(storage, posixpath.join(folder, MANIFEST))
    inner = posixpath.join(folder, manifest.token)
    found = storage.sizes(inner)
    expected = {file.name: file.bytes for file in (manifest.run, *manifest.writers)}
    for name, count in {**expected, **manifest.files}.items():
        if found.get(name) != count:
            state = f"has {found[name]}" if name in found else "is missing; it had"
            end = f" bytes instead of {count}." if name in found else f" {count} bytes."
            raise CheckpointError(f"{storage.where(f'{inner}/{name}')} {state}{end}")
    return Checkpoint(storage, folder, manifest)


def _array(shape: Sequence[int], dtype: str, name: str) -> np.ndarray:
    """Room for numbers, in pages as small as they come.

    A virtual machine that has not had a huge page before can take five times as long to give it.
    """
    kind = array_dtype(dtype)
    count = math.prod(shape) * kind.itemsize
    try:
        if count < LARGE_BYTES:
            return np.empty(shape, kind)
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (MemoryError, OSError, OverflowError):
        raise CheckpointError(
            f"{name}: {dtype} of shape {tuple(shape)} has no room in memory."
        ) from None
    return np.frombuffer(memory, kind).reshape(shape)


def _shares(parts: Sequence[PlacedPart], readers: int) -> list[list[PlacedPart]]:
    """Parts of one file for each reader, with about as many bytes; all for one where these are few."""
    if readers == 1 or sum(part.record.bytes for part in parts) < FEW_BYTES:
        return [list(parts)]
    shares: list[list[PlacedPart]] = [[] for _ in range(readers)]
    sizes = [0] * readers
    for part in sorted(parts, key=lambda part: -part.record.bytes):
        least = sizes.index(min(sizes))
        shares[least].append(part)
        sizes[least] += part.record.bytes
    return [share for share in shares if share]


def _place(part: PlacedPart) -> tuple[str, int]:
    return part.file.name, part.record.start


def _rest(whole: Sequence[int], offset: Sequence[int]) -> tuple[int, ...]:
    return tuple(most - first for most, first in zip(whole, offset, strict=False))


def _check_inside(
    whole: Sequence[int], offset: Sequence[int], shape: Sequence[int], name: str
) -> None:
    fits = len(whole) == len(offset) == len(shape) and all(
        first >= 0 and n >= 0 and first + n <= most
        for most, first, n in zip(whole, offset, shape, strict=True)
    )
    if not fits:
        raise CheckpointError(
            f"{name}: a part of shape {tuple(shape)} at {tuple(offset)} does not lie in {tuple(whole)}."
        )


def _common(
    start: Sequence[int],
    shape: Sequence[int],
    other_start: Sequence[int],
    other_shape: Sequence[int],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two boxes have in common, as an index of each; None: nothing."""
    firsts = [max(a, b) for a, b in zip(start, other_start, strict=True)]
    ends = [
        min(a + n, b + m) for a, n, b, m in zip(start, shape, other_start, other_shape, strict=True)
    ]
    if any(first >= end for first, end in zip(firsts, ends, strict=True)):
        return None
    extent = tuple(end - first for first, end in zip(firsts, ends, strict=True))
    one = tuple(first - a for first, a in zip(firsts, start, strict=True))
    two = tuple(first - b for first, b in zip(firsts, other_start, strict=True))
    return block_index(one, extent), block_index(two, extent)
