"""A checkpoint is read as it was written, whole or in part, from a folder and from behind a URL."""

from __future__ import annotations

import json
import uuid
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.dtypes import CODES
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.errors import CheckpointError

NUMBERS = np.arange(12.0, dtype="float32").reshape(3, 4)


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointFolder:
    """An empty folder of checkpoints."""
    place = tmp_path / "run" if request.param == "local" else f"memory://{uuid.uuid4()}/run"
    return CheckpointFolder(place)


def saved(folder: CheckpointFolder, step: int, **arrays: Any) -> Checkpoint:
    section = {name: TensorPart(np.asarray(array)) for name, array in arrays.items()}
    return folder.save(step, sections={"state": section}, run={"step": step})


def test_every_dtype_and_shape_comes_back(folder: CheckpointFolder) -> None:
    arrays = {dtype: NUMBERS.astype(dtype) for dtype in CODES if dtype != "bfloat16"}
    arrays |= {"scalar": np.array(3.5), "empty": np.zeros((0, 4)), "transposed": NUMBERS.T}
    checkpoint = saved(folder, 7, **arrays)
    found = checkpoint.read("state")
    assert checkpoint.run == {"step": 7}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == checkpoint.tensors("state")[name].shape
        np.testing.assert_array_equal(found[name], array)
    found["scalar"][...] = 1.0  # it is the caller's own


def test_bfloat16_keeps_its_name_and_its_bits(folder: CheckpointFolder) -> None:
    numbers = np.array([1.0, -0.0, np.inf, 3.140625, 1e-40], "float32")
    bits = numbers.astype(ml_dtypes.bfloat16)
    state = {"wide": TensorPart(bits.astype("float32"), "bfloat16"), "own": TensorPart(bits)}
    checkpoint = folder.save(1, sections={"state": state}, run={})
    for name, array in checkpoint.read("state").items():
        assert checkpoint.tensors("state")[name].dtype == "bfloat16"
        assert checkpoint.tensors("state")[name].nbytes == 10
        assert array.tobytes() == bits.astype("float32").tobytes()


def test_a_number_that_bfloat16_cannot_represent_is_refused(folder: CheckpointFolder) -> None:
    state = {"w": TensorPart(np.array([1.001], "float32"), "bfloat16")}
    with pytest.raises(CheckpointError, match=r"w: .*bfloat16"):
        folder.save(1, sections={"state": state}, run={})
    assert folder.newest() is None


def test_shards_of_several_writers_are_read_whole_and_resharded(
    folder: CheckpointFolder,
) -> None:
    for writer, rows in enumerate([slice(0, 1), slice(1, 3)]):
        part = TensorPart(NUMBERS[rows], global_shape=(3, 4), offset=(rows.start, 0))
        own = {"residual": TensorPart(np.full(2, writer))}
        sections = {"state": {"w": part}, f"replica-{writer}": own}
        folder.write(5, token="first", writer=writer, sections=sections)
    checkpoint = folder.commit(5, token="first", writers=2, run={}, timeout_s=0.0)
    np.testing.assert_array_equal(checkpoint.read("state")["w"], NUMBERS)
    np.testing.assert_array_equal(
        checkpoint.read_part("state", "w", (0, 1), (3, 2)), NUMBERS[:, 1:3]
    )
    np.testing.assert_array_equal(checkpoint.read_part("state", "w", (2, 0)), NUMBERS[2:])
    assert checkpoint.sections() == ["replica-0", "replica-1", "state"]
    assert checkpoint.read("replica-1")["residual"].tolist() == [1, 1]


def test_without_all_writers_there_is_no_checkpoint(folder: CheckpointFolder) -> None:
    before = saved(folder, 1, w=NUMBERS)
    folder.write(2, token="t", writer=0, sections={"state": {"w": TensorPart(NUMBERS)}})
    with pytest.raises(CheckpointError, match=r"lacks writer-00001.json of 2 writers"):
        folder.commit(2, token="t", writers=2, run={}, timeout_s=0.02)
    newest = folder.newest()
    assert newest is not None
    assert newest.step == before.step


def test_pruning_keeps_the_newest_and_the_protected(folder: CheckpointFolder) -> None:
    for step in (1, 2, 3, 4):
        saved(folder, step, w=NUMBERS)
    folder.write(0, token="t", writer=0, sections={})
    assert folder.prune(keep_last=2, keep=[1, 99]) == [0, 2]
    assert [each.step for each in folder.complete()] == [1, 3, 4]
    assert folder.damaged() == {}


def test_the_library_of_safetensors_reads_the_tensors(tmp_path: Path) -> None:
    arrays = {dtype: NUMBERS.astype(dtype) for dtype in CODES if dtype not in ("bfloat16", "bool")}
    arrays |= {
        "b": NUMBERS > 3,
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 4)),
        "é/ü": NUMBERS.T,
    }
    wide = NUMBERS.astype(ml_dtypes.bfloat16)
    state = {name: TensorPart(array) for name, array in arrays.items()}
    CheckpointFolder(tmp_path).save(1, sections={"state": {**state, "w": TensorPart(wide)}}, run={})
    (path,) = tmp_path.glob("*/*/state-00000.safetensors")
    found = load_file(path)
    assert found.keys() == arrays.keys() | {"w"}
    for name, array in {**arrays, "w": wide}.items():
        np.testing.assert_array_equal(found[name], array)


def read_by_the_page(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of section `state`, read as docs/checkpoints.md says, without anything of isotrain's."""
    content = (folder / "manifest.json").read_bytes()
    sealed, _, checksum = content.rpartition(b', "checksum": ')
    assert zlib.crc32(sealed) == int(checksum.rstrip(b"}\n"))
    manifest = json.loads(content)
    found: dict[str, np.ndarray] = {}
    for writer in manifest["writers"]:
        record = (folder / manifest["token"] / writer["name"]).read_bytes()
        assert (len(record), zlib.crc32(record)) == (writer["bytes"], writer["checksum"])
        for file in json.loads(record)["files"]:
            data = (folder / manifest["token"] / file["name"]).read_bytes()
            assert len(data) == file["bytes"] == manifest["files"][file["name"]]
            assert zlib.crc32(data[: file["header_bytes"]]) == file["header_checksum"]
            for part in file["tensors"] if file["section"] == "state" else ():
                numbers = data[part["start"] :][: part["bytes"]]
                assert zlib.crc32(numbers) == part["checksum"]
                whole = found.setdefault(
                    part["name"], np.empty(part["global_shape"], part["dtype"])
                )
                corner = zip(part["offset"], part["shape"], strict=True)
                place = tuple(slice(first, first + n) for first, n in corner)
                whole[place] = np.frombuffer(numbers, part["dtype"]).reshape(part["shape"])
    return found


def test_the_format_is_as_documented(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for writer, rows in enumerate([slice(0, 1), slice(1, 3)]):
        part = TensorPart(NUMBERS[rows], global_shape=(3, 4), offset=(rows.start, 0))
        state = {"w": part, f"own-{writer}": TensorPart(np.array(writer))}
        folder.write(5, token="t", writer=writer, sections={"state": state, "other": {}})
    folder.commit(5, token="t", writers=2, run={}, timeout_s=0.0)
    found = read_by_the_page(tmp_path / "step-000000005")
    np.testing.assert_array_equal(found.pop("w"), NUMBERS)
    assert found == {"own-0": 0, "own-1": 1}
