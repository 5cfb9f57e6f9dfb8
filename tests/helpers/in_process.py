"""The command line and scripts in this process, whose fork servers have imported the frameworks already."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from isotrain.core.cli.main import main


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command.

    Attributes:
        returncode: Exit code.
        stdout: Standard output.
        stderr: Standard error.
    """

    returncode: int
    stdout: str
    stderr: str


def command(*arguments: str, folder: Path, path: Sequence[Path] = ()) -> Done:
    """Runs `isotrain` with arguments in a folder.

    Args:
        arguments: Command-line arguments.
        folder: Current folder of the command.
        path: Folders to add to the module search path.
    """
    return _done(lambda: main(arguments), folder, ["isotrain", *arguments], path)


def script(file: Path, *arguments: str, folder: Path) -> Done:
    """Runs a script with arguments in a folder; raises its errors."""

    def run() -> int:
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return _done(run, folder, [str(file), *arguments], [file.parent])


def _done(
    run: Callable[[], int], folder: Path, arguments: Sequence[str], path: Sequence[Path]
) -> Done:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as around:
        around.enter_context(contextlib.chdir(folder))
        around.enter_context(contextlib.redirect_stdout(out))
        around.enter_context(contextlib.redirect_stderr(errors))
        around.enter_context(mock.patch.object(sys, "argv", list(arguments)))
        around.enter_context(mock.patch.object(sys, "path", [*map(str, path), *sys.path]))
        code = run()
    return Done(code, out.getvalue(), errors.getvalue())
