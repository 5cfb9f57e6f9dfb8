"""Safetensors files that stand by themselves: what is written is read, and what is wrong is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.core.checkpoints.safetensors_file import SafetensorsFile, write_safetensors
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.errors import CheckpointError


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def test_tensors_are_read_in_their_dtype(tmp_path: Path) -> None:
    arrays = {
        "kernel": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "count": np.array(7, np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "half": np.array([1.5, -0.25], np.float32),
    }
    parts = {name: TensorPart(array) for name, array in arrays.items()}
    parts["half"] = TensorPart(arrays["half"], "bfloat16")
    write_safetensors(tmp_path / "file.safetensors", parts)
    found = SafetensorsFile(tmp_path / "file.safetensors")
    assert found.dtypes["half"] == "bfloat16"
    for name, array in found.read_all().items():
        assert array.dtype == arrays[name].dtype
        np.testing.assert_array_equal(array, arrays[name])
        assert array.flags.writeable or not array.size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.safetensors"]


def test_files_of_other_libraries_are_read(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry("BF16", [2], 4, 8)}
    header["a"] = entry("F32", [], 0, 4)
    data = np.float32(2.5).tobytes() + np.array([0x3FC0, 0xBE80], np.uint16).tobytes()
    found = SafetensorsFile(written(tmp_path / "x", header, data)).read_all()
    assert found["a"] == 2.5
    assert found["b"].tolist() == [1.5, -0.25]


WRONG: dict[str, Any] = {
    "no JSON": b"{",
    "a list": [],
    "deep": b"[" * 100_000,
    "of a text": {"a": "F32"},
    "unknown dtype": {"a": entry("F8_E4M3", [4], 0, 4)},
    "too long": {"a": entry("F32", [2], 0, 8)},
    "too short": {"a": entry("F32", [1], 0, 2)},
    "absurd shape": {"a": entry("F32", [2**40, 2**40], 0, 4)},
    "absurd and empty": {"a": entry("F32", [0, 2**40, 2**40], 0, 0)},
    "the same bytes twice": {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)},
    "within another": {"a": entry("F32", [1], 0, 4), "b": entry("I8", [1], 2, 3)},
    "negative": {"a": entry("F32", [-1], 4, 0)},
    "fractions": {"a": entry("F32", [1.0], 0, 4)},
    "truth": {"a": entry("F32", [True], 0, 4)},
    "no offsets": {"a": {"dtype": "F32", "shape": [1]}},
    "many axes": {"a": entry("F32", [1] * 40, 0, 4)},
}


@pytest.mark.parametrize("what", WRONG)
def test_impossible_headers_are_refused_with_the_file_name(what: str, tmp_path: Path) -> None:
    path = written(tmp_path / "wrong.safetensors", WRONG[what], b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"wrong\.safetensors"):
        SafetensorsFile(path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"PK\x03\x04 a zip, or a pickle"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        SafetensorsFile(tmp_path / "other")
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(tmp_path / "missing")


def test_a_file_truncated_after_opening_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_safetensors(path, {"a": TensorPart(np.arange(100.0))})
    found = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cut off in 'a'"):
        found.read("a")
