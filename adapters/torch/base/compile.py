"""`torch.compile`, with a check of its requirements."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from isotrain.adapters.torch.base import private_api
from isotrain.plugin import UnsupportedError

_THREADS_VARIABLE = "TORCHINDUCTOR_COMPILE_THREADS"


def compiled(function: Callable[..., Any], *, any_shape: bool = True) -> Any:
    """Compiled function; `torch.compile` compiles it at its first call.

    Args:
        function: Function or module.
        any_shape: Whether a second input shape leads to code for dynamic shapes.

    Raises:
        UnsupportedError: There is no C++ compiler.
    """
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise UnsupportedError(
            f"compile: torch.compile needs a C++ compiler, and {name!r} was not found. Install one, set the"
            " environment variable CXX to one, or leave compile out."
        )
    if _THREADS_VARIABLE not in os.environ:
        private_api.compile_in_this_process()
    return torch.compile(function, dynamic=None if any_shape else False)
