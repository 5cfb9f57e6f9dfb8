"""Signal handling of programs that tests start and interrupt."""

from __future__ import annotations

import signal


def heed_signals() -> None:
    """Restores the default handlers of SIGINT and SIGHUP; called in the new process, before its program.

    Shells let background jobs ignore SIGINT, nohup lets them ignore SIGHUP, and children inherit it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
