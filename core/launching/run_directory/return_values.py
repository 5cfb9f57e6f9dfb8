"""Files of the values that processes return: JSON, and NumPy arrays beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.core.transport.codec import array_name, decode_value_from, encode_value


def save_value(value: Any, folder: Path, name: str) -> None:
    """Writes a value of JSON types and NumPy arrays as `name.json`, and `name.npz` if it has arrays.

    Raises:
        IsotrainError: Something in it has another type.
    """
    plain, arrays = encode_value(value)
    (folder / f"{name}.json").write_text(json.dumps(plain), encoding="utf-8")
    if arrays:
        named = {array_name(i): array for i, array in enumerate(arrays)}
        np.savez(folder / f"{name}.npz", **named)  # type: ignore[arg-type]


def load_value(folder: Path, name: str) -> Any:
    """Reads a value that `save_value` wrote."""
    plain = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    path = folder / f"{name}.npz"
    if not path.exists():
        return decode_value_from(plain, {})
    with np.load(path, allow_pickle=False) as archive:
        return decode_value_from(plain, archive)
