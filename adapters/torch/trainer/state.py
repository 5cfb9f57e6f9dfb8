"""Named state of a torch replica, kind by kind, read and written as NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

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

_OF_MODEL: tuple[StateKind, ...] = ("trainable", "non-trainable")
_UPDATED: tuple[StateKind, ...] = ("trainable", "optimizer")
"""What updates alone change, but for single numbers, such as the learning rate."""


@dataclass(frozen=True)
class Section:
    """One kind of state, by names that lack the prefix of the kind.

    Attributes:
        read: Gives its tensors, as they are or copied.
        write: Sets one of them; raises an IsotrainError where the name or the shape does not fit.
    """

    read: Callable[[], Mapping[str, TensorOrShard]]
    write: Callable[[str, torch.Tensor], None]


class NamedState:
    """The state of one replica: weights under their names, all else under `KIND/...`."""

    def __init__(
        self, sections: Mapping[StateKind, Section], snapshot_guard: SnapshotGuard
    ) -> None:
        """Puts sections together, the model's own among them; steps wait for what `snapshot_guard` holds."""
        self._sections = sections
        self._snapshot_guard = snapshot_guard
        self._weights = {name: kind for kind in _OF_MODEL for name in sections[kind].read()}
        self._kinds = {str(kind): kind for kind in sections if kind not in _OF_MODEL}

    def read(self, kinds: Sequence[StateKind]) -> dict[str, np.ndarray]:
        """Copies state of these kinds; bfloat16 becomes float32."""
        return {name: to_numpy(tensor) for name, tensor in self._tensors(kinds)}

    def copy(
        self, kinds: Sequence[StateKind], kept: dict[str, np.ndarray]
    ) -> Callable[[], Mapping[str, np.ndarray]]:
        """Copies as `read` does, into arrays that are kept for it; those of what there is no more are let go.

        What nothing but updates changes may be copied when what this gives is called.
        """
        updated = [kind for kind in _UPDATED if kind in kinds]
        later = {n: local_shard(each.detach()) for n, each in self._tensors(updated) if each.dim()}
        now = {n: copied(each, kept.get(n)) for n, each in self._tensors(kinds) if n not in later}

        def finished() -> dict[str, np.ndarray]:
            found = now | {name: copied(each, kept.get(name)) for name, each in later.items()}
            kept.clear()
            kept.update(found)
            return found

        return self._snapshot_guard.hold_for(later, finished)

    def describe(self, kinds: Sequence[StateKind]) -> dict[str, StateInfo]:
        """Tells what `read` would give."""
        return {name: _described(tensor) for name, tensor in self._tensors(kinds)}

    def _tensors(self, kinds: Sequence[StateKind]) -> Iterator[tuple[str, TensorOrShard]]:
        for kind, section in self._sections.items():
            if kind in kinds:
                prefix = "" if kind in _OF_MODEL else f"{kind}/"
                for name, tensor in section.read().items():
                    yield prefix + name, tensor

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets state.

        Raises:
            IsotrainError: A name or a shape does not fit this model, or torch refuses what is given.
        """
        with torch.no_grad():
            for name, array in state.items():
                section, own = self._found(name)
                try:
                    section.write(own, torch.from_numpy(np.array(array)))
                except (RuntimeError, TypeError, ValueError) as error:
                    raise IsotrainError(
                        f"{name!r} cannot be set to {array.dtype} of shape {np.shape(array)}: {error}"
                    ) from error

    def _found(self, name: str) -> tuple[Section, str]:
        """The section that a name belongs to, and the name in it; a weight's name goes first."""
        if name in self._weights:
            return self._sections[self._weights[name]], name
        prefix, _, own = name.partition("/")
        if prefix not in self._kinds:
            raise IsotrainError(unknown_name("weight", name, self._weights))
        return self._sections[self._kinds[prefix]], own


def in_place(tensors: Mapping[str, TensorOrShard], prefix: str = "") -> Section:
    """A section of tensors that stay where they are; the prefix is for messages."""

    def write(name: str, value: torch.Tensor) -> None:
        if name not in tensors:
            raise IsotrainError(unknown_name("state", prefix + name, tensors))
        overwrite(prefix + name, tensors[name], value)

    return Section(lambda: tensors, write)


State = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]
"""How a state is copied, and how it is set."""


def generators(device: torch.device, own: Mapping[str, State]) -> Section:
    """Generators of random numbers: torch's for the CPU and for a GPU, and the model's own by name."""
    states: dict[str, State] = {"torch": (torch.get_rng_state, torch.set_rng_state), **own}
    if device.type == "cuda":
        states["torch-cuda"] = (
            lambda: torch.cuda.get_rng_state(device),
            lambda state: torch.cuda.set_rng_state(state, device),
        )

    def write(name: str, value: torch.Tensor) -> None:
        if name not in states:
            raise IsotrainError(unknown_name("generator", name, states))
        states[name][1](value)

    return Section(lambda: {name: read() for name, (read, _) in states.items()}, write)


@contextlib.contextmanager
def preserving_state(section: Section) -> Iterator[None]:
    """Puts back at its end what a section that gives copies has had."""
    before = section.read()
    try:
        yield
    finally:
        for name, value in before.items():
            section.write(name, value)


def accumulators(metrics: Sequence[Metric]) -> Section:
    """What metrics have added up, as `METRIC/SUM`."""
    by_name = {metric.name: metric for metric in metrics}

    def read() -> dict[str, torch.Tensor]:
        return {
            f"{metric.name}/{name}": total
            for metric in metrics
            for name, total in metric.named_sums().items()
        }

    def write(name: str, value: torch.Tensor) -> None:
        owner, _, own = name.rpartition("/")
        if owner not in by_name:
            raise IsotrainError(unknown_name("metric", owner, by_name))
        by_name[owner].write_sum(own, value)

    return Section(read, write)


def _described(tensor: TensorOrShard) -> StateInfo:
    dtype = str(tensor.dtype).removeprefix("torch.")
    own = local_shard(tensor)
    info = StateInfo(tuple(tensor.shape), dtype, own.numel() * own.element_size())
    if own is tensor:
        return info
    offset = tuple(axis.start for axis in shard_slices(tensor))
    return replace(info, offset=offset, shard_shape=tuple(own.shape))
