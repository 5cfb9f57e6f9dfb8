"""Fork servers shared by more of the tests' runs than usual, because each takes seconds to start."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from isotrain.core.launching.forkserver.client import ForkServer
from isotrain.core.launching.forkserver.pool import FORK_SERVERS


def share_fork_servers(
    besides: Sequence[str] = (),
    beside: Mapping[str, Sequence[str]] | None = None,
    unread: Collection[str] = (),
) -> None:
    """Has more runs of this program share fork servers.

    Args:
        besides: Modules that all of them import too.
        beside: By a module, those that whichever import it import too.
        unread: Variables that no import reads: a fork server serves runs that differ in them.
    """
    get, known = FORK_SERVERS.get, beside or {}

    def shared(imports: Sequence[str], variables: Mapping[str, str]) -> ForkServer:
        more = itertools.chain.from_iterable(known.get(each, ()) for each in imports)
        read = {name: text for name, text in variables.items() if name not in unread}
        return get((*imports, *more, *besides), read)

    FORK_SERVERS.get = shared  # type: ignore[method-assign]
