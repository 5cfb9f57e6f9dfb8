"""NVIDIA GPUs of this machine, as NVML, the management library of NVIDIA's driver, reports them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
"""Bytes for a UUID or a version; NVML's limit."""


@dataclass(frozen=True)
class NvidiaGpu:
    """A GPU, or an instance of one that is partitioned (MIG).

    Attributes:
        uuid: Its UUID, such as `GPU-...` or `MIG-...`; empty if unknown.
        memory_bytes: Bytes of its memory; None if unknown.
        instances: MIG instances; None for a GPU that is not partitioned.
        name: Name of the product, such as `NVIDIA H200`; empty if unknown.
    """

    uuid: str = ""
    memory_bytes: int | None = None
    instances: tuple[NvidiaGpu, ...] | None = None
    name: str = ""

    def __str__(self) -> str:
        """Name and memory, such as `NVIDIA H200, 139.8 GiB`."""
        memory = f", {self.memory_bytes / 2**30:.1f} GiB" if self.memory_bytes else ""
        return (self.name or self.uuid) + memory


@dataclass(frozen=True)
class NvmlReport:
    """Driver and GPUs of this machine as NVML reports them.

    Attributes:
        driver: Version of the driver; empty if NVML cannot be used.
        gpus: GPUs that can be used, in the order of the PCI bus.
        faults: Reasons why NVML or a GPU cannot be used, in NVML's words.
    """

    driver: str = ""
    gpus: tuple[NvidiaGpu, ...] = ()
    faults: tuple[str, ...] = ()


class _NvmlError(Exception):
    """An error of NVML, in its words."""


class _Nvml:
    """Functions of the library, each of which raises `_NvmlError` unless it succeeds."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.nvmlErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise _NvmlError(f"this driver is too old for {name}") from error
        if code:
            raise _NvmlError(self._library.nvmlErrorString(code).decode())

    def handle(self, name: str, *arguments: object) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.call(name, *arguments, ctypes.byref(handle))
        return handle

    def number(self, name: str, *arguments: object) -> int:
        number = ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(number))
        return number.value

    def text(self, name: str, *arguments: object) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(name, *arguments, buffer, _TEXT_BYTES)
        return buffer.value.decode()

    def gpu(self, handle: ctypes.c_void_p) -> NvidiaGpu:
        """A GPU with its instances, or an instance."""
        sizes = (ctypes.c_ulonglong * 3)()  # total, free, used
        try:
            self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(sizes))
        except _NvmlError:
            sizes[0] = 0  # shared with the CPU
        name = ""
        with contextlib.suppress(_NvmlError):
            name = self.text("nvmlDeviceGetName", handle)
        uuid = self.text("nvmlDeviceGetUUID", handle)
        return NvidiaGpu(uuid, sizes[0] or None, self._instances(handle), name)

    def _instances(self, gpu: ctypes.c_void_p) -> tuple[NvidiaGpu, ...] | None:
        pending = ctypes.c_uint()
        try:
            mode = ctypes.c_uint()
            self.call("nvmlDeviceGetMigMode", gpu, ctypes.byref(mode), ctypes.byref(pending))
        except _NvmlError:  # neither this GPU nor, perhaps, the driver has MIG
            return None
        if not mode.value:
            return None
        instances = []
        for index in range(self.number("nvmlDeviceGetMaxMigDeviceCount", gpu)):
            try:
                handle = self.handle("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index)
            except _NvmlError:  # there are fewer
                continue
            instances.append(self.gpu(handle))
        return tuple(instances)


@functools.cache
def report() -> NvmlReport | None:
    """The report of this machine, made once per process; None if there is no NVML."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    nvml = _Nvml(library)
    try:
        nvml.call("nvmlInit_v2")
    except _NvmlError as error:
        return NvmlReport(faults=(f"NVML: {error}",))
    try:
        return _report(nvml)
    except _NvmlError as error:
        return NvmlReport(faults=(f"NVML: {error}",))
    finally:
        with contextlib.suppress(_NvmlError):
            nvml.call("nvmlShutdown")


def _report(nvml: _Nvml) -> NvmlReport:
    gpus, faults = [], []
    for index in range(nvml.number("nvmlDeviceGetCount_v2")):
        try:
            gpus.append(nvml.gpu(nvml.handle("nvmlDeviceGetHandleByIndex_v2", index)))
        except _NvmlError as error:
            faults.append(f"GPU {index}: {error}")
    return NvmlReport(nvml.text("nvmlSystemGetDriverVersion"), tuple(gpus), tuple(faults))
