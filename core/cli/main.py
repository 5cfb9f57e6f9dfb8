"""The command line's program: runs one command, and says what becomes of every error and signal."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from isotrain.core.cli.app import parser
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.errors import (
    BackendUnavailableError,
    IsotrainError,
    NotANumberError,
    PlanError,
    RunFailedError,
)
from isotrain.core.system.process import exit_after_work
from isotrain.core.system.standard_streams import (
    discard_what_cannot_be_written,
    escape_controls,
    replace_closed_streams,
    write_every_character,
)

_ENDING_SIGNALS = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HANGUP,
}
_WHAT_ENDED = {
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.TERMINATED: "ended by SIGTERM",
    ExitCode.HANGUP: "ended by SIGHUP: the terminal was closed",
}
_NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EAGAIN))
"""Why a file, or the output, cannot be written though this program is right."""
_NO_PATH = frozenset((errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES))
"""Why a path that was given leads nowhere though this program is right."""


class EndedBySignal(KeyboardInterrupt):
    """A signal asked this program to end; unwinds like Ctrl-C, so that every process is ended.

    Attributes:
        exit_code: To end with.
    """

    def __init__(self, exit_code: ExitCode) -> None:
        super().__init__(_WHAT_ENDED[exit_code])
        self.exit_code = exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: Of the command line; this program's own when left out.

    Returns:
        The exit code; see `ExitCode`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    replace_closed_streams()
    write_every_character()
    with _unwinding_on_signals():
        code = _attempt(given)
        discard_what_cannot_be_written()
        exit_after_work(code)
        return code


def _attempt(given: list[str]) -> int:
    """Runs one command and tells of its error, if any."""
    try:
        code = _command_or_exit(given)
        sys.stdout.flush()
        return code
    except IsotrainError as error:
        return _tell(error, exit_code_of(error), given)
    except KeyboardInterrupt as error:
        code = error.exit_code if isinstance(error, EndedBySignal) else ExitCode.INTERRUPTED
        return _tell(EndedBySignal(code), code, given)
    except BrokenPipeError:
        return ExitCode.OUTPUT_CLOSED
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not _has_folder():
            removed = PlanError("the current folder was removed. Change to one that is there.")
            return _tell(removed, ExitCode.USAGE, given)
        return _tell(error, ExitCode.RUN_FAILED, given)


def _has_folder() -> bool:
    """Whether the current folder is still there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _command_or_exit(given: list[str]) -> int:
    try:
        return _command(given)
    except SystemExit as end:  # argparse, after --help and --version
        return int(end.code or ExitCode.OK)


def _command(given: list[str]) -> int:
    options = parser().parse_args(given)
    command: Callable[[argparse.Namespace], ExitCode | None] = getattr(
        importlib.import_module(options.module), options.command.replace("-", "_")
    )
    with _plugins_of(options):
        return command(options) or ExitCode.OK


def _plugins_of(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Has the plugins that were asked for on the command line; its modules may lie in this folder."""
    if not (options.plugin or options.block_plugin):
        return contextlib.nullcontext()
    from isotrain.core.plugins import selection
    from isotrain.core.spec import import_strings

    here = Path.cwd()
    if str(here) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(here))
    modules = [import_strings.absolute_module(where, here) for where in options.plugin]
    return selection.chosen(modules, options.block_plugin)


def exit_code_of(error: IsotrainError) -> ExitCode:
    """The exit code that an error ends the program with."""
    if isinstance(error, NotANumberError):
        return ExitCode.NOT_A_NUMBER
    if isinstance(error, RunFailedError):
        return ExitCode.RUN_FAILED
    if isinstance(error, BackendUnavailableError):
        return ExitCode.UNAVAILABLE
    return ExitCode.USAGE


def _tell(error: BaseException, code: ExitCode, given: Sequence[str]) -> ExitCode:
    """Prints an error as text, and with --json as an object too, wherever that can be written."""
    with contextlib.suppress(OSError):
        _tell_as_json(error, code, given)
    with contextlib.suppress(OSError):
        print(_in_words(error), file=sys.stderr, flush=True)
    return code


def _tell_as_json(error: BaseException, code: ExitCode, given: Sequence[str]) -> None:
    if "--json" in given:
        from isotrain.core.contracts.events import CommandFailed
        from isotrain.core.json_format import prefixed_line

        kind = type(error).__name__
        lost = error.lost_host if isinstance(error, RunFailedError) else None
        told = CommandFailed(error=kind, message=str(error), exit_code=int(code), lost_host=lost)
        print(prefixed_line(told.to_dict(), _line_prefix_in(given)), flush=True)


def _in_words(error: BaseException) -> str:
    """A line for a person; all of what is known of a defect."""
    if isinstance(error, OSError) and error.errno in _NO_PATH and error.filename is not None:
        return f"isotrain: {escape_controls(str(error.filename))}: {error.strerror}"
    if isinstance(error, BlockingIOError | RuntimeError):
        from isotrain.core.launching.run_job import PROCESS_LIMIT_REACHED, is_process_limit

        if is_process_limit(error):
            return f"isotrain: {PROCESS_LIMIT_REACHED}"
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        what = "the output, or a file," if error.filename is None else error.filename
        return f"isotrain: {what} cannot be written: {error.strerror}"
    if isinstance(error, Exception) and not isinstance(error, IsotrainError):
        return "".join(traceback.format_exception(error)).rstrip()
    return f"isotrain: {escape_controls(str(error))}"


def _line_prefix_in(given: Sequence[str]) -> str:
    """What `--line-prefix` says, also among arguments that no command takes."""
    words = iter([*given, ""])
    for word in words:
        option, has_text, text = word.partition("=")
        if option == "--line-prefix":
            return text if has_text else next(words)
    return ""


@contextlib.contextmanager
def _unwinding_on_signals() -> Iterator[None]:
    """Turns the first signal that asks to end into an exception, and ignores those after it.

    A signal that this program was started to ignore (as by nohup) stays ignored.
    """
    previous: dict[signal.Signals, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        for caught in previous:
            signal.signal(caught, signal.SIG_IGN)
        raise EndedBySignal(_ENDING_SIGNALS[signal.Signals(number)])

    for number in _ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
