"""What is given to an engine, so that it starts a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Submission:
    """What is given to an engine.

    Attributes:
        commands: Programs with their arguments, started here together; all have ended when the run has.
            What rank 0 prints comes out of them.
        variables: What the commands find set besides.
        files: Texts by name, written into the run's folder before.
        key_in_environment: Whether the commands find `ISOTRAIN_KEY` set, for engines that hand variables on and show
            nobody what is in them.
        stdin: What each command reads, such as a secret that must stand on no command line.
        cleanup_commands: Commands that end what the engine has started, where ending `commands` does not, or they were
            killed.
    """

    commands: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    key_in_environment: bool = True
    stdin: str = field(default="", repr=False)
    cleanup_commands: tuple[tuple[str, ...], ...] = ()
