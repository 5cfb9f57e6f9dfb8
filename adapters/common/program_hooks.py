"""Wrapping of functions by hooks, for programs that are not isotrain's: errors of hooks do not reach them."""

from __future__ import annotations

import functools
import random
import sys
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np


def safe(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, whose own errors are printed and do not reach the program."""

    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception:  # what programs do is not known
            text = traceback.format_exc()
            print(f"isotrain trace: this is not recorded:\n{text}", file=sys.stderr, flush=True)

    return guarded


def host_random_states() -> dict[str, int]:
    """Hashes of the states of Python's `random` and of NumPy's global generator."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return {
        "random": hash(random.getstate()[1]),
        "numpy.random": zlib.crc32(np.asarray(keys).tobytes(), int(position)),
    }


def draws_since(before: dict[str, int]) -> dict[str, int]:
    """The states of `host_random_states` before, of the generators from which numbers were drawn since."""
    now = host_random_states()
    return {name: state for name, state in before.items() if state != now[name]}


def call_before(owner: Any, name: str, hook: Callable[..., None]) -> None:
    """Lets a function, or a method of a class, call a hook with its arguments first."""
    function, hook = getattr(owner, name), safe(hook)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, wrapped)


def call_after(owner: Any, name: str, hook: Callable[..., None]) -> None:
    """Lets a function, or a method of a class, call a hook with its result and its arguments."""
    function, hook = getattr(owner, name), safe(hook)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        hook(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapped)
