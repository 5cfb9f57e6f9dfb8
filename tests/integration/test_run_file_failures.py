"""Runs whose files cannot be written: a removed directory, a full disk, no more threads."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import pytest
from integration.failure_runs import STEP, failure, spec

import isotrain
from isotrain.core.errors import RunFailedError
from isotrain.core.launching.processes import rank_process

pytestmark = pytest.mark.usefixtures("reference", "no_processes_left")

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(params=["forked", pytest.param("fresh", marks=pytest.mark.slow)])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries a test with processes that are forked, and with fresh ones."""
    monkeypatch.setenv("ISOTRAIN_START", request.param)


def removes_directory(session: Any) -> None:
    """Renames it, which is one act: what others still write there could end a removal file by file."""
    for batch in session.batches():
        session.step(batch)
        if session.is_main and batch.step == STEP:
            session.run_directory.rename(session.run_directory.with_name("moved away"))
            if session.spec.checkpoint is not None:
                session.run_directory.mkdir()  # as a checkpoint that is being written does
            session.end_epoch(0, {"some": 1.0})


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("checkpoint", [None, {"every_steps": 100_000}])
def test_a_removed_run_directory_ends_the_run(tmp_path: Path, checkpoint: Any) -> None:
    folder = tmp_path / "run"
    text = failure(removes_directory, spec(checkpoint=checkpoint), "reference", folder)
    assert f"the run's files in {folder} cannot be written" in text
    assert "No such file or directory" in text
    assert f"versions.json: removed from {folder} by others" in text


def test_a_thread_limit_is_named(tmp_path: Path) -> None:
    refuse = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    with mock.patch.object(rank_process, "threading", mock.Mock(Thread=refuse)):
        text = failure(removes_versions, spec(), "reference", tmp_path / "run")
    assert "no more processes or threads. Raise the limit (ulimit -u)" in text


def reaches_thread_limit(session: Any) -> None:
    """Raises what torch raises where it may start no thread, on one rank."""
    if session.is_main:
        raise RuntimeError("Resource temporarily unavailable")
    removes_versions(session)


def test_a_thread_limit_of_a_rank_is_named(tmp_path: Path) -> None:
    text = failure(reaches_thread_limit, spec(), "reference", tmp_path / "run")
    assert "RuntimeError: Resource temporarily unavailable" in text
    assert "no more processes or threads. Raise the limit (ulimit -u)" in text


def removes_versions(session: Any) -> int:
    (session.run_directory / "versions.json").unlink(missing_ok=True)
    return int(session.rank)


def test_return_values_survive_lost_records(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"versions\.json: removed from") as caught:
        isotrain.launch(
            removes_versions,
            spec(),
            backend="reference",
            replicas=2,
            output=tmp_path / "run",
        )
    assert caught.value.result == [0, 1]


def prints_much(session: Any) -> None:
    for batch in session.batches():
        session.step(batch)
        if session.is_main:
            print("x" * 10_000)


@pytest.mark.usefixtures("both_ways")
def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        text = failure(prints_much, spec(), "reference", folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    assert f"the run's files in {folder} cannot be written" in text
    assert "No space left on device" in text


def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        text = failure(prints_much, spec(), "reference", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large. Raise the limit of a file's size (ulimit -f)." in text
