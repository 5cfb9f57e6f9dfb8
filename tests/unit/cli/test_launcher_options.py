"""The options `--launcher`, `--launcher-option` and `--dry-run` of commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.in_process import command as in_process

from isotrain.core.cli.exit_codes import ExitCode


def test_a_plan_shows_the_submission(folder: Path) -> None:
    wanted = ["--backend", "torch-ddp", "--launcher", "kubernetes", "--no-measure"]
    options = ["--launcher-option", "image=me/train:1", "--launcher-option", "pods=3"]
    text = in_process("plan", "small.json", *wanted, *options, folder=folder).stdout
    assert "rank 2 on host-2" in text
    assert "kind: Job" in text
    found = in_process("plan", "small.json", *wanted, *options, "--json", folder=folder).stdout
    ((file, manifest),) = json.loads(found)["submission"]["files"].items()
    assert file.endswith("/launcher/job.yaml")
    assert "image: me/train:1" in manifest
    assert not (folder / "runs").exists()


def test_a_dry_run_writes_the_submission(folder: Path) -> None:
    wanted = ["--backend", "torch-ddp", "--launcher", "kubernetes", "--output", "here"]
    option = ["--launcher-option", "image=me/train:1", "--dry-run"]
    said = in_process("run", "small.json", *wanted, *option, folder=folder).stdout
    manifest = folder / "here" / "launcher" / "job.yaml"
    submitted = f"To submit it, and not wait for it:\n  kubectl create -f {manifest.resolve()}\n"
    assert submitted in said
    assert f"Nothing was started. Written:\n  {manifest.resolve()}\n" in said
    assert "kind: Job" in manifest.read_text()
    assert manifest.stat().st_mode & 0o077 == 0
    none = in_process("run", "small.json", "--backend", "torch-ddp", "--dry-run", folder=folder)
    assert (none.returncode, "submits nothing to a scheduler" in none.stderr) == (2, True)
    wanted += ["--resume", "auto"]
    wanted[wanted.index("here")] = "there"
    in_process("run", "small.json", *wanted, *option, folder=folder)
    assert re.search(r"--resume\W+auto", (folder / "there" / "launcher" / "job.yaml").read_text())
    again = in_process("run", "small.json", *wanted, *option, "--max-restarts", "2", folder=folder)
    assert (again.returncode, "--max-restarts: --dry-run starts no run" in again.stderr) == (
        2,
        True,
    )
    alone = in_process("run", "small.json", *wanted, *option, "--interface", "lo", folder=folder)
    assert (alone.returncode, "interface: all processes of this" in alone.stderr) == (2, True)


@pytest.mark.parametrize(
    "more",
    [
        *(["--resume", "auto"], ["--max-restarts", "1"], ["--launcher", "mpi"], ["--dry-run"]),
        *(["--launcher-option", "nodes=2"], ["--port", "5000"]),
    ],
    ids=lambda more: more[0],
)
def test_training_options_are_refused_with_internal_work(folder: Path, more: list[str]) -> None:
    work = [
        "--internal-work",
        '{"work": "measure"}',
        "--json",
        "--line-prefix",
        "M",
        "--output",
        "here",
    ]
    found = in_process("run", "small.json", "--backend", "reference", *work, *more, folder=folder)
    assert (found.returncode, f"{more[0]}: --internal-work is for ranks" in found.stdout) == (
        ExitCode.USAGE,
        True,
    )
    assert not (folder / "here").exists()


@pytest.mark.parametrize(
    ("launcher", "program", "option", "command"),
    [
        ("slurm", "srun", "nodes=2", ["srun", "--nodes=2"]),
        ("mpi", "mpirun", "hosts=a:2,b:2", ["mpirun", "--bind-to"]),
        ("mpi", "mpirun", "flavor=hydra", ["mpirun", "-np"]),
        ("kubernetes", "kubectl", "image=me/train:1", None),
    ],
)
def test_without_the_launchers_program_a_run_is_planned_and_not_started(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    program: str,
    option: str,
    command: list[str] | None,
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    asked = ["small.json", "--backend", "reference", "--launcher", launcher]
    asked += ["--launcher-option", option]
    planned = in_process("plan", *asked, "--no-measure", "--json", folder=folder).stdout
    lacking = f"launcher {launcher!r} cannot start runs here: there is no {program}"
    assert json.loads(planned)["plan"]["notes"][0].startswith(lacking)
    written = in_process("run", *asked, "--dry-run", "--output", "written", folder=folder)
    assert written.returncode == 0
    assert any((folder / "written" / "launcher").glob("*"))
    if command is not None:
        assert written.stdout.splitlines()[-1].split()[:2] == command
    started = in_process("run", *asked, "--output", "started", folder=folder)
    assert (started.returncode, lacking in started.stderr) == (ExitCode.USAGE, True)
    assert "--dry-run` do not need it" in started.stderr
    assert not (folder / "started").exists()


@pytest.mark.parametrize("text", ["nodes", "=2", "a b=2"])
def test_malformed_launcher_options_are_refused(folder: Path, text: str) -> None:
    wanted = ["--backend", "torch-ddp", "--launcher", "slurm", "--launcher-option", text]
    found = in_process("run", "small.json", *wanted, folder=folder)
    assert (found.returncode, "expected NAME=VALUE" in found.stderr) == (2, True)
