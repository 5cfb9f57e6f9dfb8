"""The small process that shows what another one printed last."""

from __future__ import annotations

import subprocess
import sys

import pytest

from isotrain.core.rendezvous import crash_output

PROGRAM = """
import os, sys, tempfile
from isotrain.core.rendezvous.crash_output import output_tail_on_crash
with tempfile.TemporaryFile() as log:
    os.write(log.fileno(), b"last words")
    with output_tail_on_crash(log.fileno(), 1) as dismiss:
        if sys.argv[1] == "dismissed":
            dismiss()
        os._exit(0)
"""


@pytest.mark.parametrize(("how", "shown"), [("suddenly", b"last words"), ("dismissed", b"")])
def test_crash_output_is_shown_unless_the_end_was_intended(how: str, shown: bytes) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, check=True)
    assert done.stdout == shown


def test_a_run_continues_without_crash_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(crash_output.subprocess, "Popen", refuse)
    with crash_output.output_tail_on_crash(1, 2) as dismiss:
        dismiss()
