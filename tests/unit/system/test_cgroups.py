"""Memory limits of control groups are read from the kernel's files, in a folder that stands for the root."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.core.system import cgroups, hardware
from isotrain.core.system.cgroups import GroupMemory

UNLIMITED = 9223372036854771712
"""Limit of version 1 that stands for none."""


def write(root: Path, files: dict[str, object]) -> Path:
    """Files of a machine; returns the folder of its control groups."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n", encoding="ascii")
    return root / "sys/fs/cgroup"


def test_of_version_2_the_smallest_limit_up_the_hierarchy_holds(tmp_path: Path) -> None:
    groups = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job/step",
            "sys/fs/cgroup/slurm/job/step/memory.max": "max",
            "sys/fs/cgroup/slurm/job/memory.max": 3000,
            "sys/fs/cgroup/slurm/memory.max": 5000,
        },
    )
    assert cgroups.memory_limit(tmp_path) == GroupMemory(3000, groups / "slurm/job/memory.max")


def test_of_version_1_the_group_of_the_memory_controller_counts(tmp_path: Path) -> None:
    groups = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/a\n4:cpu,cpuacct:/docker/b\n1:name=systemd:/\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED,
            "sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes": 4000,
            "sys/fs/cgroup/memory/docker/b/memory.limit_in_bytes": 10,
        },
    )
    expected = GroupMemory(4000, groups / "memory/docker/a/memory.limit_in_bytes")
    assert cgroups.memory_limit(tmp_path) == expected


@pytest.mark.parametrize(
    ("line", "file"),
    [("0::/", "memory.max"), ("5:memory:/docker/a", "memory/memory.limit_in_bytes")],
)
def test_a_container_sees_its_own_limit_at_the_top(tmp_path: Path, line: str, file: str) -> None:
    groups = write(tmp_path, {"proc/self/cgroup": line, f"sys/fs/cgroup/{file}": 2000})
    assert cgroups.memory_limit(tmp_path) == GroupMemory(2000, groups / file)


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": "0::/user.slice"}])
def test_without_files_there_is_no_limit(tmp_path: Path, files: dict[str, object]) -> None:
    write(tmp_path, files)
    assert cgroups.memory_limit(tmp_path) is None


def test_a_limit_counts_if_it_is_below_the_memory_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "memory_limit", lambda: None)
    physical = hardware.memory_bytes()
    file = Path("/sys/fs/cgroup/memory.max")
    monkeypatch.setattr(cgroups, "memory_limit", lambda: GroupMemory(UNLIMITED, file))
    assert hardware.memory_limit() is None
    assert hardware.memory_bytes() == physical
    monkeypatch.setattr(cgroups, "memory_limit", lambda: GroupMemory(1000, file))
    assert hardware.memory_limit() == GroupMemory(1000, file)
    assert hardware.memory_bytes() == 1000
