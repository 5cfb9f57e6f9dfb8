"""Tables in terminals of several widths: each line fits, and nothing that is copied is broken."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from isotrain.core.contracts.events import Started, Steps
from isotrain.core.launching.run_directory.run_directory import RunDirectory

RUNS = {
    "digits-20261126-143452": "torch-ddp",
    "spirals-20261126-150501": "tf-multiworker",
    "two_spirals-20261126-151733": "horovod-torch",
}
"""Backends by the names of runs."""


def on_terminal(*arguments: str, columns: int, folder: Path) -> list[str]:
    """The lines that `isotrain` shows in a terminal of that width, without colours and styles."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "isotrain", *arguments],
        cwd=folder,
        env={**variables, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end was closed
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()


def rows(lines: list[str], column: str) -> list[list[str]]:
    """The words of the rows of a table whose first column has that heading."""
    begin = next(index for index, line in enumerate(lines) if line.startswith(column))
    return [line.split() for line in [*lines[begin + 2 :], ""]]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_backends_are_a_table(columns: int, tmp_path: Path) -> None:
    lines = on_terminal("backends", columns=columns, folder=tmp_path)
    assert max(map(len, lines)) <= columns
    named = [row[0] for row in rows(lines, "backend ") if row[1:2] in (["yes"], ["no"])]
    assert named[:5] == [
        "torch-ddp",
        "tf-mirrored",
        "tf-multiworker",
        "horovod-torch",
        "horovod-tf",
    ]
    assert "hierarchical-copy," in " ".join(lines).split()


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_runs_are_a_table_where_it_fits(columns: int, tmp_path: Path) -> None:
    for name, backend in RUNS.items():
        run = RunDirectory.create("digits", tmp_path / "runs" / name)
        run.write("spec.json", {})
        run.write("plan.json", {"backend": backend, "replicas": 2, "total_steps": 380})
        run.append_event(Started(pid=1, time=time.time() - 2150))
        run.append_event(Steps(first=0, losses=[0.0078069] * 380, learning_rates=[0.1] * 380))
    lines = on_terminal("runs", columns=columns, folder=tmp_path)
    assert max(map(len, lines)) <= columns
    for name, backend in RUNS.items():
        on = f"{backend}@2"
        if columns == 60:
            facts = lines[lines.index(name) + 1].split()
            assert facts[:6] == ["stopped", "step", "380/380,", "loss", "0.007807,", "36min,"]
            assert on in " ".join(lines).split()
        else:
            assert [name, "stopped", "380/380", "0.007807", "36min", on] in rows(lines, "run ")
