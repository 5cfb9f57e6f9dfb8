"""How what a process returned travels: JSON values, and NumPy arrays beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.core.errors import IsotrainError


def save_value(value: Any, folder: Path, name: str) -> None:
    """Writes a value made of JSON types and NumPy arrays as `name.json` and `name.npz`.

    Raises:
        IsotrainError: Something in it is of another type.
    """
    arrays: dict[str, np.ndarray] = {}
    plain = _plain(value, arrays)
    (folder / f"{name}.json").write_text(json.dumps(plain), encoding="utf-8")
    if arrays:
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def load_value(folder: Path, name: str) -> Any:
    """Reads what `save_value` wrote."""
    plain = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    path = folder / f"{name}.npz"
    if not path.exists():
        return _restored(plain, {})
    with np.load(path, allow_pickle=False) as archive:
        return _restored(plain, archive)


def encode_value(value: Any) -> tuple[Any, list[np.ndarray]]:
    """A value made of JSON types and NumPy arrays as JSON values, and its arrays.

    Raises:
        IsotrainError: Something in it is of another type.
    """
    arrays: dict[str, np.ndarray] = {}
    plain = _plain(value, arrays)
    return plain, list(arrays.values())


def decode_value(plain: Any, arrays: Sequence[np.ndarray]) -> Any:
    """The value of which `encode_value` made these."""
    return _restored(plain, {_key(number): array for number, array in enumerate(arrays)})


_ARRAY = "__array__"


def _key(number: int) -> str:
    return f"a{number}"


def _plain(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        key = _key(len(arrays))
        arrays[key] = value
        return {_ARRAY: key}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(key): _plain(part, arrays) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, arrays) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise IsotrainError(
        f"the function returned {type(value).__name__!r}. What it returns travels back between"
        " processes: use numbers, text, None, NumPy arrays, and lists or dicts of these"
        " (float(loss) makes a number of a loss)."
    )


def _restored(plain: Any, archive: Any) -> Any:
    if isinstance(plain, dict):
        if set(plain) == {_ARRAY}:
            return archive[plain[_ARRAY]]
        return {key: _restored(part, archive) for key, part in plain.items()}
    if isinstance(plain, list):
        return [_restored(part, archive) for part in plain]
    return plain
