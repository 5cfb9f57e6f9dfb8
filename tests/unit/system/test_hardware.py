"""What the machine has is found out without any framework."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from isotrain.core.system import hardware


def test_the_smallest_visible_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *--id=1) echo 81559;; *) echo 81559; echo 24564;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.gpu_memory_bytes({}) == 24564 * 2**20
    assert hardware.gpu_memory_bytes({"CUDA_VISIBLE_DEVICES": "1"}) == 81559 * 2**20
    tool.write_text("#!/bin/sh\necho '[N/A]'\n")
    assert hardware.gpu_memory_bytes({}) is None
    tool.unlink()
    assert hardware.gpu_memory_bytes({}) is None


def test_busy_cores_are_those_of_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds, percpu: [100.0, 50.0, 25.0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 7})
    assert hardware.busy_cores(0.0) == 0.75


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("2", 1),
        ("0, 3", 2),
        ("0,9,1", 1),
        ("1,-1,2", 1),
        ("GPU-8f6,GPU-11c", 2),
        ("MIG-5d2", 1),
        ("MIG-5d2,MIG-7e1", 1),
        ("1,1", 0),
        ("GPU-8f6,GPU-8f6", 0),
    ],
)
def test_gpus_are_seen_as_cuda_sees_them(
    monkeypatch: pytest.MonkeyPatch, mask: str | None, seen: int
) -> None:
    """Entries count up to the first unknown index; device files stand in for a host with four GPUs."""
    files = [Path(f"/dev/nvidia{name}") for name in ("0", "1", "2", "3", "ctl", "-uvm", "2-caps")]
    monkeypatch.setattr(Path, "glob", lambda *_: iter(files))
    variables = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert hardware.visible_gpus(variables) == seen
