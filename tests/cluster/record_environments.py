"""The variables that real launchers set on each rank, as files: detectors of environments are tested on them.

`python -m cluster.record_environments` in `tests/`, with the Python of the launchers, writes them anew.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster.external_launchers import EXTERNAL_LAUNCHERS, ExternalLauncher
from cluster.network import Network
from cluster.two_hosts import TwoHostCluster

RECORDED = Path(__file__).parents[1] / "launchers" / "recorded"
SECONDS = 120.0
_LEFT_TO_CHANCE = ("SLURM_DISTRIBUTION", "RAY_USAGE_STATS_ENABLED")
"""Of heterogeneous steps: now `block`, now `cyclic`, for the same command. Of Ray: the head has it alone,
whose ranks are now the first, now the last."""
_PROJECT = str(Path(__file__).parents[2])
_RANK = str(Path(__file__).with_name("rank_variables.py"))
_OF_A_SHELL = re.compile(
    r"PATH|HOME|LANG|LC_\w+|PYTHON\w*|PYENV\w*|_|PWD|OLDPWD|SHLVL|SHELL|USER|LOGNAME|MAIL|SSH_\w+|"
    r"XDG_\w+|TERM|SLURM_CONF|LD_LIBRARY_PATH|VIRTUAL_ENV"
)
_SECRET = re.compile(r"KEY|SECRET|TOKEN|precondition_transports")
_VARIES = re.compile(r"/tmp/[^\s,;:]*|\b[0-9a-f]{8,}\b|\d+")


def record(bed: TwoHostCluster, launcher: ExternalLauncher) -> list[dict[str, Any]]:
    """Starts a launcher.

    Returns:
        For each rank, in order: its `host` and its `variables`.
    """
    folder = bed.folder / f"recorded-{launcher.name}"
    folder.mkdir()
    log = bed.folder / f"{launcher.name}.log"
    started = launcher.start(bed, [bed.python, "-S", "-E", _RANK, str(folder)], log)
    try:
        statuses = started.wait(SECONDS)
    finally:
        started.end()
    assert not any(statuses), log.read_text()
    ranks = [json.loads(file.read_text()) for file in folder.iterdir()]
    shutil.rmtree(folder)
    ranks.sort(key=lambda rank: int(rank["variables"].get(launcher.order, 0)))
    return [
        {"host": rank["host"], "variables": _of_engine(bed, rank["variables"])} for rank in ranks
    ]


def _of_engine(bed: TwoHostCluster, variables: dict[str, str]) -> dict[str, str]:
    """Without what a shell sets, without secrets, and without the folders of this machine."""
    return {
        name: "secret" if _SECRET.search(name) else _elsewhere(bed, text)
        for name, text in sorted(variables.items())
        if not _OF_A_SHELL.fullmatch(name)
    }


def _elsewhere(bed: TwoHostCluster, text: str) -> str:
    return text.replace(str(bed.folder), "/tmp/bed").replace(_PROJECT, "/project")


def form(ranks: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What does not differ from run to run."""
    return [
        {
            name: _VARIES.sub("#", text)
            for name, text in rank["variables"].items()
            if name not in _LEFT_TO_CHANCE
        }
        for rank in ranks
    ]


def hosts(ranks: list[dict[str, Any]]) -> list[int]:
    """Ranks of each host, numbered as they appear, for Ray begins with any."""
    names = [rank["host"] for rank in ranks]
    return [list(dict.fromkeys(names)).index(name) for name in names]


def recorded(name: str) -> list[dict[str, Any]]:
    """What a launcher set when it was recorded."""
    ranks: list[dict[str, Any]] = json.loads((RECORDED / f"{name}.json").read_text())
    return ranks


def _record_all(names: list[str]) -> None:
    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, Network(Path(folder)) as network:
        bed = TwoHostCluster(network)
        for name in names or EXTERNAL_LAUNCHERS:
            ranks = record(bed, EXTERNAL_LAUNCHERS[name])
            (RECORDED / f"{name}.json").write_text(json.dumps(ranks, indent=1) + "\n")
            print(f"{name}: {len(ranks)} ranks", flush=True)


if __name__ == "__main__":
    _record_all(sys.argv[1:])
