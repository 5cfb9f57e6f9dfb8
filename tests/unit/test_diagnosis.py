"""What is said of a failed run: the end of a log where it says something, and how far the run came."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.core.contracts.reporter import BETWEEN_CALLS, Status
from isotrain.core.launching.diagnosis import Watched, error_of, evidence

NOISE = """WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795311387.036603   21687 port.cc:153] oneDNN custom operations are on.
2026-11-22 01:34:00.1: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary
To enable the following instructions: AVX2 AVX512F, in other operations, rebuild TensorFlow
/venv/torch/nn/parallel/distributed.py:799: FutureWarning: broadcast_buffers is deprecated
  warnings.warn(

"""


def evidence_of(folder: Path, text: str) -> str:
    log = folder / "rank-1.log"
    log.write_text(text)
    process: Any = SimpleNamespace(log=log)
    return evidence(Watched(process, heard=0.0, active=0.0))


@pytest.mark.parametrize("text", ["", NOISE])
def test_what_libraries_always_say_is_no_evidence(tmp_path: Path, text: str) -> None:
    assert evidence_of(tmp_path, text) == ""


@pytest.mark.parametrize(
    "line",
    [
        "terminate called without an active exception",
        "E0000 00:00:1795311387.036603 21687 x.cc:1] out of memory",
        "  File 'model.py', line 3 in build",
        "Warning: my own words",
    ],
)
def test_what_a_process_said_itself_is(tmp_path: Path, line: str) -> None:
    assert evidence_of(tmp_path, NOISE + line + "\n") == f"the end of its log:\n{line}"


def at(rank: int, step: int | None, call: str) -> Watched:
    process: Any = SimpleNamespace(
        rank=rank,
        status=Status(step, 0.0, call),
        log=Path("run", f"rank-{rank}.log"),
        exit_code=-9,
        is_gone=True,
        is_stopped=False,
        peer=SimpleNamespace(host="here", rank=rank),
    )
    return Watched(process, heard=0.0, active=0.0)


@pytest.mark.parametrize(
    ("places", "done"),
    [
        ([(7, "step"), (7, "step")], 7),
        ([(7, "step"), (7, BETWEEN_CALLS)], 8),
        ([(None, "restore"), (7, "step")], 7),
        ([(None, "build model"), (None, "build model")], None),
    ],
)
def test_the_steps_that_were_done_are_those_of_who_came_furthest(
    places: list[tuple[int | None, str]], done: int | None
) -> None:
    everyone = [at(rank, *place) for rank, place in enumerate(places)]
    assert error_of(everyone[0], everyone).steps_done == done
