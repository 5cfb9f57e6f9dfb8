"""`isotrain doctor --launcher` and `isotrain cluster-info`: what they find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.certificates import Authority
from unit.environments.environment_cases import SRUN

from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import main


def doctor(capsys: pytest.CaptureFixture[str], name: str) -> dict[str, Any]:
    assert main(["doctor", "--launcher", name, "--json"]) == ExitCode.OK
    (found,) = json.loads(capsys.readouterr().out)["launchers"]
    return dict(found)


def test_the_doctor_says_what_a_launcher_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.environ", {**SRUN, "PATH": "/nowhere"})
    found = doctor(capsys, "slurm")
    assert (found["available"], found["reason"]) == (False, "there is no srun")
    assert [(each["host"], each["slots"]) for each in found["allocation"]] == [
        *(("n01", 2), ("n02", 2), ("n03", 2), ("n04", 1))
    ]
    assert (found["cluster_info"]["rank"], found["options"]["partition"]) == (4, "")
    assert main(["doctor", "--launcher", "slurm"]) == ExitCode.OK
    text = capsys.readouterr().out
    asked = ["--launcher-option", "nodes=1", "--launcher-option", "tasks_per_node=5"]
    assert main(["doctor", "--launcher", "slurm", *asked, "--json"]) == ExitCode.OK
    (found,) = json.loads(capsys.readouterr().out)["launchers"]
    assert [(each["host"], each["slots"]) for each in found["allocation"]] == [("n01", 5)]
    assert "there is no srun; run it where SLURM's commands are" in text
    assert "n01 (2 processes), n02 (2 processes)" in text
    assert "in one process" in text
    assert found["tls"]["folder"] is None


@pytest.mark.parametrize("given", [["doctor", "--launcher", "slurm"], ["cluster-info"]])
def test_doctor_and_cluster_info_say_whether_processes_could_encrypt(
    given: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = Authority().folder(tmp_path / "tls")
    monkeypatch.setattr("os.environ", {**SRUN, "PATH": "/nowhere", "ISOTRAIN_TLS": folder})
    assert main(given) == ExitCode.OK
    assert f"yes: certificate in {folder}, until " in capsys.readouterr().out
    (tmp_path / "tls" / "tls.key").unlink()
    assert main(given) == ExitCode.OK
    assert f"no: ISOTRAIN_TLS: {folder}/tls.key cannot be read" in capsys.readouterr().out


def test_the_doctor_knows_the_launcher_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.environ", {})
    found = doctor(capsys, "local")
    assert (found["available"], found["allocation"], found["options"]) == (True, None, {})
    assert found["no_cluster_info"] == "no launcher or scheduler started this process"
    assert main(["doctor", "--launcher", "nothing"]) == ExitCode.USAGE
    assert "unknown launcher 'nothing'" in capsys.readouterr().err
