"""Named state of a replica, read and written as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from isotrain.plugin import (
    IsotrainError,
    StateInfo,
    StateKind,
    keras_model,
    keras_private,
    unknown_name,
)
from isotrain_jax import layout
from isotrain_jax.program import OF_VARIABLES, ReplicaTrainer, State


class Place(NamedTuple):
    """Location of a named value in a `State`, and its shape."""

    part: str
    index: int
    shape: tuple[int, ...]


class Names:
    """Names of a replica's state, and their locations in a `State`.

    Seeds of random layers (dropout) differ between replicas, so that their draws do. Under their
    names they are those of replica 0.
    """

    def __init__(self, program: ReplicaTrainer, rank: int, place: int | None = None) -> None:
        """Names the variables of a trainer.

        Args:
            program: Trainer of the replica.
            rank: Rank of the process.
            place: Index of its shard of sharded weights and slots; None: its rank.
        """
        variables, scale = program.variables, program.loss_scale
        weights = [*variables.trainable, *variables.others]
        known = dict(zip(keras_model.canonical_names(weights), weights, strict=True))
        slots = [v for v in variables.slots if all(v is not each for each in scale.values())]
        named_slots = zip(keras_model.canonical_names(slots), slots, strict=True)
        places = {
            id(variable): Place(part, index, tuple(variable.shape))
            for part in OF_VARIABLES
            for index, variable in enumerate(getattr(variables, part))
        }
        by_kind: dict[StateKind, dict[str, Any]] = {
            "trainable": {n: v for n, v in known.items() if places[id(v)].part == "trainable"},
            "non-trainable": {n: v for n, v in known.items() if places[id(v)].part == "others"},
            "optimizer": {f"optimizer/{name}": v for name, v in named_slots},
            "loss-scale": {f"loss-scale/{name}": v for name, v in scale.items()},
            "metrics": {f"metrics/{name}": v for name, v in program.sums().items()},
        }
        self._places = {
            kind: {name: places[id(variable)] for name, variable in own.items()}
            for kind, own in by_kind.items()
        }
        self._alone = program.own_slots
        self._place = rank if place is None else place
        self._shift = keras_model.seed_offset(rank)

    def read(self, state: State, kinds: Sequence[StateKind]) -> dict[str, np.ndarray]:
        """Copies state of these kinds to NumPy, in the shapes of the variables or their shards."""
        return {
            name: shifted(name, self._seen(place, to_numpy(value)), -self._shift)
            for name, place, value in self._chosen(state, kinds)
        }

    def _seen(self, place: Place, array: np.ndarray) -> np.ndarray:
        """Array in the variable's shape, or a shard without padding."""
        where = self._where(place, array.shape)
        return layout.unpad(array, where[1]) if where else array.reshape(place.shape)

    def described(self, state: State, kinds: Sequence[StateKind]) -> dict[str, StateInfo]:
        """Describes the state that `read` would return."""
        return {
            name: self._described(place, value) for name, place, value in self._chosen(state, kinds)
        }

    def _described(self, place: Place, value: jax.Array) -> StateInfo:
        """Shape, dtype and shard of a named value."""
        where = self._where(place, value.shape)
        info = StateInfo(place.shape, value.dtype.name, value.nbytes, *where)
        is_alone = place.part == "slots" and place.index in self._alone
        return info.on_this_replica_only() if is_alone else info

    def of_optimizer(self) -> set[str]:
        """Names of the optimizer state."""
        return set(self._places["optimizer"])

    def _where(self, place: Place, held: tuple[int, ...]) -> tuple[Any, ...]:
        """Offset and shape of the local shard; empty where the state is not sharded."""
        is_whole = not place.shape or held == place.shape
        return () if is_whole else layout.shard_extent(place.shape, held, self._place)

    def _chosen(
        self, state: State, kinds: Sequence[StateKind]
    ) -> Iterator[tuple[str, Place, jax.Array]]:
        """Values of these kinds, in the shapes of a `State`, with name and location."""
        for kind, places in self._places.items():
            if kind in kinds:
                for name, place in places.items():
                    yield name, place, getattr(state, place.part)[place.index]

    def written(
        self,
        state: State,
        given: Mapping[str, np.ndarray],
        place: Callable[[np.ndarray], jax.Array],
    ) -> State:
        """The state with some values replaced.

        Args:
            state: State of the replica.
            given: Arrays by name: of a sharded value the shard, or all of it.
            place: Function that copies a NumPy array to the device.

        Raises:
            IsotrainError: A name or a shape does not fit this model.
        """
        parts = {part: list(getattr(state, part)) for part in OF_VARIABLES}
        for name, array in given.items():
            found = self._found(name)
            own, value = parts[found.part], shifted(name, np.asarray(array), self._shift)
            value = self._here(name, found, np.atleast_1d(value), own[found.index].shape)
            own[found.index] = place(value.astype(own[found.index].dtype))
        return state._replace(**parts)

    def _here(
        self, name: str, place: Place, value: np.ndarray, held: tuple[int, ...]
    ) -> np.ndarray:
        """A replica's shard, in the shape `held`, of a value that is sharded or not."""
        if value.shape == (place.shape or (1,)):
            return layout.shard(value, held, self._place)
        if self._where(place, held)[1:] != (value.shape,):
            raise IsotrainError(
                f"{name!r} has shape {place.shape} in this model, and the given state has"
                f" {value.shape}."
            )
        return layout.pad(value, held)

    def _found(self, name: str) -> Place:
        known = {n: place for places in self._places.values() for n, place in places.items()}
        if name not in known:
            raise IsotrainError(unknown_name("state", name, known))
        return known[name]


def to_numpy(array: jax.Array) -> np.ndarray:
    """Copies an array to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    found = np.array(array)
    return found.astype(np.float32) if found.dtype == ml_dtypes.bfloat16 else found


def shifted(name: str, value: np.ndarray, shift: int) -> np.ndarray:
    """Shifts the seed in a seed generator's state, shape `[2]` (seed, draws so far); other state stays."""
    if not keras_private.is_seed(name):
        return value
    moved = np.array(value)
    moved[0] = (int(moved[0]) + shift) & 0xFFFFFFFF
    return moved
