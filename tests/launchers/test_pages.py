"""The commands of the pages about launching, pasted on the first of two hosts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cluster.bed import Bed

_ROOT = Path(__file__).parents[2]
_PAGES = _ROOT / "docs" / "launching"
PAGES = ("slurm", "mpi", "torchrun", "horovodrun", "ray", "kubernetes", "tls")
SECONDS = 120.0


def blocks(page: str) -> list[str]:
    text = (_PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("page", "number"), [(page, n) for page in PAGES for n in range(len(blocks(page)))]
)
def test_a_command_can_be_pasted(bed: Bed, page: str, number: int) -> None:
    folder = bed.folder / f"{page}-{number}"
    folder.mkdir()
    for name in ("digits.yaml", "digits.py"):
        shutil.copy(_ROOT / "examples" / name, folder)
    assert page != "ray" or bed.ray
    pasted = f"set -e; cd {folder}\n{blocks(page)[number]}"
    done = bed.with_ssh.first.run(["bash", "-c", pasted], bed.slurm.variables, SECONDS)
    assert done.returncode == 0, done.stdout
    if number == 0:
        assert done.stdout.count("final loss") == 1, done.stdout
