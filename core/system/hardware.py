"""Hardware of this machine (CPU cores, memory, NVIDIA GPUs), detected without any framework."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path


def cores() -> int:
    """Number of CPU cores in this process's affinity mask."""
    return len(os.sched_getaffinity(0))


def busy_cores(seconds: float) -> float:
    """Number of cores in this process's affinity mask that any program keeps busy, over some seconds."""
    import psutil  # takes as long as all other imports of this module

    percents = psutil.cpu_percent(seconds, percpu=True)
    usable = (core for core in os.sched_getaffinity(0) if core < len(percents))
    return sum(percents[core] for core in usable) / 100


def visible_gpus(variables: Mapping[str, str] = os.environ) -> int:
    """Number of NVIDIA GPUs that a process with these environment variables sees (`CUDA_VISIBLE_DEVICES`).

    As in CUDA, entries after the first index that no GPU has are ignored, a repeated entry means none, and a
    process sees one MIG instance at most; UUIDs are taken as they are.
    """
    present = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    mask = variables.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return present
    entries = (entry.strip() for entry in mask.split(","))
    seen = list(itertools.takewhile(lambda entry: _is_gpu(entry, present), entries))
    if len(set(seen)) < len(seen):
        return 0
    is_mig = bool(seen) and seen[0].startswith("MIG-")
    return min(1 if is_mig else present, len(seen))


def _is_gpu(entry: str, present: int) -> bool:
    """Whether an entry of `CUDA_VISIBLE_DEVICES` names one of the GPUs: by index, or by any UUID."""
    try:
        return 0 <= int(entry) < present
    except ValueError:
        return bool(entry)


def gpu_memory_bytes(variables: Mapping[str, str] = os.environ) -> int | None:
    """Bytes of memory of the smallest visible NVIDIA GPU (`CUDA_VISIBLE_DEVICES`); None if unknown."""
    mask = variables.get("CUDA_VISIBLE_DEVICES")
    ids = [] if mask is None else [f"--id={mask}"]
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", *ids]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return min(int(mebibytes) for mebibytes in done.stdout.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def describe() -> dict[str, str | int | float]:
    """The machine as plain values, for `versions.json` of a run."""
    return {
        "system": " ".join(os.uname()[index] for index in (0, 2, 4)),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": cores(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "gpus": visible_gpus(),
    }


def memory_bytes() -> int:
    """Bytes of physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    """Model name of the CPU, or its architecture if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
