"""A replica group that notes which capabilities are used of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from isotrain.core.capabilities import Capability
from isotrain.core.group import ReplicaGroup
from isotrain.core.session import Session

NEEDS: Mapping[str, Capability] = {
    "synchronised_step": Capability.SYNCHRONISED_STEP,
    "local_step": Capability.LOCAL_STEP,
    "gradients": Capability.GRADIENTS,
    "apply": Capability.GRADIENTS,
    "read_state": Capability.NAMED_STATE,
    "write_state": Capability.NAMED_STATE,
    "average_parameters": Capability.AVERAGE_PARAMETERS,
    "all_reduce": Capability.ALL_REDUCE,
    "all_gather": Capability.ALL_GATHER,
    "broadcast": Capability.BROADCAST,
    "reduce_scatter": Capability.REDUCE_SCATTER,
    "send_receive": Capability.SEND_RECEIVE,
}
"""The methods of a replica group that take a capability; every backend has the others."""


class Watched:
    """A replica group whose every use of a capability is noted."""

    def __init__(self, group: ReplicaGroup, used: set[Capability]) -> None:
        self._group = group
        self._used = used

    def __getattr__(self, name: str) -> Any:
        if name in NEEDS:
            self._used.add(NEEDS[name])
        return getattr(self._group, name)


@contextlib.contextmanager
def watching(session: Session, used: set[Capability]) -> Iterator[None]:
    """Adds to `used` the capabilities that the session's group is used for within.

    Uses are noted and not refused: a refusal on some replicas would leave the others waiting for them.
    """
    group = session.group
    session.group = Watched(group, used)  # type: ignore[assignment]
    try:
        yield
    finally:
        session.group = group
