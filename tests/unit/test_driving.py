"""What an engine is given to start on every rank, and how its commands are followed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.core.cli.main import main
from isotrain.core.contracts.plugin_choice import PluginChoice
from isotrain.core.contracts.submission import Submission
from isotrain.core.launching import engine_process
from isotrain.core.launching.driving import rank_command
from isotrain.core.launching.engine_process import EngineProcess
from isotrain.core.spec.training_spec import TrainingSpec

PLAN = {"run": "a run", "backend": "reference", "requested": None, "processes": (0, 1)}


def spec() -> TrainingSpec:
    return TrainingSpec.model_validate(
        {
            "model": "m:model",
            "data": "m:data",
            "loss": "mean_squared_error",
            "optimizer": {"name": "sgd", "lr": 0.1},
            "global_batch": 4,
            "epochs": 1,
        }
    )


def test_its_lines_have_the_mark_that_is_looked_for_also_with_plugins_left_out(
    tmp_path: Path,
) -> None:
    plan: Any = SimpleNamespace(**PLAN)
    plugins = PluginChoice(blocked=("one", "two"))
    command = rank_command(spec(), plan, plugins, tmp_path, None)
    assert command.name.startswith("isotrain-a-run-")
    assert command.options[command.options.index("--mark") + 1] == command.name
    assert command.options[-4:] == ("--block-plugin", "one", "--block-plugin", "two")
    assert "--replicas" not in command.options  # they are as many as the engine starts


def test_that_this_process_stands_alone_is_not_said_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan: Any = SimpleNamespace(**PLAN)
    for own, expected in (("none", None), ("slurm", "slurm")):
        monkeypatch.setenv("ISOTRAIN_ENVIRONMENT", own)
        command = rank_command(spec(), plan, PluginChoice(), tmp_path, None)
        assert command.variables.get("ISOTRAIN_ENVIRONMENT") == expected


@pytest.mark.parametrize("mark", [("--mark", "here"), ("--mark=here",)])
def test_an_error_has_the_mark_however_that_was_given(
    mark: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--no-such-option", "--json", *mark]) == 2
    before, _, told = capsys.readouterr().out.partition(" ")
    assert before == "here"
    assert json.loads(told)["event"] == "error"


def test_one_that_says_no_more_does_not_hide_that_another_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "END_SECONDS", 0.3)
    commands = ("exec >&-; exec sleep 1000", "echo said; sleep 0.5; exit 3")
    submission = Submission(tuple(("sh", "-c", command) for command in commands))
    with EngineProcess(submission, tmp_path / "log", os.environ) as engine:
        assert list(engine.lines()) == ["said\n"]
        assert engine.status() == 3
