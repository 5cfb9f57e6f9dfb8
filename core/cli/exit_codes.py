"""Exit codes of the command line; `docs/command-line.md` explains each."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of every command."""

    OK = 0
    RUN_FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    FINDINGS = 4
    SLOWER = 5
    DIFFERENT = 6
    NOT_A_NUMBER = 7
    HANGUP = 129
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141
    TERMINATED = 143
