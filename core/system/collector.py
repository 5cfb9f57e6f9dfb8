"""Keeps Python's cyclic garbage collector still while much is made that stays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """No cyclic garbage collection inside.

    Importing a framework makes over a million objects that live as long as the process, and the
    collector would go through all of them again and again: about a sixth of the import's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
