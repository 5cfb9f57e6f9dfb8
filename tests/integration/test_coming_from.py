"""The blocks of the page for those who come from elsewhere run, and what stands side by side trains alike."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.in_process import script

from isotrain.core.launching.processes.ports import Ports

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"
STANDINS = Path(__file__).resolve().parents[1] / "helpers" / "digits_only"
BLOCKS: list[tuple[str, str]] = re.findall(
    r"<!-- (\w+) -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
)
PAIRS = {
    name: (theirs, ours)
    for (name, theirs), (_, ours) in zip(BLOCKS[::2], BLOCKS[1::2], strict=True)
}

SEEDS = """
import random, numpy, torch
random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
"""


def loss_of(folder: Path, block: str) -> float:
    """Runs a block in a folder: one of isotrain here, another as a program of its own with seeds."""
    folder.mkdir()
    file = folder / "block.py"
    ours = "import isotrain" in block
    seeded = block if ours else f"{SEEDS}{block}"
    file.write_text(f"{seeded}\nprint('loss', loss)\n", encoding="utf-8")
    printed = script(file, folder=folder).stdout if ours else program(file)
    return float(printed.rpartition("loss ")[2])


def program(file: Path) -> str:
    """What a program prints that is the one process of a group, where it needs one."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "KERAS_BACKEND": "torch"}
    # Keras imports scikit-learn where it is whole, which takes longer than the program.
    alone["PYTHONPATH"] = os.pathsep.join([str(STANDINS), os.environ["PYTHONPATH"]])
    with contextlib.closing(Ports()) as ports:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.take(1)[0])}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(file)],
            cwd=file.parent,
            env=os.environ | group | alone,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_page_has_both_programs() -> None:
    assert list(PAIRS) == ["keras", "torch", "accelerate", "fabric", "lightning", "horovod"]
    for theirs, ours in PAIRS.values():
        assert "import isotrain" in ours
        assert "isotrain" not in theirs


@pytest.mark.examples
@pytest.mark.parametrize("name", PAIRS)
def test_both_programs_train(name: str, tmp_path: Path) -> None:
    if name in {"fabric", "lightning"}:
        pytest.importorskip("lightning")
    theirs, ours = PAIRS[name]
    losses = loss_of(tmp_path / "theirs", theirs), loss_of(tmp_path / "ours", ours)
    assert all(0 < loss < 0.9 for loss in losses)
    assert abs(losses[0] - losses[1]) < 0.35
