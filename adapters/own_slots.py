"""Optimizer slots in named state, where a replica has those of some weights only; imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isotrain.plugin import StateInfo

_KIND = "optimizer/"


def mark_local_slots(
    described: Mapping[str, StateInfo], is_alone: Callable[[str], bool]
) -> dict[str, StateInfo]:
    """A description of state that says which slots are here and on no other replica.

    Args:
        described: As if all replicas had all of it.
        is_alone: Tells of a slot whether it is of a weight that this replica alone updates.
    """
    return {
        name: info.on_this_replica_only() if name.startswith(_KIND) and is_alone(_slot(name)) else info
        for name, info in described.items()
    }


def is_remote(name: str, is_elsewhere: Callable[[str], bool]) -> bool:
    """Whether a name in state is that of a slot which only other replicas have.

    Args:
        name: Of any state.
        is_elsewhere: Tells of a slot whether it is of a weight that only another replica updates.
    """
    return name.startswith(_KIND) and is_elsewhere(_slot(name))


def _slot(name: str) -> str:
    return name.removeprefix(_KIND)
