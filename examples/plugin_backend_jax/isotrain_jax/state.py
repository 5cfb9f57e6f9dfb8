"""Named state of a replica, read and written as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import ml_dtypes
import numpy as np

from isotrain.plugin import IsotrainError, StateInfo, StateKind, portable, unknown_name
from isotrain_jax.program import Arrays, State

_OPTIMIZER = "optimizer/"
_KINDS: dict[StateKind, str] = {
    "trainable": "trainable",
    "non-trainable": "others",
    "optimizer": "slots",
}
"""Which part of a `State` has each kind."""


class Names:
    """Where in a `State` each name has its value.

    The seeds of random layers (dropout) differ between replicas, so that their draws do. Under their
    names they are those of replica 0.
    """

    def __init__(self, variables: State, rank: int) -> None:
        weights = portable.canonical_names([*variables.trainable, *variables.others])
        slots = [_OPTIMIZER + name for name in portable.canonical_names(variables.slots)]
        count = len(variables.trainable)
        self._names = {
            "trainable": weights[:count],
            "others": weights[count:],
            "slots": slots,
        }
        self._shapes = {
            name: tuple(variable.shape)
            for part, names in self._names.items()
            for name, variable in zip(names, getattr(variables, part), strict=True)
        }
        self._shift = rank * portable.SEED_STRIDE

    def read(self, state: State, kinds: Sequence[StateKind]) -> dict[str, np.ndarray]:
        """Copies state of these kinds to NumPy."""
        return {
            name: _shifted(name, to_numpy(value).reshape(self._shapes[name]), -self._shift)
            for name, value in self._chosen(state, kinds)
        }

    def described(self, state: State, kinds: Sequence[StateKind]) -> dict[str, StateInfo]:
        """Tells what `read` would give."""
        return {
            name: StateInfo(self._shapes[name], _numpy_name(value.dtype), value.nbytes)
            for name, value in self._chosen(state, kinds)
        }

    def _chosen(self, state: State, kinds: Sequence[StateKind]) -> Iterator[tuple[str, jax.Array]]:
        for kind, part in _KINDS.items():
            if kind in kinds:
                yield from zip(self._names[part], getattr(state, part), strict=True)

    def written(
        self,
        state: State,
        given: Mapping[str, np.ndarray],
        place: Callable[[np.ndarray], jax.Array],
    ) -> State:
        """The state with some values replaced.

        Args:
            state: Of the replica.
            given: By name.
            place: Makes an array of the state of one of NumPy.

        Raises:
            IsotrainError: A name or a shape does not fit this model.
        """
        for name, array in given.items():
            self._require(name, np.shape(array))
        parts: dict[str, Arrays] = {}
        for part, names in self._names.items():
            values = list(getattr(state, part))
            for index, name in enumerate(names):
                if name in given:
                    array = _shifted(name, np.asarray(given[name]), self._shift)
                    values[index] = place(np.atleast_1d(array).astype(values[index].dtype))
            parts[part] = values
        return state._replace(**parts)

    def _require(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._shapes:
            raise IsotrainError(unknown_name("state", name, self._shapes))
        if shape != self._shapes[name]:
            raise IsotrainError(
                f"{name!r} has shape {self._shapes[name]} in this model, and the given state has"
                f" {shape}."
            )


def to_numpy(array: jax.Array) -> np.ndarray:
    """Copies an array to NumPy; bfloat16, which NumPy lacks, becomes float32."""
    found = np.array(array)
    return found.astype(np.float32) if found.dtype == ml_dtypes.bfloat16 else found


def _numpy_name(dtype: np.dtype) -> str:
    return "float32" if dtype == ml_dtypes.bfloat16 else dtype.name


def _shifted(name: str, value: np.ndarray, shift: int) -> np.ndarray:
    """Moves the seed in the state of a seed generator, (seed, draws so far); other state stays."""
    if not name.endswith("seed_generator_state"):
        return value
    moved = np.array(value)
    moved[0] = (int(moved[0]) + shift) & 0xFFFFFFFF
    return moved
