"""The commands and the script of the tutorial run, one after the other, and print what the page says."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from helpers.in_process import command, script

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def run(line: str, folder: Path) -> str:
    """Standard output of one command of the page in a folder."""
    program, *arguments = shlex.split(line)
    if program == "python":
        return script(folder / arguments[0], folder=folder).stdout
    done = command(*arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(label: str, text: str) -> float:
    """Number that a printed result has behind a label."""
    found = re.search(rf"^{label} +(\S+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


@pytest.mark.examples
def test_the_tutorial_runs_and_prints_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path
    for language, block in BLOCKS:
        if language == "python":
            (folder / "train.py").write_text(block, encoding="utf-8")
        if language == "yaml":
            assert yaml.safe_load(block) == yaml.safe_load((folder / "train.yaml").read_text())
        if language == "sh":
            for line in (line.split("#")[0].strip() for line in block.splitlines()):
                if line.startswith("cd "):
                    folder /= line.removeprefix("cd ")
                elif "slurm" not in line or shutil.which("srun"):
                    run(line, folder)
        if language == "console":
            line, shown = block.removeprefix("$ ").split("\n", 1)
            printed = run(line, folder)
            for label in re.findall(r"^([a-z ]+?)  +\S+$", shown, re.MULTILINE):
                assert number(label, printed) == pytest.approx(number(label, shown), abs=2e-3)
            if "loss" not in shown:
                assert shown.strip() in printed


def test_the_tutorial_goes_from_one_replica_to_another_backend_and_two_hosts() -> None:
    lines = "".join(block for language, block in BLOCKS if language in ("sh", "console"))
    steps = (
        "init",
        "--replicas 2",
        "tf-mirrored",
        "parity",
        "resume",
        "nodes=2",
        "python train.py",
    )
    positions = [lines.index(step) for step in steps]
    assert positions == sorted(positions)
