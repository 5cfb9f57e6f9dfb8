"""Every command of the page on what loss curves depend on runs, and shows what the page says."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from helpers.in_process import command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/depends.md").read_text()
COMMANDS = [
    (row.group(1), shlex.split(line, comments=True))
    for row in re.finditer(r"^# (\d+): .*\n((?:isotrain .*\n|#  .*\n)+)", PAGE, re.MULTILINE)
    for line in row.group(2).splitlines()
]
SHORTER = ("--set", "epochs=1", "--set", "threads=1")


def test_every_row_has_a_command() -> None:
    rows = re.findall(r"\| \[(\d+)\]\(#commands\) \|$", PAGE, re.MULTILINE)
    assert list(map(int, dict.fromkeys(rows))) == list(range(1, len(set(rows)) + 1))
    assert {number for number, _ in COMMANDS} == set(rows)
    assert len(COMMANDS) == PAGE.split("## Commands")[1].count("\nisotrain ")


def losses(text: str) -> list[float]:
    """The losses that a run prints at the end of its epochs."""
    return [float(loss) for loss in re.findall(r"\bloss ([0-9.e-]+)", text)]


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("number", dict(COMMANDS))
def test_commands_run(number: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=lambda *_: ["by_need"])
    printed = []
    for each, (program, *arguments) in COMMANDS:
        if each == number:
            shorter = () if "threads=2" in arguments else SHORTER
            done = command(*arguments, *shorter, folder=tmp_path)
            assert (program, done.returncode) == ("isotrain", 0), done.stderr
            if arguments[0] == "run":
                printed.append(losses(done.stdout + done.stderr))
    if number in ("3", "6", "11"):  # the same to the bit, and to a rounding
        assert all(printed)
        first, *others = printed
        expected = first if number != "6" else pytest.approx(first, rel=1e-4)
        assert all(other == expected for other in others)
