"""Where the launchers must be there, a test of this tier that is skipped fails it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_CONFTEST = Path(__file__).with_name("conftest.py")
_SKIPPED = {
    "in-a-test": "def test_one():\n    pytest.skip('no launcher')",
    "by-a-mark": "@pytest.mark.skip(reason='no launcher')\ndef test_one():\n    pass",
    "a-file": "pytest.skip('no launcher', allow_module_level=True)",
}


@pytest.mark.parametrize("required", [False, True], ids=["wanted", "required"])
def test_a_skip_fails_where_launchers_are_required(tmp_path: Path, required: bool) -> None:
    shutil.copy(_CONFTEST, tmp_path)
    for name, text in _SKIPPED.items():
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n\n\n{text}\n")
    told = {**os.environ, "ISOTRAIN_LAUNCHERS_REQUIRED": "1" if required else ""}
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", "-q", str(tmp_path)]
    done = subprocess.run(
        [*command, "--continue-on-collection-errors", "--rootdir", str(tmp_path)],
        env=told,
        capture_output=True,
        text=True,
        check=False,
    )
    if required:
        assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
        assert "1 failed, 2 errors" in done.stdout, done.stdout
    else:
        assert done.returncode == pytest.ExitCode.OK, done.stdout
        assert "3 skipped" in done.stdout, done.stdout
