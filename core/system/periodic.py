"""A call that a thread repeats while something else is done."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def repeated(call: Callable[[], None], seconds: float, name: str) -> Iterator[None]:
    """Context in which a thread calls a function again and again, with a pause before each call.

    Leaving the context waits for a call that is in progress. An error of the function ends the thread alone.

    Args:
        call: The function.
        seconds: Length of a pause.
        name: Name of the thread.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
