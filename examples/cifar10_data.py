"""Reads CIFAR-10 from a folder, in its original binary or Python form.

The Python form is pickled, and a pickle can run any program when it is opened the usual way. Here
nothing that a file names is ever imported or called: the few names that these files need become
inert records, from which plain bytes are taken; any other name is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LAYOUT = """\
Expected is the unpacked folder of one of the two original archives:

  cifar-10-batches-bin/                    cifar-10-batches-py/
    data_batch_1.bin                         data_batch_1
    ...                             or       ...
    data_batch_5.bin                         data_batch_5
    test_batch.bin                           test_batch"""
CLASSES = 10
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_TRAIN = [f"data_batch_{number}" for number in range(1, 6)]
_TEST = "test_batch"

Part = tuple[np.ndarray, np.ndarray]
"""Images, uint8 [images, 32, 32, 3], and labels, uint8 [images], from 0 to 9."""


class Cifar10Error(Exception):
    """The folder or a file in it is not what was expected."""


def load(folder: str | Path) -> tuple[Part, Part]:
    """Reads the training and the test images.

    Raises:
        Cifar10Error: The folder or one of its files is missing, damaged, or of another kind.
    """
    suffix, read = form_of(Path(folder))
    train = [_checked(Path(folder) / (name + suffix), read) for name in _TRAIN]
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return (images, labels), _checked(Path(folder) / (_TEST + suffix), read)


def form_of(folder: Path) -> tuple[str, Callable[[Path], Part]]:
    """Finds out which form a folder holds: the suffix of its files, and the function to read one.

    Raises:
        Cifar10Error: It does not exist, or lacks files; the message shows the layout.
    """
    if not folder.is_dir():
        raise Cifar10Error(f"there is no folder {str(folder)!r}. {LAYOUT}")
    names = [*_TRAIN, _TEST]
    missing = {
        suffix: [name + suffix for name in names if not (folder / (name + suffix)).is_file()]
        for suffix in _READERS
    }
    suffix, lacking = min(missing.items(), key=lambda item: len(item[1]))
    if lacking:
        what = "any of the files" if len(lacking) == len(names) else ", ".join(lacking)
        raise Cifar10Error(f"the folder {str(folder)!r} lacks {what}. {LAYOUT}")
    return suffix, _READERS[suffix]


def _checked(path: Path, read: Callable[[Path], Part]) -> Part:
    images, labels = read(path)
    if not len(images) or len(images) != len(labels) or labels.max() >= CLASSES:
        raise Cifar10Error(
            f"{path}: expected as many images as labels, each from 0 to {CLASSES - 1}; got"
            f" {len(images)} images and {len(labels)} labels."
        )
    return np.ascontiguousarray(images.reshape(-1, *_SHAPE).transpose(0, 2, 3, 1)), labels


def _read_binary(path: Path) -> Part:
    """Each image is its label's byte, then 1024 bytes each of red, green and blue."""
    content = np.fromfile(path, np.uint8)
    if content.size % (1 + _PIXELS):
        raise Cifar10Error(
            f"{path}: {content.size} bytes are no multiple of {1 + _PIXELS}: the file is damaged."
        )
    records = content.reshape(-1, 1 + _PIXELS)
    return records[:, 1:], records[:, 0].copy()


def _read_python(path: Path) -> Part:
    """A pickled dict of `data`, uint8 [images, 3072], and `labels`, a list of numbers."""
    try:
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        fields = {_text(name): value for name, value in content.items()}
        return _pixels(fields["data"]), np.array(fields["labels"], np.uint8)
    except Cifar10Error as error:
        raise Cifar10Error(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise Cifar10Error(
            f"{path}: not a Python batch of CIFAR-10: {type(error).__name__}: {error}"
        ) from error


_READERS: dict[str, Callable[[Path], Part]] = {".bin": _read_binary, "": _read_python}


@dataclass(slots=True)
class _Record:
    """Stands for an object that a pickle describes, and only notes how it would be made."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __call__(self, *arguments: Any) -> _Record:
        return _Record(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Makes numbers, text, bytes, lists and dicts, and records for what arrays are made of."""

    _NAMES = frozenset(
        {
            "numpy.core.multiarray._reconstruct",
            "numpy._core.multiarray._reconstruct",  # as NumPy 2 writes it
            "numpy.ndarray",
            "numpy.dtype",
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """Gives a record in place of what a file names; imports nothing."""
        full = f"{module}.{name}"
        if full not in self._NAMES:
            raise Cifar10Error(f"refused: it names {full!r}, which no CIFAR-10 file needs.")
        return _Record(full)


def _pixels(array: Any) -> np.ndarray:
    """Takes the bytes out of the record of an array, uint8 [images, 3072]."""
    if not (isinstance(array, _Record) and array.name.endswith("_reconstruct")):
        raise Cifar10Error("its 'data' is no array.")
    _, shape, dtype, column_major, content = array.state
    kind = _text(dtype.arguments[0])
    if kind != "u1" or column_major or len(shape) != 2 or shape[1] != _PIXELS:
        raise Cifar10Error(f"expected uint8 [images, {_PIXELS}], got {kind!r} {shape}.")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _text(value: bytes | str) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value
