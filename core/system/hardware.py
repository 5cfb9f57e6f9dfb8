"""What this machine has, found out without any framework."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def visible_gpus(variables: Mapping[str, str] = os.environ) -> int:
    """NVIDIA GPUs of this machine that `CUDA_VISIBLE_DEVICES` lets a process see."""
    present = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    mask = variables.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return present
    listed = [entry for entry in mask.split(",") if entry.strip()]
    return min(present, len([entry for entry in listed if entry.strip() != "-1"]))


def gpu_memory_bytes(variables: Mapping[str, str] = os.environ) -> int | None:
    """Memory of the smallest NVIDIA GPU that `CUDA_VISIBLE_DEVICES` lets a process see; None if unknown."""
    mask = variables.get("CUDA_VISIBLE_DEVICES")
    seen = [] if mask is None else [f"--id={mask}"]
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", *seen]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in told.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def describe() -> dict[str, str | int | float]:
    """The machine in a few words, for a run's record."""
    return {
        "system": " ".join(os.uname()[index] for index in (0, 2, 4)),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": cores(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "gpus": visible_gpus(),
    }


def memory_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
