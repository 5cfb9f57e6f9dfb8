"""The commands of the pages about launching, pasted on the first of two hosts."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from cluster.hosts import end
from cluster.two_hosts import TwoHostCluster

_ROOT = Path(__file__).parents[2]
_PAGES = _ROOT / "docs" / "launching"
_STANDINS = _ROOT / "tests" / "helpers" / "digits_only"
"""Among them the digits, without the second that scikit-learn takes each rank to import."""
LAUNCHERS = ("slurm", "mpi", "torchrun", "horovodrun", "ray", "kubernetes", "tls")
PAGES = (*LAUNCHERS, "README", "rendezvous")
SECONDS = 250.0
_SCRIPT = """\
import isotrain

if __name__ == "__main__":
    isotrain.run("digits.yaml", backend="torch-ddp", on_event=lambda event: None)
"""
_EVERYBODY_IS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    """What can be pasted; lines of general pages that stand on those of launchers too are left to these."""
    found = _BLOCK.findall((_PAGES / f"{page}.md").read_text(encoding="utf-8"))
    if page in LAUNCHERS:
        return found
    known = {
        line for launcher in LAUNCHERS for block in blocks(launcher) for line in block.splitlines()
    }
    left = ([line for line in block.splitlines() if line not in known] for block in found)
    return ["\n".join(lines) for lines in left if lines]


@pytest.mark.parametrize(
    ("page", "number"), [(page, n) for page in PAGES for n in range(len(blocks(page)))]
)
def test_a_command_can_be_pasted(bed: TwoHostCluster, page: str, number: int) -> None:
    folder, text = bed.folder / f"{page}-{number}", blocks(page)[number]
    folder.mkdir()
    shutil.copy(_ROOT / "examples" / "digits.py", folder)
    spec = (_ROOT / "examples" / "digits.yaml").read_text()
    (folder / "digits.yaml").write_text(re.sub(r"epochs: \d+", "epochs: 1", spec))
    (folder / "train.py").write_text(_SCRIPT)
    assert page != "ray" or bed.ray
    pasted = ["bash", "-c", f"set -e; cd {folder}\n{text}"]
    path = os.pathsep.join([str(_STANDINS), os.environ["PYTHONPATH"]])
    variables = {**bed.with_ssh.slurm.variables, **_EVERYBODY_IS_ROOT, "PYTHONPATH": path}
    others = bed.network.hosts[1:] if "--nnodes 2 " in text else ()
    log = folder / "others.log"
    started = [host.start(pasted, log, variables) for host in others]
    try:
        said = bed.first.check(pasted, variables, SECONDS)
        assert not any(other.wait(SECONDS) for other in started), log.read_text()
    finally:
        for other in started:
            end(other)
    said += log.read_text() if others else ""
    if page in LAUNCHERS and (number == 0 or others):
        assert said.count("final loss") == 1, said


def test_every_page_is_covered() -> None:
    assert {page.stem for page in _PAGES.glob("*.md")} == {*PAGES}
