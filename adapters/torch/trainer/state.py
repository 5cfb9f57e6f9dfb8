"""Named state of a torch replica by kind (weights, optimizer, random, ...), as NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from isotrain.adapters.torch.base import gpu
from isotrain.adapters.torch.base.snapshot_guard import SnapshotGuard
from isotrain.adapters.torch.base.tensors import (
    TensorOrShard,
    copied,
    local_shard,
    overwrite,
    shard_slices,
    to_numpy,
)
from isotrain.adapters.torch.metrics.base import Metric
from isotrain.plugin import IsotrainError, StateInfo, StateKind, unknown_name

_WEIGHT_KINDS: tuple[StateKind, ...] = ("trainable", "non-trainable")
_UPDATED_KINDS: tuple[StateKind, ...] = ("trainable", "optimizer")
"""Kinds of state whose tensors only weight updates change; scalars, such as the learning rate, may differ."""


@dataclass(frozen=True)
class Section:
    """One kind of state, under names without the kind's prefix.

    Attributes:
        read: Returns its tensors by name, as they are or copied.
        write: Sets one of them; raises an IsotrainError where the name or the shape does not match.
    """

    read: Callable[[], Mapping[str, TensorOrShard]]
    write: Callable[[str, torch.Tensor], None]


class NamedState:
    """State of one replica: weights under their names, all else under `KIND/...`. All methods are local."""

    def __init__(
        self, sections: Mapping[StateKind, Section], snapshot_guard: SnapshotGuard
    ) -> None:
        """Joins sections into one state.

        Args:
            sections: State by kind, the weights among them.
            snapshot_guard: Makes steps wait until state that is copied later has been copied.
        """
        self._sections = sections
        self._snapshot_guard = snapshot_guard
        self._weights = {name: kind for kind in _WEIGHT_KINDS for name in sections[kind].read()}
        self._kinds = {str(kind): kind for kind in sections if kind not in _WEIGHT_KINDS}

    def read(self, kinds: Sequence[StateKind]) -> dict[str, np.ndarray]:
        """Copies state of some kinds, as arrays in the tensors' shapes; bfloat16 becomes float32."""
        return {name: to_numpy(tensor) for name, tensor in self._tensors(kinds)}

    def copy(
        self, kinds: Sequence[StateKind], buffers: dict[str, np.ndarray]
    ) -> Callable[[], Mapping[str, np.ndarray]]:
        """Copies state of any shape into reused arrays, in part later.

        Args:
            kinds: Kinds of state.
            buffers: Arrays of the last copy by name, which are filled again; updated.

        Returns:
            Function that copies what only weight updates change, and returns all arrays by name.
        """
        updated = [kind for kind in _UPDATED_KINDS if kind in kinds]
        later = {n: local_shard(each.detach()) for n, each in self._tensors(updated) if each.dim()}
        now = {
            n: copied(each, buffers.get(n)) for n, each in self._tensors(kinds) if n not in later
        }

        def finished() -> dict[str, np.ndarray]:
            arrays = now | {name: copied(each, buffers.get(name)) for name, each in later.items()}
            buffers.clear()
            buffers.update(arrays)
            return arrays

        return self._snapshot_guard.hold_for(later, finished)

    def describe(self, kinds: Sequence[StateKind]) -> dict[str, StateInfo]:
        """Describes the shape, dtype and size of what `read` would return; copies nothing."""
        return {name: _described(tensor) for name, tensor in self._tensors(kinds)}

    def _tensors(self, kinds: Sequence[StateKind]) -> Iterator[tuple[str, TensorOrShard]]:
        """Tensors and shards of these kinds, of any shape, each with its name in checkpoints."""
        for kind, section in self._sections.items():
            if kind in kinds:
                prefix = "" if kind in _WEIGHT_KINDS else f"{kind}/"
                for name, tensor in section.read().items():
                    yield prefix + name, tensor

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets state; names that are absent stay as they are.

        Raises:
            IsotrainError: A name or a shape does not match this model, or torch refuses a value.
        """
        with torch.no_grad():
            for name, array in state.items():
                section, local_name = self._resolve(name)
                try:
                    section.write(local_name, torch.from_numpy(np.array(array)))
                except (RuntimeError, TypeError, ValueError) as error:
                    raise IsotrainError(
                        f"{name!r} cannot be set to {array.dtype} of shape {np.shape(array)}: {error}"
                    ) from error

    def _resolve(self, name: str) -> tuple[Section, str]:
        """Section that a name belongs to, and the name within it; weights take precedence."""
        if name in self._weights:
            return self._sections[self._weights[name]], name
        prefix, _, local_name = name.partition("/")
        if prefix not in self._kinds:
            raise IsotrainError(unknown_name("weight", name, self._weights))
        return self._sections[self._kinds[prefix]], local_name


def in_place(tensors: Mapping[str, TensorOrShard], prefix: str = "") -> Section:
    """Section of tensors of any shapes, overwritten in place; the prefix is for error messages."""

    def write(name: str, value: torch.Tensor) -> None:
        if name not in tensors:
            raise IsotrainError(unknown_name("state", prefix + name, tensors))
        overwrite(prefix + name, tensors[name], value)

    return Section(lambda: tensors, write)


StateAccess = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]
"""Getter, which copies, and setter of a generator's state, a tensor."""


def _generator(device: torch.device) -> StateAccess:
    """Access to the state of a device's default generator."""
    return partial(gpu.rng_state, device), partial(gpu.set_rng_state, device=device)


def generators(device: torch.device, custom: Mapping[str, StateAccess]) -> Section:
    """Section of random generator states: torch's for the CPU and for a GPU, and the model's own by name."""
    states = {"torch": _generator(gpu.CPU), **custom}
    if device.type != "cpu":
        states["torch-cuda"] = _generator(device)

    def write(name: str, value: torch.Tensor) -> None:
        if name not in states:
            raise IsotrainError(unknown_name("generator", name, states))
        states[name][1](value)

    return Section(lambda: {name: read() for name, (read, _) in states.items()}, write)


@contextlib.contextmanager
def preserving_state(section: Section) -> Iterator[None]:
    """Context that restores a section, whose `read` must copy, at its end."""
    before = section.read()
    try:
        yield
    finally:
        for name, value in before.items():
            section.write(name, value)


def accumulators(metrics: Sequence[Metric]) -> Section:
    """Section of the metrics' accumulators, as `METRIC/SUM`."""
    by_name = {metric.name: metric for metric in metrics}

    def read() -> dict[str, torch.Tensor]:
        return {
            f"{metric.name}/{name}": total
            for metric in metrics
            for name, total in metric.named_sums().items()
        }

    def write(name: str, value: torch.Tensor) -> None:
        metric, _, sum_name = name.rpartition("/")
        if metric not in by_name:
            raise IsotrainError(unknown_name("metric", metric, by_name))
        by_name[metric].write_sum(sum_name, value)

    return Section(read, write)


def _described(tensor: TensorOrShard) -> StateInfo:
    """Shape, dtype and bytes of a tensor, and where this process's shard of it lies."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shard = local_shard(tensor)
    info = StateInfo(tuple(tensor.shape), dtype, shard.numel() * shard.element_size())
    if shard is tensor:
        return info
    offset = tuple(axis.start for axis in shard_slices(tensor))
    return replace(info, offset=offset, shard_shape=tuple(shard.shape))
