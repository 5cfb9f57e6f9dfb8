"""Starts an interpreter that calls a function: its command line, and its startup line on standard input.

The startup line has `sys.path` and `sys.argv`, which user modules may read when they are imported, and the
arguments that other users of the machine must not see on a command line.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILE_MODULE = "isotrain_file_"
"""How the names of modules begin that were loaded from files by their paths."""


def is_in_prefix(path: str) -> bool:
    """Whether a path is in the prefix of this interpreter (standard library, installed packages)."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return any(Path(os.path.abspath(path)).is_relative_to(folder) for folder in folders)


_BOOTSTRAP = (
    "import json, sys; startup = json.loads(sys.stdin.buffer.readline());"
    " startup['path'][:0] = sys.path if startup['is_extra_path'] else (); sys.path[:] = startup['path'];"
    " from isotrain.core.system.interpreter_start import main; main(startup)"
)


def command_line(function: str, *arguments: Any, python: str | None = None) -> list[str]:
    """The command of an interpreter that reads its startup line and then calls a function.

    Args:
        function: `module:name` of the function. All users of this machine can see it.
        arguments: First arguments of the function, JSON values. All users of this machine can see them.
        python: Interpreter of another environment; None: this one.
    """
    return [python or sys.executable, "-P", "-c", _BOOTSTRAP, function, json.dumps(arguments)]


def startup_line(
    *arguments: Any, extra_path: Sequence[str] | None = None, argv: Sequence[str] | None = None
) -> bytes:
    """The startup line, one line of JSON for the standard input of the new interpreter.

    Args:
        arguments: Further arguments of the function, JSON values.
        extra_path: Folders to append to the interpreter's own `sys.path`; None: it gets this program's
            `sys.path` instead.
        argv: Arguments for `sys.argv`; None: this program's.
    """
    startup = {
        "path": list(sys.path if extra_path is None else extra_path),
        "is_extra_path": extra_path is not None,
        "argv": list(sys.argv if argv is None else argv),
        "arguments": arguments,
    }
    return json.dumps(startup).encode() + b"\n"


def main(startup: Mapping[str, Any]) -> None:
    """Applies the startup line, and calls the function that the command line names."""
    function, arguments = sys.argv[1:]
    apply_startup(startup)
    load_function(function)(*json.loads(arguments), *startup["arguments"])


def apply_startup(startup: Mapping[str, Any]) -> None:
    """Sets `sys.path` and `sys.argv` from a decoded startup line; also used in a forked process."""
    sys.path[:] = startup["path"]
    sys.argv[:] = startup["argv"]


def load_function(function: str) -> Any:
    """Imports the function named `module:name`."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
