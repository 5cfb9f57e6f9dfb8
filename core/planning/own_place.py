"""Whether this process was started by an engine together with others, which it is to join."""

from __future__ import annotations

import os

from isotrain.core.contracts.environment import ClusterInfo
from isotrain.core.contracts.process import VARIABLE
from isotrain.core.errors import UnsupportedError
from isotrain.core.planning.places import claim, cluster_info_of
from isotrain.core.plugins.host import plugin_manager


def detect_cluster_info() -> ClusterInfo | None:
    """This process's place among others; None where it is alone, or belongs to a run already.

    Raises:
        ClusterInfoError: The variables of an engine are half set, or two engines claim the process.
    """
    if VARIABLE in os.environ:
        return None
    place = cluster_info_of(os.environ, plugin_manager())
    return place if place is not None and place.world_size > 1 else None


def require_single_process(what: str) -> None:
    """Refuses what is done once, for a run or for several, where an engine starts it on every rank.

    Raises:
        UnsupportedError: This process has a place among others.
    """
    place = detect_cluster_info()
    if place is not None:
        raise UnsupportedError(
            f"{what}: {place.environment} has started {place.world_size} processes, each of which would do all of"
            f" it for itself. Do it in one process: outside of {place.environment}, or with one task of it."
            f" {claim(place)}"
        )
