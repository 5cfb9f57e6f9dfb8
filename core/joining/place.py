"""Whether this process was started by an engine together with others, which it is to join."""

from __future__ import annotations

import os

from isotrain.core.contracts.environment import Place
from isotrain.core.contracts.process import VARIABLE
from isotrain.core.planning.places import place_of
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
