"""Features of the installed Horovod build, read from its files; imports neither it nor a framework."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "horovod"
_EXTENSIONS = {"torch": "torch/mpi_lib_v2.*.so", "tensorflow": "tensorflow/mpi_lib.*.so"}
_RECORDED_NAMES = {"torch": "pytorch", "tensorflow": "tensorflow"}
_CLASS_SYMBOLS = {
    "gloo": b"14GlooController",
    "mpi": b"13MPIController",
    "nccl": b"13NCCLAllreduce",
}
_FAILED_START = b"Horovod could not reach the other processes"
"""Text of a Horovod whose start can fail and be tried again (part 8 of the patch of `build_horovod`)."""
_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


@dataclass(frozen=True)
class Build:
    """Installed build of Horovod for one framework.

    Attributes:
        version: Version of Horovod.
        extension: Compiled library for the framework; None if it was not built.
        framework_version: Version of the framework that it was built for, if Horovod recorded it.
    """

    version: str
    extension: Path | None
    framework_version: str | None


@functools.cache
def installed(framework: str) -> Build | None:
    """Finds the installed Horovod and its extension for `framework`; None without Horovod."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    module_spec = importlib.util.find_spec(DISTRIBUTION)
    if module_spec is None or not module_spec.submodule_search_locations:
        return None
    folder = Path(module_spec.submodule_search_locations[0])
    extension = next(folder.glob(_EXTENSIONS[framework]), None)
    return Build(version, extension, _recorded_version(folder, framework))


def _recorded_version(folder: Path, framework: str) -> str | None:
    try:
        versions = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return versions.get(_RECORDED_NAMES[framework])


@functools.cache
def has_collective(extension: Path, collective: str) -> bool:
    """Whether the compiled library has the class that implements a collective."""
    return _contains(extension, _CLASS_SYMBOLS[collective])


@functools.cache
def survives_failed_start(extension: Path) -> bool:
    """Whether a process lives on where Horovod's start fails because another process is lost."""
    return _contains(extension, _FAILED_START)


def _contains(extension: Path, text: bytes) -> bool:
    with (
        extension.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return content.find(text) >= 0


def started_by_mpi() -> bool:
    """Whether an MPI launcher started this process; Horovod's MPI needs that."""
    return any(variable in os.environ for variable in _MPI_VARIABLES)
