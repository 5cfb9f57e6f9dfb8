"""torch's compiler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from isotrain.adapters.torch.base import private_api
from isotrain.plugin import UnsupportedError

_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"


def compiled(function: Callable[..., Any], *, any_shape: bool = True) -> Any:
    """What computes the same; it is compiled when it is called first.

    Args:
        function: Also a module.
        any_shape: Whether to look for code that serves several shapes when a second one comes.

    Raises:
        UnsupportedError: torch's compiler lacks the compiler of C++ that it needs.
    """
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise UnsupportedError(
            f"compile: torch's compiler needs a compiler of C++, and there is no {name!r} here. Install one,"
            " name it in the variable CXX, or leave compile out."
        )
    if _VARIABLE not in os.environ:
        private_api.compile_in_this_process()
    return torch.compile(function, dynamic=None if any_shape else False)
