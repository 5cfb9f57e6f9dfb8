"""Hardware of this machine (CPU cores, memory, NVIDIA GPUs), detected without any framework."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from isotrain.core.system import cgroups, nvml
from isotrain.core.system.cgroups import GroupMemory
from isotrain.core.system.nvml import NvidiaGpu


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

    They are those of NVML, or of the device files where there is no NVML. As in CUDA, entries after the first
    that no GPU has are ignored, a repeated entry means none, and a process sees one MIG instance at most.
    """
    return len(_visible_gpus(variables))


def gpu_memory_bytes(variables: Mapping[str, str] = os.environ) -> int | None:
    """Bytes of memory of the smallest visible NVIDIA GPU (`CUDA_VISIBLE_DEVICES`); None if unknown."""
    sizes = (gpu.memory_bytes for gpu in _visible_gpus(variables))
    return min((size for size in sizes if size is not None), default=None)


def gpu_names() -> list[str]:
    """Names of this machine's NVIDIA GPUs, visible or not, with their memory where NVML tells it."""
    report = nvml.report()
    return [] if report is None else [str(gpu) for gpu in report.gpus]


def gpu_faults() -> str:
    """Reasons why NVIDIA's driver or some of its GPUs cannot be used, in NVML's words; empty for none."""
    report = nvml.report()
    return "; ".join(report.faults) if report else ""


def _visible_gpus(variables: Mapping[str, str]) -> Sequence[NvidiaGpu]:
    """The visible GPUs; where none of them is whole, the first visible MIG instance."""
    report = nvml.report()
    gpus = _device_files() if report is None else report.gpus
    mask = variables.get("CUDA_VISIBLE_DEVICES")
    entries = map(str, range(len(gpus))) if mask is None else map(str.strip, mask.split(","))
    named: list[NvidiaGpu] = []
    for entry in entries:
        gpu = _named(entry, gpus, has_uuids=report is not None)
        if gpu is None:
            break
        named.append(gpu)
    if len(set(named)) < len(named):
        return []
    whole = [gpu for gpu in named if gpu.instances is None]
    instances = [instance for gpu in named for instance in gpu.instances or ()]
    return (whole or instances[:1])[: len(gpus)]


def _device_files() -> Sequence[NvidiaGpu]:
    """GPUs by their device files, with the numbers of these for UUIDs."""
    numbers = (path.name[6:] for path in Path("/dev").glob("nvidia[0-9]*"))
    return [NvidiaGpu(number) for number in numbers if number.isdigit()]


def _named(entry: str, gpus: Sequence[NvidiaGpu], *, has_uuids: bool) -> NvidiaGpu | None:
    """The GPU that an entry of `CUDA_VISIBLE_DEVICES` names, by index or by the start of one UUID.

    Args:
        entry: Entry of the variable.
        gpus: GPUs of this machine.
        has_uuids: Whether their UUIDs are known; otherwise any UUID names one.
    """
    with contextlib.suppress(ValueError):
        return gpus[int(entry)] if 0 <= int(entry) < len(gpus) else None
    if not has_uuids:
        instances = (NvidiaGpu(entry),) if entry.startswith("MIG-") else None
        return NvidiaGpu(entry, instances=instances) if entry else None
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    for gpu in gpus:
        by_uuid |= {each.uuid: replace(gpu, instances=(each,)) for each in gpu.instances or ()}
    matches = [gpu for uuid, gpu in by_uuid.items() if entry and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def describe() -> dict[str, str | int | float]:
    """The machine as plain values, for `versions.json` of a run; driver and faults of GPUs where known."""
    report = nvml.report()
    gpu_facts = {"nvidia_driver": report.driver if report else "", "gpu_faults": gpu_faults()}
    return {
        "system": " ".join(os.uname()[index] for index in (0, 2, 4)),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": cores(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "gpus": visible_gpus(),
        **{name: text for name, text in gpu_facts.items() if text},
    }


def memory_bytes() -> int:
    """Bytes of memory that processes here may use: this machine's, or the limit of their control group."""
    limit = memory_limit()
    return _physical_memory_bytes() if limit is None else limit.nbytes


def memory_limit() -> GroupMemory | None:
    """The memory limit of this process's control group (cgroup), such as a container's.

    Returns:
        The limit; None if there is none, or not below the physical memory.
    """
    limit = cgroups.memory_limit()
    return limit if limit is not None and limit.nbytes < _physical_memory_bytes() else None


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    """Model name of the CPU, or its architecture if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
