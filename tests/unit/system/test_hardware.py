"""What the machine has is found out without any framework."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from helpers.stand_in_nvml import StandInNvml

from isotrain.core.system import hardware, nvml


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandInNvml:
    return StandInNvml(monkeypatch, tmp_path)


MACHINE = """
driver 580.159.04
gpu 0 GPU-8f6 143771
gpu 0 GPU-8f0 143771
gpu 0 GPU-11c 81559
mig MIG-5d2 9728
mig MIG-5e7 19968
"""
"""Two whole GPUs, and one that is partitioned."""


@pytest.mark.parametrize(
    ("mask", "seen", "gibibytes"),
    [
        (None, 2, 140.4),
        ("0,1", 2, 140.4),
        ("2", 1, 9.5),
        ("GPU-8f6,GPU-8f0", 2, 140.4),
        ("GPU-8f6,GPU-9,GPU-8f0", 1, 140.4),
        ("GPU-8f", 0, None),  # the start of two UUIDs
        ("1,1", 0, None),
        ("MIG-5e", 1, 19.5),
        ("MIG-5d2,MIG-5e7", 1, 9.5),
        ("MIG-9", 0, None),
    ],
)
def test_nvml_tells_gpus_and_their_memory(
    machine: StandInNvml, mask: str | None, seen: int, gibibytes: float | None
) -> None:
    machine.becomes(MACHINE)
    variables = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert hardware.visible_gpus(variables) == seen
    memory = hardware.gpu_memory_bytes(variables)
    assert (None if memory is None else round(memory / 2**30, 1)) == gibibytes


def test_of_partitioned_gpus_a_process_sees_one_instance(machine: StandInNvml) -> None:
    machine.becomes("gpu 0 GPU-1 81559\nmig none 0\ngpu 0 GPU-2 81559\nmig MIG-3 9728\n")
    assert hardware.visible_gpus({}) == 1
    assert hardware.visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == 0, "it has no instance"


def test_gpus_have_the_names_of_their_products(machine: StandInNvml) -> None:
    machine.becomes("gpu 0 GPU-1 143771 NVIDIA H200\ngpu 0 GPU-2 0 NVIDIA GB10\ngpu 0 GPU-3 1024\n")
    assert hardware.gpu_names() == ["NVIDIA H200, 140.4 GiB", "NVIDIA GB10", "GPU-3, 1.0 GiB"]


def test_without_nvml_no_gpu_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "report", lambda: None)
    assert hardware.gpu_names() == []


def test_a_driver_older_than_mig_has_whole_gpus(machine: StandInNvml) -> None:
    machine.becomes("driver 418.87\ngpu 0 GPU-1 32510\ngpu 0 GPU-2 0\n", is_old=True)
    assert hardware.visible_gpus({}) == 2
    assert hardware.gpu_memory_bytes({}) == 32510 * 2**20, "the other shares the CPU's"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("init 9\n", "NVML: Driver Not Loaded"),
        ("init 18\n", "NVML: Driver/library version mismatch"),
    ],
)
def test_without_a_usable_driver_there_is_no_gpu(
    machine: StandInNvml, text: str, reason: str
) -> None:
    machine.becomes(text + "gpu 0 GPU-1 81559\n")
    described = hardware.describe()
    assert (described["gpus"], described["gpu_faults"]) == (0, reason)
    assert "nvidia_driver" not in described


def test_a_lost_gpu_is_named_and_not_counted(machine: StandInNvml) -> None:
    machine.becomes(MACHINE.replace("gpu 0 GPU-8f0", "gpu 15 GPU-8f0"))
    described = hardware.describe()
    assert (described["gpus"], described["gpu_faults"]) == (1, "GPU 1: GPU is lost")
    assert described["nvidia_driver"] == "580.159.04"


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
    """Entries count up to the first unknown index. Without NVML, device files stand for four GPUs."""
    monkeypatch.setattr(nvml, "report", lambda: None)
    files = [Path(f"/dev/nvidia{name}") for name in ("0", "1", "2", "3", "ctl", "-uvm", "2-caps")]
    monkeypatch.setattr(Path, "glob", lambda *_: iter(files))
    variables = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert hardware.visible_gpus(variables) == seen
