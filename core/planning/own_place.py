"""Whether this process was started by an engine together with others, which it is to join."""

from __future__ import annotations

import os

from isotrain.core.contracts.environment import Place
from isotrain.core.contracts.process import VARIABLE
from isotrain.core.errors import UnsupportedError
from isotrain.core.planning.places import claim, place_of
from isotrain.core.plugins.host import plugin_host


def place_to_join() -> Place | None:
    """This process's place among others; None where it is alone, or belongs to a run already.

    Raises:
        PlaceError: The variables of an engine are half set, or two engines claim the process.
    """
    if VARIABLE in os.environ:
        return None
    place = place_of(os.environ, plugin_host())
    return place if place is not None and place.world_size > 1 else None


def require_alone(what: str) -> None:
    """Refuses what is done once, for a run or for several, where an engine starts it on every rank.

    Raises:
        UnsupportedError: This process has a place among others.
    """
    place = place_to_join()
    if place is not None:
        raise UnsupportedError(
            f"{what}: {place.engine} has started {place.world_size} processes, each of which would do all of"
            f" it for itself. Do it in one process: outside of {place.engine}, or with one task of it."
            f" {claim(place)}"
        )
