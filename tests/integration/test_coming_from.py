"""The blocks of the page for those who come from elsewhere run, and what stands side by side trains alike."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"
BLOCKS: list[tuple[str, str]] = re.findall(
    r"<!-- (\w+) -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
)
PAIRS = {
    name: (theirs, ours)
    for (name, theirs), (_, ours) in zip(BLOCKS[::2], BLOCKS[1::2], strict=True)
}


def loss_of(folder: Path, block: str) -> float:
    """Runs a block as a program of its own, as the one process of a group where it needs one."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(f"{block}\nprint('loss', loss)\n", encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    alone = {"RANK": "0", "WORLD_SIZE": "1", "KERAS_BACKEND": "torch"}
    variables = os.environ if "import isotrain" in block else os.environ | group | alone
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout.rpartition("loss ")[2])


def test_each_has_both_sides() -> None:
    assert list(PAIRS) == ["keras", "torch", "horovod"]
    for theirs, ours in PAIRS.values():
        assert "import isotrain" in ours
        assert "isotrain" not in theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_both_sides_train(name: str, tmp_path: Path) -> None:
    theirs, ours = PAIRS[name]
    losses = loss_of(tmp_path / "theirs", theirs), loss_of(tmp_path / "ours", ours)
    assert all(0 < loss < 0.9 for loss in losses)
    assert abs(losses[0] - losses[1]) < 0.35
