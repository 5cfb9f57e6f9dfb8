"""Memory that a step frees stays with the process, for the next step to use."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from <malloc.h>
_MOST_ON_HEAP = 32 * 2**20  # the most that glibc takes, and what it comes to by itself
_MOST_KEPT = 2**30
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Variables by which users set the same."""


def keep_freed_memory() -> None:
    """Lets glibc keep up to 1 GiB of freed memory, unless the user has set what it keeps.

    By itself it returns the end of the heap to the system once that is twice as large as the largest block
    that was ever freed, up to 32 MiB. A step whose activations are more frees them, and the next one gets new
    pages, which the kernel fills with zeros: up to a fifth of the processor time of a small model on long
    texts. Whether it happens depends on what else lies at the end of the heap.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _USERS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, _MOST_ON_HEAP)
    mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
