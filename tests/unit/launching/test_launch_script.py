"""`isotrain config` and `isotrain doctor --launcher`: what they ask, write and find."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.certificates import Authority
from unit.environments.environment_cases import SRUN

from isotrain.core.cli.app import parser
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import main
from isotrain.core.launching.scheduler.launch_script import SCRIPT_FILE, SPEC_FILE
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.spec.loading import load_spec

Answers = Callable[..., list[str]]
BACKEND, OTHER = plugin_manager().backends.names()[:2]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Lets this process seem to run in a terminal, whose person gives these answers."""

    def given(*texts: str) -> list[str]:
        waiting, asked = list(texts), []

        def answer(question: str) -> str:
            asked.append(question)
            return waiting.pop(0)

        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", answer)
        return asked

    return given


def command_in(folder: Path) -> list[str]:
    """The command of a script, which `isotrain` understands."""
    script = folder / SCRIPT_FILE
    assert os.access(script, os.X_OK)
    (line,) = (each for each in script.read_text().splitlines() if each.startswith("exec "))
    words = shlex.split(line)
    assert (words[:2], words[-1]) == (["exec", "isotrain"], "$@")
    parser().parse_args(words[2:-1])
    return words[2:-1]


def test_options_answer_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "digits"
    arguments = ["--backend", f"{OTHER}:ring", "--launcher", "local", "--replicas", "2"]
    code = main(["config", *arguments, "--precision", "bfloat16", "--directory", str(folder)])
    assert code == ExitCode.OK
    assert capsys.readouterr().out.split() == [str(folder / SCRIPT_FILE), str(folder / SPEC_FILE)]
    assert command_in(folder) == [
        *("run", SPEC_FILE, "--backend", f"{OTHER}:ring", "--replicas", "2")
    ]
    spec = load_spec(folder / SPEC_FILE, check_imports=False)
    assert (spec.name, spec.precision, spec.global_batch_size) == ("training", "bfloat16", 64)


def test_missing_options_are_prompted_for(
    tmp_path: Path, answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answers("no-such", OTHER, "", "none", "3", "float64")
    assert main(["config", "--directory", str(tmp_path)]) == ExitCode.OK
    assert [question.split()[0] for question in asked] == [
        *("backend", "backend", "launcher", "replicas", "replicas", "precision")
    ]
    assert "unknown backend 'no-such'" in (said := capsys.readouterr().out)
    assert "replicas: expected a whole number of at least 1, received 'none'" in said
    assert command_in(tmp_path) == ["run", SPEC_FILE, "--backend", OTHER, "--replicas", "3"]
    assert load_spec(tmp_path / SPEC_FILE, check_imports=False).precision == "float64"


def test_an_existing_spec_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answers: Answers
) -> None:
    asked = answers()
    slurm = ["--launcher", "slurm", "--launcher-option", "nodes=2"]
    given = ["--backend", BACKEND, *slurm, "--spec", "my.yaml", "--json"]
    assert main(["config", *given, "--directory", str(tmp_path)]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == [str(tmp_path / SCRIPT_FILE)]
    assert command_in(tmp_path) == found["command"][1:]
    assert found["command"][2] == str(Path("my.yaml").resolve())
    assert found["command"][-4:] == slurm
    assert not asked
    assert main(["config", *given, "--directory", str(tmp_path)]) == ExitCode.USAGE
    assert "exists already" in capsys.readouterr().err
    assert main(["config", *given, "--launcher-option", "knots=1"]) == ExitCode.USAGE
    assert "unknown option of the launcher 'slurm': 'knots'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--backend", "--launcher", "--precision"])
def test_unknown_choices_are_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", option, "nothing", "--directory", str(tmp_path)]) == ExitCode.USAGE
    assert "'nothing'. Available: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


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
