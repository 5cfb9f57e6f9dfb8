"""Shares fork servers between more runs than usual, because each takes seconds to start."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from isotrain.core.launching.forkserver.client import ForkServer
from isotrain.core.launching.forkserver.pool import FORK_SERVERS


def share_fork_servers(
    preloaded: Sequence[str],
    preloaded_with: Mapping[str, Sequence[str]] | None = None,
    unread_variables: Collection[str] = (),
) -> None:
    """Makes more runs of this program share fork servers.

    Args:
        preloaded: Modules that every fork server preloads in addition.
        preloaded_with: Modules to preload in addition, by a module that is preloaded.
        unread_variables: Environment variables that no import reads; fork servers do not depend on them.
    """
    get, more_by_module = FORK_SERVERS.get, preloaded_with or {}

    def shared(imports: Sequence[str], variables: Mapping[str, str]) -> ForkServer:
        more = itertools.chain.from_iterable(more_by_module.get(each, ()) for each in imports)
        read = {name: text for name, text in variables.items() if name not in unread_variables}
        return get((*imports, *more, *preloaded), read)

    FORK_SERVERS.get = shared  # type: ignore[method-assign]
