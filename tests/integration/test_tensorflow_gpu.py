"""Checks of `tensorflow_gpu_checks`, in a process that has TensorFlow."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.isolated import run_isolated
from integration import session_specs

import isotrain

CHECKS = Path(__file__).with_name("tensorflow_gpu_checks.py")


def exit_code(session: isotrain.Session) -> int:
    return int(pytest.main([str(CHECKS), "-p", "no:cacheprovider"]))


@pytest.mark.slow
def test_checks_pass(tmp_path: Path) -> None:
    code = run_isolated(exit_code, session_specs.spec(), "tf-mirrored", tmp_path / "run")
    assert code == pytest.ExitCode.OK
