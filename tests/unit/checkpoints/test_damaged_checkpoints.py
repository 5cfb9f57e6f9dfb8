"""What is not as it was written is refused by the file's name; one made to do harm does none."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.checkpoints.saving import newest, save

from isotrain.core.checkpoints.folder import CheckpointFolder, checkpoint_at
from isotrain.core.errors import CheckpointError

FILES = (
    *("manifest.json", "t/run.json", "t/writer-00000.json", "t/writer-00001.json"),
    *("t/state-00000.safetensors", "t/state-00001.safetensors", "t/replica-0-00000.safetensors"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint of two writers, whose token is `t`."""
    location = tmp_path_factory.mktemp("whole") / "run"
    save(location, 1, 1, "t")
    return location


@pytest.fixture
def folder(tmp_path: Path, whole: Path) -> Path:
    """A copy of the sound checkpoint folder."""
    return shutil.copytree(whole, tmp_path / "run")


def fault(location: Path) -> str:
    """Why the checkpoint in a folder cannot be read."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint_at(location / "step-000000001").verify()
    assert checkpoint_seen(location) in (None, 1)
    return str(caught.value)


def checkpoint_seen(location: Path) -> int | None:
    """The step of what a resume would take; its numbers are right as far as it reads them."""
    try:
        return newest(location)[0]
    except (CheckpointError, AssertionError):
        return None


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_detected(folder: Path, name: str) -> None:
    target = folder / "step-000000001" / name
    content = target.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 40)):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        target.write_bytes(changed)
        assert str(target) in fault(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_extended_foreign_or_missing_file_is_named(folder: Path, name: str) -> None:
    target = folder / "step-000000001" / name
    content = target.read_bytes()
    for other in (b"", content[:-1], content + b"\0", os.urandom(len(content))):
        target.write_bytes(other)
        assert str(target) in fault(folder)
    target.unlink()
    if name == "manifest.json":
        assert "there is no complete checkpoint" in fault(folder)
    else:
        assert str(target) in fault(folder)
        assert str(target) in CheckpointFolder(folder).damaged()[1]
    assert CheckpointFolder(folder).complete() == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_checkpoint_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    save(tmp_path / "other", 1, 2, "t")
    target = folder / "step-000000001" / name
    shutil.copy(tmp_path / "other" / "step-000000001" / name, target)
    named = folder / "step-000000001" / "t" if name == "manifest.json" else target
    assert str(named) in fault(folder)


@pytest.mark.parametrize("kind", ["state-0000{}.safetensors", "writer-0000{}.json"])
def test_files_of_two_writers_that_are_swapped_are_named(folder: Path, kind: str) -> None:
    one, two = (folder / "step-000000001" / "t" / kind.format(writer) for writer in range(2))
    contents = one.read_bytes(), two.read_bytes()
    assert contents[0] != contents[1]
    one.write_bytes(contents[1])
    two.write_bytes(contents[0])
    assert str(one) in fault(folder)


def test_a_checkpoint_named_for_another_step_is_invalid(folder: Path) -> None:
    shutil.copytree(folder / "step-000000001", folder / "step-000000002")
    assert newest(folder) == (1, 1)
    assert "is the checkpoint of step 1" in CheckpointFolder(folder).damaged()[2]


Edit = Callable[[dict[str, Any], dict[str, Any]], None]


def forge(folder: Path, edit: Edit, own: bytes | None = None) -> None:
    """Changes the manifest and the record of writer 0, and makes all checksums right again.

    Args:
        folder: Of the checkpoint.
        edit: Is given the manifest and the record.
        own: Stands in place of the record instead.
    """
    path = folder / "step-000000001" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["checksum"]
    note = manifest["writers"][0]
    record_path = path.parent / "t" / note["name"]
    record = json.loads(record_path.read_bytes())
    edit(manifest, record)
    content = json.dumps(record).encode() if own is None else own
    record_path.write_bytes(content)
    note |= measured(content)
    path.write_bytes(sealed(json.dumps(manifest)[:-1].encode()))


def sealed(body: bytes) -> bytes:
    """A manifest whose own checksum is right."""
    return body + b', "checksum": %d}\n' % zlib.crc32(body)


def measured(content: bytes) -> dict[str, int]:
    return {"bytes": len(content), "checksum": zlib.crc32(content)}


def in_manifest(**fields: Any) -> Edit:
    return lambda manifest, _: manifest.update(fields)


def in_run(**fields: Any) -> Edit:
    return lambda manifest, _: manifest["run"].update(fields)


def in_file(**fields: Any) -> Edit:
    return lambda _, record: record["files"][0].update(fields)


def in_part(**fields: Any) -> Edit:
    return lambda _, record: record["files"][0]["tensors"][-1].update(fields)


def test_a_sound_forgery_is_read(folder: Path) -> None:
    forge(folder, lambda *_: None)
    assert newest(folder) == (1, 1)


@pytest.mark.parametrize(
    "edit",
    [
        *(
            in_manifest(token=name)
            for name in ("..", "../t", "/etc", "a/b", "", ".t", "t\0", "t\n")
        ),
        *(in_manifest(files={name: 1}) for name in ("../x", "/etc/passwd", "t/../../x")),
        *(in_run(name=name) for name in ("../../../../etc/passwd", "/etc/passwd", "")),
        *(in_run(bytes=count) for count in (-1, 2**62, 2**64, 10**400, 1.5, True, None, "9")),
        *(in_manifest(writers=value) for value in ([], {}, None, [[]], ["writer-00000.json"])),
        *(in_manifest(format=value) for value in (2, None, "1")),
        in_manifest(unknown=1),
        in_manifest(step=-(10**30)),
        *(in_file(name=name) for name in ("../x", "t", "run.json", "writer-00001.json")),
        *(in_file(bytes=count) for count in (-1, 0, 2**62, 10**400)),
        *(in_file(header_bytes=count) for count in (-8, 0, 7, 9, 2**40)),
        in_file(tensors=[]),
        *(in_part(dtype=name) for name in ("object", "O", "float8", "str", "<U99999999", "")),
        *(in_part(shape=shape) for shape in ([], [-1, -3], [3, 1], [2**40, 2**40], [0, 2**62])),
        *(
            in_part(shape=shape)
            for shape in ([1, 3, 1], [1] * 99, [[1]], ["1", "3"], {}, [1.0, 3.0])
        ),
        *(in_part(offset=offset) for offset in ([-1, 0], [2, 0], [1, 0], [0], [2**62, 0], [0, 1])),
        *(in_part(global_shape=shape) for shape in ([1, 3], [3, 3], [2**40, 3], [2, 3, 1], [0, 0])),
        *(in_part(start=place) for place in (0, -1, 7, 2**62)),
        *(in_part(bytes=count) for count in (0, -1, 25, 2**62)),
        *(in_part(name=name) for name in ("b0", "other", 3)),
        lambda _, record: record["files"].append(record["files"][0]),
        lambda _, record: record["files"][0]["tensors"].append(record["files"][0]["tensors"][-1]),
        lambda _, record: record["files"][0]["tensors"].reverse(),
    ],
)
def test_a_malicious_record_is_refused(folder: Path, edit: Edit) -> None:
    forge(folder, edit)
    assert str(folder / "step-000000001") in fault(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"format": ' + b"9" * 100_000 + b"}",
        b"\xff\xfe",
        b"null",
        b'{"a": 1}, {}',
    ],
    ids=["lists", "objects", "digits", "no text", "null", "two"],
)
@pytest.mark.parametrize("name", FILES[:3])
def test_malicious_json_is_refused(folder: Path, name: str, content: bytes) -> None:
    """Its checksums are right."""
    target = folder / "step-000000001" / name
    if name == "manifest.json":
        target.write_bytes(sealed(content.removesuffix(b"}")))
    elif name == "t/run.json":
        target.write_bytes(content)
        forge(folder, in_run(**measured(content)))
    else:
        forge(folder, lambda *_: None, own=content)
    assert str(target) in fault(folder)


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._target),)


def test_a_pickle_in_disguise_is_not_opened(folder: Path, tmp_path: Path) -> None:
    content = pickle.dumps(Payload(tmp_path / "harm"))
    target = folder / "step-000000001" / "t" / "state-00000.safetensors"
    target.write_bytes(content)
    part = {"start": 8, "bytes": len(content) - 8, "shape": [len(content) - 8], "dtype": "uint8"}
    part |= {"global_shape": part["shape"], "offset": [0], "checksum": zlib.crc32(content[8:])}

    def edit(manifest: dict[str, Any], record: dict[str, Any]) -> None:
        (file,) = (each for each in record["files"] if each["name"] == target.name)
        checksum = zlib.crc32(content[:8])
        file |= {"bytes": len(content), "header_bytes": 8, "header_checksum": checksum}
        file["tensors"] = [{"name": "p", **part}]
        manifest["files"][target.name] = len(content)
        manifest["writers"].pop()
        for name in [name for name in manifest["files"] if "00001" in name]:
            del manifest["files"][name]

    forge(folder, edit)
    assert str(target) in fault(folder)
    found = checkpoint_at(folder).read("state")["p"]
    assert found.tobytes() == content[8:]  # numbers like any others
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", FILES)
def test_special_files_are_named_without_waiting(folder: Path, name: str) -> None:
    target = folder / "step-000000001" / name
    target.unlink()
    os.mkfifo(target)
    assert str(target) in fault(folder)
    target.unlink()
    target.mkdir()
    assert str(target) in fault(folder)
    target.rmdir()
    target.symlink_to(target)
    assert str(target) in fault(folder)


def test_an_endless_file_is_not_read_into_memory(folder: Path) -> None:
    target = folder / "step-000000001" / "t" / "replica-0-00000.safetensors"
    most = 2**43
    os.truncate(target, most)

    def edit(manifest: dict[str, Any], record: dict[str, Any]) -> None:
        (file,) = (each for each in record["files"] if each["name"] == target.name)
        part = file["tensors"][0]
        count = most - file["header_bytes"]
        part |= {"bytes": count, "shape": [count], "global_shape": [count], "offset": [0]}
        part |= {"dtype": "uint8", "name": "huge"}
        file |= {"bytes": most, "tensors": [part]}
        manifest["files"][target.name] = most

    forge(folder, edit)
    with pytest.raises(CheckpointError, match="no room in memory"):
        checkpoint_at(folder).read_part("replica-0", "huge")
    os.truncate(folder / "step-000000001" / "manifest.json", most)
    assert "too large" in fault(folder)


def test_an_empty_tensor_of_an_absurd_shape_is_refused(folder: Path) -> None:
    def edit(_: dict[str, Any], record: dict[str, Any]) -> None:
        file = record["files"][0]
        shape = {"shape": [0, 2**62, 2**62], "global_shape": [0, 2**62, 2**62], "offset": [0] * 3}
        part = {"name": "absurd", "dtype": "float32", "bytes": 0, "checksum": 0, **shape}
        file["tensors"].append({**part, "start": file["bytes"]})

    forge(folder, edit)
    with pytest.raises(CheckpointError, match=r"'absurd': 0 bytes cannot be"):
        checkpoint_at(folder).read("state")
