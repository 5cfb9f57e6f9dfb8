"""How tests start programs that they interrupt."""

from __future__ import annotations

import signal


def heed_signals() -> None:
    """What a shell starts in the background, or with nohup, ignores SIGINT or SIGHUP, and hands that down.

    Called in the new process, before its program.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
