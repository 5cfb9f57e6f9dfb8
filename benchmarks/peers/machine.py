"""Description of the machine on which the measurements were taken."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from benchmarks.peers import environment

_PACKAGES = ("torch", "tensorflow-cpu", "tensorflow", "keras", "horovod", "numpy")


def described(seed: int) -> dict[str, str]:
    """Processor, load, versions, date, and the seed of the orders."""
    packages = {name: _version(name) for name in _PACKAGES}
    peers = environment.versions() if environment.is_there() else {}
    versions = {name: version for name, version in (packages | peers).items() if version}
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load before": f"{os.getloadavg()[0]:.1f}",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **versions,
        "date": datetime.now(UTC).date().isoformat(),
        "seed": str(seed),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    """The model name that Linux gives; elsewhere what Python knows."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
