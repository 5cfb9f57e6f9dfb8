"""A machine with GPUs that only records what torch is asked for: tensors stay on the CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

from isotrain.adapters.torch.adapter import TorchDDP
from isotrain.adapters.torch.base import gpu


class RecordedGPUs:
    """Stands for `torch.cuda`; it has no streams but the default one, so that asking for another fails.

    Attributes:
        calls: Name and arguments of each call of torch that concerns GPUs, in order.
        threads: Identifier of the thread of each call.
    """

    def __init__(self, gpus: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: list[int] = []
        self._gpus = gpus
        self._current = 0
        self._added = threading.Condition()

    def record(self, *call: Any) -> None:
        with self._added:
            self.calls.append(call)
            self.threads.append(threading.get_ident())
            self._added.notify_all()

    def wait_for(self, count: int, name: str) -> bool:
        """Waits until there are `count` calls of a name."""
        with self._added:
            return self._added.wait_for(
                lambda: [each for each, *_ in self.calls].count(name) >= count, 60
            )

    def is_available(self) -> bool:
        return self._gpus > 0

    def is_initialized(self) -> bool:
        return self._gpus > 0

    def init(self) -> None:
        if not self._gpus:
            raise RuntimeError("Found no NVIDIA driver on your system.")

    def device_count(self) -> int:
        return self._gpus

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: torch.device) -> None:
        self.record("set_device", device)
        self._current = device.index

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.record("device", device)
        yield
        self.record("end of device")

    def synchronize(self, device: torch.device) -> None:
        self.record("synchronize", device)

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        self.record("get_rng_state", device)
        return torch.full((16,), device.index, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.record("set_rng_state", state[0].item(), device)


def recorded_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int) -> RecordedGPUs:
    """Lets torch and isotrain see a machine with so many GPUs."""
    recorded = RecordedGPUs(gpus)
    monkeypatch.setattr(gpu, "cuda", recorded)
    monkeypatch.setattr(gpu, "version", SimpleNamespace(cuda="12.8", hip=None))
    monkeypatch.setattr(TorchDDP, "accelerators", lambda _: gpus)
    return recorded


def keep_tensors_on_cpu(monkeypatch: pytest.MonkeyPatch, recorded: RecordedGPUs) -> None:
    """Creates and copies tensors on the CPU where a GPU is requested, and records that."""
    for function in _device_constructors():
        name = getattr(function, "__name__", "")
        if getattr(torch, name, None) is function:
            monkeypatch.setattr(torch, name, _on_cpu(recorded, name, function))
    monkeypatch.setattr(torch.Tensor, "to", _on_cpu(recorded, "to", torch.Tensor.to))

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        recorded.record("pin_memory")
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)


def _on_cpu(recorded: RecordedGPUs, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the CPU for each GPU among its arguments; calls with a GPU are recorded."""

    def without_gpu(value: Any) -> Any:
        return gpu.CPU if isinstance(value, torch.device) and value.type == "cuda" else value

    def call(*arguments: Any, **options: Any) -> Any:
        for value in (*arguments, *options.values()):
            if without_gpu(value) is not value:
                recorded.record(name, value)
        return function(
            *map(without_gpu, arguments),
            **{key: without_gpu(value) for key, value in options.items()},
        )

    return call
