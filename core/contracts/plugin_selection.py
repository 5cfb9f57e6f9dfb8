"""Which plugins were asked for beside the installed ones, and which are to be left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class PluginChoice:
    """What was asked for in one process; it travels to the processes of a run.

    Attributes:
        asked: Modules and files of `--plugin`.
        blocked: Names of plugins to leave out.
        registered: Name to plugin, by `isotrain.register`, in order.
        installed: What installed packages offer, once somebody has looked; None: nobody has.
    """

    asked: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    registered: tuple[tuple[str, object], ...] = ()
    installed: tuple[Any, ...] | None = None
