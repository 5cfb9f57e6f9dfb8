"""The options that `run`, `launch` and `resume` share, written once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, get_type_hints

from isotrain.core.contracts.events import OnPlainEvent
from isotrain.core.errors import unknown_name


class ResumeOptions(TypedDict, total=False):
    """Options of `run`, `launch` and `resume`: where a run takes place, and who watches it.

    Attributes:
        replicas: Number of replicas; left out: one per GPU that can be used, or one.
        on_event: Function that gets each event of the run as a mapping; left out: a progress display. If it
            returns `stop`, training ends early.
        quiet: Whether to show no progress. What is shown is also logged, by the logger `isotrain.run`.
        verbose: Whether to show every epoch; otherwise a long run shows about 20.
        port: First port that the backend may use; left out: free ports are found.
        launcher: Name of the launcher; left out: `local`, which starts the processes on this machine.
        launcher_options: Options of the launcher, such as `{"hosts": "node1:2,node2:2"}`.
        max_restarts: Maximum number of restarts from the last checkpoint after a failure; default 0.
        ranks: Ranks whose output is shown, or `all`; default rank 0. Each has a log in the run directory.
        interface: Network interface, by name or address, for processes on several hosts; left out:
            `ISOTRAIN_INTERFACE`, else the interface over which each host reaches rank 0.
    """

    replicas: int | None
    on_event: OnPlainEvent | None
    quiet: bool
    verbose: bool
    port: int | None
    launcher: str | None
    launcher_options: Mapping[str, Any] | None
    max_restarts: int
    ranks: Sequence[int] | Literal["all"]
    interface: str | None


class RunOptions(ResumeOptions, total=False):
    """Options of `run` and `launch`.

    Attributes:
        output: New or empty folder for the run's files; left out: `runs/<name>-<time>`.
        resume: Checkpoint to continue from, or a folder or URL of checkpoints or a run directory, of which
            the newest is taken. `auto`: the newest of this run directory or checkpoint folder, if any.
    """

    output: str | os.PathLike[str] | None
    resume: str | os.PathLike[str] | None


def require_known(function: str, kind: type[ResumeOptions], options: Mapping[str, Any]) -> None:
    """Refuses an option that a function does not have, as Python does for a parameter.

    Args:
        function: Name of the function that received the options.
        kind: Options that it has.
        options: Keyword arguments of the call.

    Raises:
        TypeError: An option is unknown; the error lists the options.
    """
    known = get_type_hints(kind)
    for name in options:
        if name not in known:
            from isotrain.core.spec.validation import OTHER_TOOLS_NAMES  # slow: only on an error

            called_here = OTHER_TOOLS_NAMES.get(name)
            message = unknown_name("option", name, known, called_here=called_here)
            raise TypeError(f"{function}(): {message}")
