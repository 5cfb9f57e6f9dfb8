"""The end of a log is shown where it says something."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.core.launching.diagnosis import Watched, evidence

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
