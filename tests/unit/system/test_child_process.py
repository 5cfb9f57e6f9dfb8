"""Functions called in interpreters of their own: what they return, how they end, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from isotrain.core.system.subprocess_call import ChildEndedError, ChildProcess, ChildRaisedError

IN_TIME = 30.0
CALLER = """
import pathlib, sys
from isotrain.core.system.subprocess_call import ChildProcess
child = ChildProcess(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
child.wait()
"""
Call = Callable[..., ChildProcess]


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    made: list[ChildProcess] = []

    def start(function: str, value: Any, **options: Any) -> ChildProcess:
        made.append(ChildProcess(function, value, tmp_path / f"child-{len(made)}", **options))
        return made[-1]

    yield start
    for child in made:
        child.end()


def ended(child: ChildProcess) -> ChildProcess:
    child.wait()
    assert child.is_done
    return child


def test_it_returns_what_the_function_returns(call: Call) -> None:
    child = call("builtins:eval", "[1 + 2, __import__('sys').path, __import__('sys').argv]")
    assert ended(child).answer() == [3, sys.path, sys.argv]


def test_the_process_id_stays_taken_until_its_group_is_ended(call: Call) -> None:
    child = call("builtins:eval", "__import__('os').getpid()")
    pid = ended(child).answer()
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    child.end()
    assert not psutil.pid_exists(pid)


def test_variables_are_inherited_and_added(call: Call) -> None:
    text = "[__import__('os').environ.get(n) for n in ('HOME', 'OF_THE_CHILD')]"
    child = call("builtins:eval", text, variables={"OF_THE_CHILD": "7"})
    assert ended(child).answer() == [os.environ.get("HOME"), "7"]


def test_it_reads_nothing_and_writes_to_its_log(call: Call) -> None:
    child = call("builtins:eval", "[print('said'), __import__('sys').stdin.read()]")
    assert ended(child).answer() == [None, ""]
    assert child.log.read_text() == "said\n"


def test_an_error_is_told_by_its_name(call: Call) -> None:
    with pytest.raises(ChildRaisedError, match="KeyError: 'x'") as found:
        ended(call("builtins:eval", "{}['x']")).answer()
    assert (found.value.kind, found.value.message) == ("KeyError", "'x'")


@pytest.mark.parametrize(
    ("text", "how", "said"),
    [
        ("__import__('os').abort()", "by SIGABRT", "nothing"),
        ("__import__('os')._exit(139)", "with exit code 139", "nothing"),
        (
            "[print(*range(9), sep='\\n', flush=True), exit(3)]",
            "with exit code 3",
            "4 / 5 / 6 / 7 / 8",
        ),
    ],
)
def test_the_way_it_ended_is_named(call: Call, text: str, how: str, said: str) -> None:
    with pytest.raises(ChildEndedError) as found:
        ended(call("builtins:eval", text)).answer()
    assert (found.value.how, found.value.output) == (how, said)


def written(path: Path) -> str:
    end = time.monotonic() + IN_TIME
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path.read_text()


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def wait_until_gone(processes: Sequence[psutil.Process]) -> None:
    end = time.monotonic() + IN_TIME
    while not all(map(is_gone, processes)):
        assert time.monotonic() < end, processes
        time.sleep(0.05)


def family(mark: Path) -> list[psutil.Process]:
    """The shell that was started, what it has started in turn, and who started it."""
    shell = psutil.Process(int(written(mark)))
    child = shell.parent()
    assert child is not None
    while not shell.children():
        time.sleep(0.01)
    return [child, shell, *shell.children()]


SHELL = "echo $$ > {mark}.new; mv {mark}.new {mark}; sleep 600; true"
STARTER = f"__import__('subprocess').run(['sh', '-c', '{SHELL}'])"


def test_ending_a_child_ends_its_descendants(call: Call, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = call("builtins:eval", STARTER.format(mark=mark))
    everyone = family(mark)
    child.end()
    wait_until_gone(everyone)
    with pytest.raises(ChildEndedError, match="by SIGKILL"):
        child.answer()


def test_a_child_may_end_itself_first(call: Call, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = call("builtins:eval", STARTER.format(mark=mark))
    everyone = family(mark)
    child.end(IN_TIME)
    assert "KeyboardInterrupt" in child.log.read_text()
    wait_until_gone(everyone)


def test_it_ends_when_its_caller_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    arguments = ["builtins:eval", STARTER.format(mark=mark), str(tmp_path / "child")]
    with subprocess.Popen([sys.executable, "-c", CALLER, *arguments]) as caller:
        everyone = family(mark)
        assert caller.pid not in [process.pid for process in everyone]
        caller.send_signal(signal.SIGKILL)
    wait_until_gone(everyone)
