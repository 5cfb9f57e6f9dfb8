"""Python state that is read or changed while a step is traced: later steps repeat what the trace met."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from isotrain.adapters.common.program_hooks import draws_since, host_random_states
from isotrain.adapters.keras.call_state import CallState

_ONCE = "TensorFlow traces a step once, and later steps compute with what the trace met"
_KEEP = "Keep what changes from step to step in a weight that is not trained"


class FrozenState:
    """Watches traces for random numbers of Python and NumPy, and for numbers that a call changes.

    Attributes:
        notes: What was found, as text, in the order in which it was found.
    """

    def __init__(self, layers: Sequence[Any], functions: Sequence[Any]) -> None:
        """Takes what traces call.

        Args:
            layers: Layers or modules of the model.
            functions: The user's objective, losses and metrics.
        """
        self._layers, self._functions = layers, functions
        self.notes: list[str] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which a step is traced; warns of what it finds, once each."""
        random_states = host_random_states()
        state = CallState(self._layers, self._functions)
        yield
        drawn = [
            f"random numbers are drawn by {name}: {_ONCE}. Draw by keras.random, tf.random or"
            " isotrain.random"
            for name in draws_since(random_states)
        ]
        changed = [f"a call changes {each}: {_ONCE}. {_KEEP}" for each in state.changes()]
        moved = [f"a call may advance {each}: {_ONCE}. {_KEEP}" for each in state.iterators()]
        for note in (*drawn, *changed, *moved):
            if note not in self.notes:
                self.notes.append(note)
                warnings.warn(note, RuntimeWarning, stacklevel=1)
