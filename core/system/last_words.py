"""What to say of a process that has ended: how, and what it said last."""

from __future__ import annotations

import signal

_LINES = 5


def signal_name(number: int) -> str:
    """Such as `SIGABRT`; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(text: str) -> str:
    """The last lines of what a process wrote, as one; "nothing" if there are none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_LINES:]) or "nothing"
