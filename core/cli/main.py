"""Entry point of the command line: runs one command, and turns errors and signals into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import logging
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
from isotrain.core.cli.support import add_working_directory_to_path
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
_SIGNAL_MESSAGES = {
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.TERMINATED: "ended by SIGTERM",
    ExitCode.HANGUP: "ended by SIGHUP: the terminal was closed",
}
_WRITE_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EAGAIN))
"""Errors of writing a file, or the output, that are no defect of this program."""
_PATH_ERRORS = frozenset((errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES))
"""Errors of an argument that is a path; no defect of this program."""


class EndedBySignal(KeyboardInterrupt):
    """A signal asked this program to end; unwinds like Ctrl-C, so that every process is ended.

    Attributes:
        exit_code: Exit code of the program.
    """

    def __init__(self, exit_code: ExitCode, notes: Sequence[str] = ()) -> None:
        super().__init__("\n".join([_SIGNAL_MESSAGES[exit_code], *notes]))
        self.exit_code = exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, of this process or with these arguments; returns its `ExitCode`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    replace_closed_streams()
    write_every_character()
    with _unwinding_on_signals():
        code = _run_and_report_errors(words)
        discard_what_cannot_be_written()
        exit_after_work(code)
        return code


def _run_and_report_errors(words: list[str]) -> int:
    """Runs one command and prints its error, if any; returns the exit code."""
    try:
        code = _run_or_exit(words)
        sys.stdout.flush()
        return code
    except IsotrainError as error:
        return _report(error, exit_code_of(error), words)
    except KeyboardInterrupt as error:
        code = error.exit_code if isinstance(error, EndedBySignal) else ExitCode.INTERRUPTED
        return _report(EndedBySignal(code, getattr(error, "__notes__", ())), code, words)
    except BrokenPipeError:
        return ExitCode.OUTPUT_CLOSED
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not _has_working_directory():
            removed = PlanError("the current folder was removed. Change to one that exists.")
            return _report(removed, ExitCode.USAGE, words)
        return _report(error, ExitCode.RUN_FAILED, words)


def _has_working_directory() -> bool:
    """Whether the current folder still exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _run_or_exit(words: list[str]) -> int:
    try:
        return _run_command(words)
    except SystemExit as end:  # argparse, after --help and --version
        return int(end.code or ExitCode.OK)


def _as_options(words: list[str]) -> list[str]:
    """Words where nothing, `help`, `help COMMAND` and `version` are the options that mean the same."""
    match words:
        case [] | ["help"]:
            return ["--help"]
        case ["help", *command]:
            return [*command, "--help"]
        case ["version"]:
            return ["--version"]
    return words


def _run_command(words: list[str]) -> int:
    options = parser().parse_args(_as_options(words))
    command: Callable[[argparse.Namespace], ExitCode | None] = getattr(
        importlib.import_module(options.module), options.command.replace("-", "_")
    )
    with _selected_plugins(options), _logging(options):
        return command(options) or ExitCode.OK


@contextlib.contextmanager
def _logging(options: argparse.Namespace) -> Iterator[None]:
    """Prints what is logged under `isotrain`, but the events of runs, which have a display."""
    log, handler = logging.getLogger("isotrain"), logging.StreamHandler()
    handler.addFilter(lambda record: record.name != "isotrain.run")
    handler.setFormatter(logging.Formatter("isotrain: %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if options.verbose else logging.ERROR if options.quiet else level)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def _selected_plugins(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Applies `--plugin` and `--block-plugin`; plugin modules may be in the current folder."""
    if not (options.plugin or options.block_plugin):
        return contextlib.nullcontext()
    from isotrain.core.plugins import selection
    from isotrain.core.spec import import_strings

    add_working_directory_to_path()
    folder = Path.cwd()
    modules = [import_strings.absolute_module(name, folder) for name in options.plugin]
    return selection.using(modules, options.block_plugin)


def exit_code_of(error: IsotrainError) -> ExitCode:
    """The exit code of the program after this error."""
    if isinstance(error, NotANumberError):
        return ExitCode.NOT_A_NUMBER
    if isinstance(error, RunFailedError):
        return ExitCode.RUN_FAILED
    if isinstance(error, BackendUnavailableError):
        return ExitCode.UNAVAILABLE
    return ExitCode.USAGE


def _report(error: BaseException, code: ExitCode, words: Sequence[str]) -> ExitCode:
    """Prints an error as text, and with `--json` also as an object; errors of writing are ignored."""
    with contextlib.suppress(OSError):
        _report_as_json(error, code, words)
    with contextlib.suppress(OSError):
        print(_error_text(error), file=sys.stderr, flush=True)
    return code


def _report_as_json(error: BaseException, code: ExitCode, words: Sequence[str]) -> None:
    if "--json" in words:
        from isotrain.core.contracts.events import CommandFailed
        from isotrain.core.json_format import prefixed_line

        kind = type(error).__name__
        lost_host = error.lost_host if isinstance(error, RunFailedError) else None
        event = CommandFailed(
            error=kind, message=str(error), exit_code=int(code), lost_host=lost_host
        )
        print(prefixed_line(event.to_dict(), _line_prefix(words)), flush=True)


def _error_text(error: BaseException) -> str:
    """One line for an error of the user or the machine; the traceback for a defect."""
    if isinstance(error, OSError) and error.errno in _PATH_ERRORS and error.filename is not None:
        return f"isotrain: {escape_controls(str(error.filename))}: {error.strerror}"
    if isinstance(error, BlockingIOError | RuntimeError):
        from isotrain.core.launching.run_job import PROCESS_LIMIT_REACHED, is_process_limit

        if is_process_limit(error):
            return f"isotrain: {PROCESS_LIMIT_REACHED}"
    if isinstance(error, OSError) and error.errno in _WRITE_ERRORS:
        target = "the output, or a file," if error.filename is None else error.filename
        return f"isotrain: {target} cannot be written: {error.strerror}"
    if isinstance(error, Exception) and not isinstance(error, IsotrainError):
        return "".join(traceback.format_exception(error)).rstrip()
    return f"isotrain: {escape_controls(str(error))}"


def _line_prefix(words: Sequence[str]) -> str:
    """The value of `--line-prefix`, also among arguments that could not be parsed."""
    remaining = iter([*words, ""])
    for word in remaining:
        option, has_text, text = word.partition("=")
        if option == "--line-prefix":
            return text if has_text else next(remaining)
    return ""


@contextlib.contextmanager
def _unwinding_on_signals() -> Iterator[None]:
    """Turns the first SIGINT, SIGTERM or SIGHUP into an exception, and ignores later ones.

    A signal that this program was started to ignore (as by nohup) stays ignored.
    """
    previous: dict[signal.Signals, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        for handled in previous:
            signal.signal(handled, signal.SIG_IGN)
        raise EndedBySignal(_ENDING_SIGNALS[signal.Signals(number)])

    for number in _ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
