"""The line about each step of the set-up, and its log: with real processes that print, fail and are ended."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.leftover_processes import is_alive

from isotrain.build_horovod import __main__ as build_horovod

TOOLS = Path(__file__).parents[3] / "tools"
DETAIL = re.compile(r"at (\w+)(?: of (\d+))?")


def load(name: str, folder: Path = TOOLS) -> ModuleType:
    """A module of the tools, which are no package."""
    specification = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


progress = load("progress", TOOLS / "build_horovod")
set_up = load("setup_environment")


@pytest.mark.parametrize("name", ["HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_ALLREDUCE"])
def test_the_wheel_of_nccl_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also if a single operation is NCCL's; not if none is, or if the user names another NCCL."""
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    variables = {"LDFLAGS": "", name: "NCCL"}
    found = build_horovod.nccl_variables(variables, tmp_path / "made")
    assert Path(found["HOROVOD_NCCL_HOME"], "lib", "libnccl.so").resolve() == library
    named = {**variables, "HOROVOD_NCCL_HOME": "/elsewhere"}
    for others in (named, {**variables, name: "MPI"}):
        assert build_horovod.nccl_variables(others, tmp_path / "none") == {}


class Screen(io.StringIO):
    """A stream that a step can wait for: makes a file once it has been told what the step is at."""

    def __init__(self, shown: Path | None = None, *, terminal: bool = False) -> None:
        super().__init__()
        self._shown = shown
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        if self._shown is not None and text.rstrip().endswith(" s  file 7"):
            self._shown.touch()
        return super().write(text)


def step(program: str, **fields: Any) -> object:
    command = [sys.executable, "-u", "-c", program]
    return progress.Step("1 of 2  testing", command, DETAIL, **fields)


def until(shown: Path, **fields: Any) -> object:
    """A step that goes on until the screen has shown what it is at."""
    wait = f"while not os.path.exists({str(shown)!r}): time.sleep(0.02)"
    return step(f"import os, time; print('at file of 7')\n{wait}", **fields)


def lines(stream: io.StringIO) -> list[str]:
    """What was written, with numbers of seconds as `N`."""
    return re.sub(r"\d+ s", "N s", stream.getvalue()).splitlines()


def test_without_a_terminal_a_step_is_two_lines(tmp_path: Path) -> None:
    shown, log = io.StringIO(), tmp_path / "log"
    noted = step("print('at work')", note="a moment")
    assert progress.run_logged(noted, log, os.environ, shown) == 0
    assert lines(shown) == ["1 of 2  testing ...  a moment", "1 of 2  testing ... N s"]
    command, said = log.read_text().splitlines()
    assert command.startswith(f"$ {sys.executable} -u -c")
    assert said == "at work"


def test_without_a_terminal_lines_in_between_show_the_detail(tmp_path: Path) -> None:
    screen = Screen(tmp_path / "shown")
    long = until(tmp_path / "shown", plain_period_s=0.1)
    assert progress.run_logged(long, tmp_path / "log", os.environ, screen) == 0
    assert "1 of 2  testing ... N s  file 7" in lines(screen)


def test_a_terminal_has_one_line_that_ends_without_the_detail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "TERMINAL_PERIOD_S", 0.1)
    screen = Screen(tmp_path / "shown", terminal=True)
    long = until(tmp_path / "shown")
    assert progress.run_logged(long, tmp_path / "log", os.environ, screen) == 0
    (line,) = screen.getvalue().split("\n")[:-1]
    states = re.sub(r"\d+ s", "N s", line).split("\r\x1b[K")[1:]
    assert states[0] == "1 of 2  testing ..."
    assert "1 of 2  testing ... N s  file 7" in states
    assert states[-1] == "1 of 2  testing ... N s"


def test_a_narrow_terminal_still_shows_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    shown = Screen(terminal=True)
    progress.run_logged(step("pass"), tmp_path / "log", os.environ, shown)
    assert re.search(r"\x1b\[K1 of 2  tes \.\.\. \d s\n$", shown.getvalue())


def test_a_failure_is_shown_and_returned(tmp_path: Path) -> None:
    shown = io.StringIO()
    assert progress.run_logged(step("exit(3)"), tmp_path / "log", os.environ, shown) == 3
    assert lines(shown)[-1] == "1 of 2  testing ... failed after N s"


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Restores the handler of SIGINT, which shells let background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interruption_ends_every_process_of_the_step(tmp_path: Path) -> None:
    program = "import subprocess as s; c = s.Popen(['sleep', '60']); print(c.pid); c.wait()"
    shown, log = io.StringIO(), tmp_path / "log"

    def interrupt() -> None:
        while not (log.is_file() and log.read_text().count("\n") == 2):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        progress.run_logged(step(program), log, os.environ, shown)
    assert lines(shown)[-1] == "1 of 2  testing ... interrupted after N s"
    child = int(log.read_text().splitlines()[-1])
    deadline = time.monotonic() + 20
    while is_alive(child):
        assert time.monotonic() < deadline, f"process {child} was left behind"
        time.sleep(0.02)


def test_durations_are_readable() -> None:
    assert [progress.duration(t) for t in (0.2, 59.9, 62, 600)] == [
        *("0 s", "59 s", "1 min 02 s", "10 min 00 s")
    ]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Collecting torch==2.9.0 (from -c constraints.txt)", "Collecting torch"),
        (
            "  Downloading torch-2.9.0-cp311.whl (180 MB)",
            "Downloading torch-2.9.0-cp311.whl (180 MB)",
        ),
        ("Installing collected packages: a, b", "Installing collected packages: a, b"),
        ("horovod: building ... 1 min 15 s  12% nccl.cc", "building 12% nccl.cc"),
        ("horovod: building ...", "building ..."),
        ("horovod: 3 edits applied (a.patch)", "3 edits applied (a.patch)"),
        ("Requirement already satisfied: six", None),
    ],
)
def test_the_detail_of_a_setup_step(line: str, shown: str | None) -> None:
    found = set_up.DETAIL.search(line)
    assert (found and " ".join(filter(None, found.groups()))) == shown


def test_horovod_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "STAMP", tmp_path / "stamp")
    for choice, kept, complete_for in ((None, "1", "01"), ("0", "0", "0")):
        monkeypatch.delenv("HOROVOD", raising=False)
        if choice is not None:
            monkeypatch.setenv("HOROVOD", choice)
        set_up.write_stamp("inputs", set_up.horovod_choice(), "1")
        monkeypatch.delenv("HOROVOD", raising=False)
        assert set_up.is_complete("inputs"), "without a choice, it stays as it is"
        assert set_up.horovod_choice() == kept
        for asked in "01":
            monkeypatch.setenv("HOROVOD", asked)
            assert set_up.is_complete("inputs") == (asked in complete_for)
    for with_horovod in (True, False):
        titles = " ".join(each.title for each in set_up.steps(True, with_horovod))
        assert ("Horovod" in titles) == with_horovod


def test_the_demo_leaves_out_what_only_work_on_isotrain_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up, "STAMP", tmp_path / "stamp")
    monkeypatch.setenv("HOROVOD", "0")
    for choice, complete_for in (("0", "0"), ("1", "01")):
        monkeypatch.setenv("TOOLS", choice)
        set_up.write_stamp("inputs", "0", set_up.tools_choice())
        for requested in "01":
            monkeypatch.setenv("TOOLS", requested)
            assert set_up.is_complete("inputs") == (requested in complete_for)
    monkeypatch.setenv("TOOLS", "0")
    assert set_up.tools_choice() == "1", "tools that are installed stay"
    for with_tools in (True, False):
        words = " ".join(" ".join(each.command) for each in set_up.steps(True, False, with_tools))
        assert ("jax" in words) == ("--group" in words) == with_tools
