"""Of an error, a person is shown their own frames and where it was raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isotrain.core.errors import DataError
from isotrain.core.worker.traceback_format import format_traceback

INSTALLED = "/env/lib/python3/site-packages"


def code(module: str, file: str, lines: str, **known: Any) -> Callable[[], Any]:
    """A function `run` of such lines, as of a file."""
    body = "".join(f"    {line}\n" for line in lines.split("; "))
    names: dict[str, Any] = {"__name__": module, **known}
    exec(compile(f"def run():\n{body}", file, "exec"), names)  # what a file would have
    run: Callable[[], Any] = names["run"]
    return run


def isotrain_calls(function: Callable[[], Any]) -> Callable[[], Any]:
    return code("isotrain.core.somewhere", "/src/core/somewhere.py", "call()", call=function)


def torch_calls(function: Callable[[], Any]) -> Callable[[], Any]:
    return code("torch.nn", f"{INSTALLED}/torch/nn.py", "call()", call=function)


def shown(run: Callable[[], Any]) -> list[str]:
    """The lines of what is shown, but for the frames of this file and of source."""
    with pytest.raises((ValueError, KeyError, DataError)) as caught:
        run()
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # as it is in a process of a run
    lines = format_traceback(error).splitlines()
    return [line.strip() for line in lines if not line.startswith("    ")]


FAILS = code("torch.ops", f"{INSTALLED}/torch/ops.py", "raise ValueError('4x4 and 5x5')")
FIRST = "Traceback (most recent call last):"
ERROR = "ValueError: 4x4 and 5x5"


def test_user_frames_and_the_raising_frame_are_shown() -> None:
    own = code("net", "/home/me/net.py", "call()", call=torch_calls(torch_calls(FAILS)))
    assert shown(isotrain_calls(isotrain_calls(torch_calls(own)))) == [
        FIRST,
        "... frames of isotrain, torch: 3, in the log",
        'File "/home/me/net.py", line 2, in run',
        "... frames of torch: 2, in the log",
        f'File "{INSTALLED}/torch/ops.py", line 2, in run',
        ERROR,
    ]


def test_without_user_frames_the_call_of_isotrain_is_shown() -> None:
    assert shown(isotrain_calls(isotrain_calls(torch_calls(FAILS)))) == [
        FIRST,
        "... frames of isotrain: 1, in the log",
        'File "/src/core/somewhere.py", line 2, in run',
        "... frames of torch: 1, in the log",
        f'File "{INSTALLED}/torch/ops.py", line 2, in run',
        ERROR,
    ]


def test_an_internal_error_is_shown_in_full() -> None:
    fails = code("isotrain.core.deep", "/src/core/deep.py", "raise KeyError('defect')")
    assert shown(isotrain_calls(torch_calls(isotrain_calls(fails)))) == [
        FIRST,
        'File "/src/core/somewhere.py", line 2, in run',
        f'File "{INSTALLED}/torch/nn.py", line 2, in run',
        'File "/src/core/somewhere.py", line 2, in run',
        'File "/src/core/deep.py", line 2, in run',
        "KeyError: 'defect'",
    ]


def test_a_user_error_shows_user_frames_only() -> None:
    fails = code("isotrain.core.data", "/src/core/data.py", "raise Error('text')", Error=DataError)
    told = "isotrain.core.errors.DataError: text"
    assert shown(isotrain_calls(fails)) == [told]
    own = code("net", "/home/me/net.py", "call()", call=isotrain_calls(fails))
    assert shown(isotrain_calls(own)) == [
        "Traceback (of your own code):",
        'File "/home/me/net.py", line 2, in run',
        told,
    ]


def test_chained_errors_are_shown_alike() -> None:
    own = code("net", "/home/me/net.py", "call()", call=FAILS)
    lines = "try: call()\n    except ValueError as error: raise Error('text') from error"
    wraps = code("isotrain.core.data", "/src/core/data.py", lines, call=own, Error=DataError)
    assert shown(isotrain_calls(wraps)) == [
        FIRST,
        "... frames of isotrain: 1, in the log",
        'File "/home/me/net.py", line 2, in run',
        f'File "{INSTALLED}/torch/ops.py", line 2, in run',
        ERROR,
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        FIRST,
        "... frames of isotrain: 2, in the log",
        "isotrain.core.errors.DataError: text",
    ]


def test_no_colours_are_shown() -> None:
    fails = code(
        "torch.ops", f"{INSTALLED}/torch/ops.py", r"raise ValueError('\x1b[1mbold\x1b[0m')"
    )
    assert shown(fails)[-1] == "ValueError: bold"
