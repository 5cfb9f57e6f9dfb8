"""What a new interpreter is started with to go on with a function, and is told in its first line of input.

That has the path and the arguments which modules of a person may read when they are imported. What it is
not to share with everybody who looks at a command line comes that way too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def is_of_interpreter(path: str) -> bool:
    """Whether a file or folder is part of it, and not of what a person wrote."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return any(Path(os.path.abspath(path)).is_relative_to(folder) for folder in folders)


_PROGRAM = (
    "import json, sys; told = json.loads(sys.stdin.buffer.readline());"
    " told['path'][:0] = sys.path if told['is_beside'] else (); sys.path[:] = told['path'];"
    " from isotrain.core.system.interpreter import main; main(told)"
)


def command_line(function: str, *given: Any, python: str | None = None) -> list[str]:
    """What starts an interpreter that calls a function once it was told its first line.

    Args:
        function: `module:name`; seen by everybody on this machine, as is what it is given.
        given: Its first arguments, of JSON.
        python: Another environment's interpreter; None: this one.
    """
    return [python or sys.executable, "-P", "-c", _PROGRAM, function, json.dumps(given)]


def first_line(
    *given: Any, beside: Sequence[str] | None = None, argv: Sequence[str] | None = None
) -> bytes:
    """What it is told.

    Args:
        given: The function's further arguments, of JSON.
        beside: Where modules are found too that are not where it finds them by itself; None: they are
            found where this program finds them, and nowhere else.
        argv: Its `sys.argv`; None: this program's.
    """
    told = {
        "path": list(sys.path if beside is None else beside),
        "is_beside": beside is not None,
        "argv": list(sys.argv if argv is None else argv),
        "given": given,
    }
    return json.dumps(told).encode() + b"\n"


def main(told: Mapping[str, Any]) -> None:
    """Goes on with the function of the command line, once modules are found."""
    function, given = sys.argv[1:]
    take_over(told)
    load_function(function)(*json.loads(given), *told["given"])


def take_over(told: Mapping[str, Any]) -> None:
    """Has modules find the path and the arguments that were told; also in a process that was forked."""
    sys.path[:] = told["path"]
    sys.argv[:] = told["argv"]


def load_function(function: str) -> Any:
    """What `module:name` names."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
