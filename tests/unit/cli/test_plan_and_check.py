"""The commands `isotrain plan` and `isotrain check`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
from helpers.in_process import command as in_process

from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import main
from isotrain.core.contracts.plan import Plan
from isotrain.core.reporting.text import PLAN_GROUPS
from isotrain.core.spec.training_spec import TrainingSpec


def test_every_field_of_a_plan_is_shown(folder: Path) -> None:
    shown = [name for names in PLAN_GROUPS.values() for name in names]
    assert sorted(shown) == sorted({field.name for field in fields(Plan)} - {"weight_shapes"})
    arguments = ["--backend", "torch-ddp", "--replicas", "2", "--no-measure"]
    text = in_process("plan", "small.json", *arguments, folder=folder).stdout
    assert "rank 1 on 127.0.0.1: replica 1" in text
    assert "not counted" in text
    assert "KERAS_BACKEND" in text


def test_a_measured_plan(folder: Path) -> None:
    arguments = ["--backend", "reference", "--replicas", "2", "--json"]
    found = json.loads(in_process("plan", "small.json", *arguments, folder=folder).stdout)
    assert found["format"] == 1
    plan = found["plan"]
    assert (plan["samples"], plan["parameters"], plan["gradient_bytes"]) == (10, 4, 16)
    assert (plan["steps_per_epoch"], plan["total_steps"]) == (3, 6)
    assert plan["local_batch_sizes"] == [2, 2]
    assert not (folder / "runs").exists()


def test_plan_diff_shows_differing_fields(folder: Path) -> None:
    command = ["plan", "small.json", "--no-measure", "--diff"]
    found = in_process(*command, "torch-ddp@2", "tf-multiworker:ring@2", "--json", folder=folder)
    rows = {row["field"]: row for row in json.loads(found.stdout)["differences"]}
    assert rows["collective"]["first"] == "gloo"
    assert rows["collective"]["second"] == "ring"
    assert "global_batch_size" not in rows
    text = in_process(*command, "torch-ddp@2", "torch-ddp@3", folder=folder).stdout
    assert "| local batches" in text
    assert "| device mesh: data" in text
    other = in_process(*command, "torch-ddp@2", "tf-mirrored@2", folder=folder).stdout
    assert "| OMP_NUM_THREADS" in other
    assert "_batch" not in text + other
    same = in_process(*command, "torch-ddp", "torch-ddp", folder=folder).stdout
    assert same == "torch-ddp and torch-ddp: no difference\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--hosts", "2"], "give --gpus-per-host N too"),
        (["--gpu", "h100"], "give --gpus-per-host N too"),
        (["--gpus-per-host", "2", "-n", "2"], "leave --replicas out"),
        (["--gpus-per-host", "2", "--no-measure"], "leave --no-measure out"),
        (["--gpus-per-host", "2", "--launcher", "slurm"], "leave --launcher out"),
        (["--gpus-per-host", "2", "--gpu", "h10"], "unknown GPU 'h10'"),
    ],
)
def test_options_that_a_plan_for_gpus_refuses(
    folder: Path, options: Sequence[str], error: str
) -> None:
    done = in_process("plan", "small.json", *options, folder=folder)
    assert done.returncode
    assert error in done.stderr


def test_a_plan_uses_the_requested_strategy(folder: Path) -> None:
    command = ["plan", "small.json", "--no-measure", "--replicas", "2", "--json"]
    asked = ["--backend", "torch-ddp", "--strategy", "local-sgd,every=4"]
    with mock.patch.object(TrainingSpec, "rules", wraps=TrainingSpec.rules) as validated:
        plan = json.loads(in_process(*command, *asked, folder=folder).stdout)["plan"]
    assert validated.call_count == 1
    assert (plan["strategy"], plan["strategy_options"]) == ("local-sgd", {"every": 4})
    sides = ["--strategy", "gossip", "--diff", "torch-ddp", "torch-ddp@3 local-sgd,every=4"]
    found = json.loads(in_process(*command, *sides, folder=folder).stdout)
    assert found["second"] == "torch-ddp@3 local-sgd,every=4"
    rows = {row["field"]: (row["first"], row["second"]) for row in found["differences"]}
    assert rows["strategy"] == ("gossip", "local-sgd")
    assert rows["strategy_options.every"] == (None, 4)
    assert rows["replicas"] == (2, 3)


def test_check_exits_by_its_findings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    command = ["check", "small.json", "--backend", "torch-ddp", "--no-measure", "--ignore", "ISO4"]
    assert main(command) == ExitCode.OK
    assert "nothing found" in capsys.readouterr().out
    noted = [*command, "--set", "shuffle=false"]
    assert main(noted) == ExitCode.OK
    assert main([*noted, "--strict"]) == ExitCode.FINDINGS
    assert "ISO214 note" in capsys.readouterr().out
    warned = [*command, "--replicas", "1,2", "--set", "loss.reduction=sum", "--json"]
    assert main(warned) == ExitCode.FINDINGS
    found = json.loads(capsys.readouterr().out)
    assert found["targets"] == ["torch-ddp@1", "torch-ddp@2"]
    assert [each["code"] for each in found["findings"]] == ["ISO301"]
    assert main([*warned, "--ignore", "ISO301,ISO302"]) == ExitCode.OK


def test_nccl_without_gpus_is_a_finding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    backends = ["torch-ddp:nccl", "tf-mirrored:nccl", "horovod-torch:nccl", "horovod-tf:gloo"]
    named = [word for backend in backends for word in ("--backend", backend)]
    arguments = ["check", "small.json", *named, "--replicas", "2", "--no-measure", "--json"]
    assert main(arguments) == ExitCode.FINDINGS
    found = json.loads(capsys.readouterr().out)["findings"]
    refused = {target for each in found if each["code"] == "ISO402" for target in each["targets"]}
    assert refused == {f"{backend}@2" for backend in backends[:3]}
