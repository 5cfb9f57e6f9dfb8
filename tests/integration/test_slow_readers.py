"""Who follows a run may stop reading: a terminal after Ctrl-S, a launcher after Ctrl-Z. The run goes on."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from helpers.waiting import wait_until
from integration.slow_reader_program import PRINTED_EACH, SPEC, STEPS
from integration.test_rendezvous import torchrun

from isotrain.core.contracts.events import Steps
from isotrain.core.launching.run_directory.run_directory import STEPS_FILE, read_events

PROGRAM = Path(__file__).with_name("slow_reader_program.py")
PATIENCE_SECONDS = 120.0
PRINTED = range(0, STEPS, PRINTED_EACH)


def recorded_steps(folder: Path) -> int:
    return sum(len(e.losses) for e in read_events(folder / STEPS_FILE) if isinstance(e, Steps))


@contextlib.contextmanager
def started(*command: str, out: int | IO[bytes], **variables: str) -> Iterator[Any]:
    tests = str(Path(__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": tests, **variables},
        stdout=out,
        stderr=out,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.features
def test_an_unread_terminal_does_not_stop_training(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with started(str(PROGRAM), str(tmp_path), out=theirs) as process:
        os.close(theirs)
        run = tmp_path / "run"
        wait_until(lambda: recorded_steps(run) == STEPS, PATIENCE_SECONDS, "training stood still")
        shown = b""
        with contextlib.suppress(OSError):  # the other end was closed
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
        assert process.wait(PATIENCE_SECONDS) == 0
    os.close(ours)
    assert re.findall(r"step (\d+) is done", shown.decode()) == [*map(str, PRINTED)]
    assert b"returned [0, 1]" in shown


@pytest.mark.slow
@pytest.mark.failures
def test_a_suspended_launcher_does_not_stop_training(tmp_path: Path) -> None:
    with started(str(PROGRAM), str(tmp_path), out=subprocess.DEVNULL) as process:
        wait_until((tmp_path / "begun-0").exists, PATIENCE_SECONDS)
        process.send_signal(signal.SIGSTOP)
        wait_until((tmp_path / "trained-0").exists, PATIENCE_SECONDS, "training stood still")
        process.send_signal(signal.SIGCONT)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert recorded_steps(tmp_path / "run") == STEPS


@pytest.mark.features
def test_unread_output_of_rank_0_does_not_stop_training(tmp_path: Path) -> None:
    program = str(PROGRAM), str(tmp_path)
    first, second = (torchrun(rank, 2, tmp_path.name) for rank in (0, 1))
    with (
        started(*program, out=subprocess.DEVNULL, **second),
        started(*program, out=subprocess.PIPE, **first) as process,
    ):
        wait_until((tmp_path / "trained-1").exists, PATIENCE_SECONDS, "training stood still")
        assert process.stdout.read().count(b" is done, and takes a line") == len(PRINTED)
        assert process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["local", pytest.param("joined", marks=pytest.mark.features)])
def test_unread_json_lines_do_not_stop_training(tmp_path: Path, way: str) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(SPEC))
    run = tmp_path / "run"
    command = ["-m", "isotrain", "run", str(spec), "--backend", "reference", "--json"]
    command += ["--output", str(run)]
    with contextlib.ExitStack() as stack:
        if way == "joined":
            first, second = (torchrun(rank, 2, tmp_path.name) for rank in (0, 1))
            stack.enter_context(started(*command, out=subprocess.DEVNULL, **second))
        else:
            first, command = {}, [*command, "--replicas", "2"]
        process = stack.enter_context(started(*command, out=subprocess.PIPE, **first))
        wait_until(lambda: recorded_steps(run) == STEPS, PATIENCE_SECONDS, "training stood still")
        told = [json.loads(line) for line in process.stdout if line.startswith(b"{")]
        assert process.wait(PATIENCE_SECONDS) == 0
    assert sum(len(each["losses"]) for each in told if each["event"] == "steps") == STEPS
    assert told[-1]["event"] == "result"
