"""Sources of arrays in `.npy` and `.npz` files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from isotrain.core.data.arrays import Array, ArraySource
from isotrain.core.errors import DataError, unknown_name

_LOCAL_HEADER_BYTES = 30  # of a zip member, before its name and extra field


def npy(inputs: str | Path, targets: str | Path | None = None) -> ArraySource:
    """A source of memory-mapped `.npy` files; contents are read when they are gathered.

    Args:
        inputs: File of the inputs, an array of shape [samples, ...].
        targets: File of the targets, an array of shape [samples, ...]; None for none.

    Raises:
        DataError: A file is missing, is not `.npy`, or holds objects.
    """
    arrays = [None if p is None else _map_npy(Path(p).absolute(), 0) for p in (inputs, targets)]
    return ArraySource(*arrays)


def npz(path: str | Path, inputs: str = "x", targets: str | None = "y") -> ArraySource:
    """A source of two arrays of an `.npz` file, by their names in it; no targets if that name is None.

    Uncompressed arrays (`numpy.savez`) are memory-mapped inside the file. Compressed ones
    (`numpy.savez_compressed`) cannot be: every process loads them into memory.
    """
    file = Path(path).absolute()
    arrays = [None if name is None else _npz_member(file, name) for name in (inputs, targets)]
    return ArraySource(*arrays)


def _npz_member(path: Path, name: str) -> Array:
    """One array of an `.npz` file, any shape and dtype: memory-mapped, or loaded if it is compressed.

    Raises:
        DataError: The file has no such array, or holds Python objects.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [entry.removesuffix(".npy") for entry in archive.namelist()]
            if name not in names:
                raise DataError(f"{path}: {unknown_name('array', name, names)}")
            entry = archive.getinfo(f"{name}.npy")
            if entry.compress_type != zipfile.ZIP_STORED:
                with archive.open(entry) as member:
                    return np.lib.format.read_array(member, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: expected an .npz file of plain arrays: {error}") from error
    with path.open("rb") as file:
        file.seek(entry.header_offset + _LOCAL_HEADER_BYTES - 4)
        name_and_extra = int.from_bytes(file.read(2), "little") + int.from_bytes(
            file.read(2), "little"
        )
    return _map_npy(path, entry.header_offset + _LOCAL_HEADER_BYTES + name_and_extra)


def _map_npy(path: Path, start: int) -> Array:
    """Memory-maps an array of the `.npy` header's shape and dtype, from byte `start` of a file, read-only.

    Raises:
        DataError: The file holds no array of numbers there.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            version = np.lib.format.read_magic(file)
            read_header = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read_header = np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read_header(file)
            offset = file.tell()
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        return np.memmap(path, dtype, "r", offset, shape, "F" if fortran else "C")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected a .npy array of numbers: {error}") from error
