"""The command line, judged by output and exit code; in a process of its own where that makes a difference."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import psutil
import pytest
from helpers.in_process import command as in_process
from helpers.signals import heed_signals

from isotrain.core.cli.app import parser
from isotrain.core.cli.argument_types import name_with_options
from isotrain.core.cli.commands import list as list_command
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import exit_code_of, main
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import (
    BackendUnavailableError,
    DataError,
    IsotrainError,
    PlanError,
    PluginError,
    RunFailedError,
    SpecError,
    UnsupportedError,
)
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.reporting.text import PLAN_GROUPS, strategies
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.version import VERSION

COMMANDS = (
    *("run", "plan", "compare", "report", "check"),
    *("backends", "strategies", "doctor", "schema"),
)
MODULE = """
import numpy as np
import isotrain
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

def model():
    return Network([Dense(3, 1)])

def broken_model():
    raise ValueError("no such layer")

def data():
    print("making the data")
    inputs = np.arange(30, dtype="float32").reshape(10, 3) / 30
    return isotrain.DataSet((inputs, inputs.sum(axis=1, keepdims=True)))
"""
SPEC: dict[str, Any] = {
    "name": "small",
    "model": "small.py:model",
    "data": "small.py:data",
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "global_batch_size": 4,
    "epochs": 2,
    "plugins": "isotrain.testing.reference",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a spec and the module that it names."""
    (tmp_path / "small.py").write_text(MODULE)
    (tmp_path / "small.json").write_text(json.dumps(SPEC))
    return tmp_path


def started(arguments: Sequence[str], folder: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "isotrain", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def isotrain(*arguments: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    process = started(arguments, folder, **options)
    output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def python(program: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, check=True, text=True, capture_output=True).stdout


def test_help_and_backends_load_no_framework() -> None:
    heavy = ("torch", "tensorflow", "keras", "horovod", "pydantic")
    program = f"""
        import sys
        from isotrain.core.cli.main import main
        assert main(["--help"]) == 0
        assert not [name for name in {(*heavy, "numpy", "rich")!r} if name in sys.modules]
        assert main(["backends"]) == 0
        assert not [name for name in {heavy!r} if name in sys.modules]
        """
    assert "examples:" in python(program)


def test_a_plan_is_made_without_numpy() -> None:
    """Whoever runs a spec waits for the imports of the plan before those of the framework begin."""
    program = """
        import sys
        import isotrain
        spec = {"model": {"torch": dict}, "data": dict, "loss": "mse", "steps": 1,
                "optimizer": {"name": "sgd", "lr": 0.5}, "global_batch_size": 4, "threads": 1}
        isotrain.plan(spec, backend="torch-ddp", replicas=1)
        print([name for name in ("numpy", "torch", "keras", "rich") if name in sys.modules])
        """
    assert python(program) == "[]\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert f"isotrain {command}" in text.split("examples:")[1]
    assert "--json" in text


def test_every_command_is_implemented() -> None:
    for command in COMMANDS:
        takes_spec = command in ("run", "plan", "compare", "check")
        arguments = ["spec.yaml", "--backend", "x"] if takes_spec else []
        arguments += ["folder"] if command == "report" else []
        options = parser().parse_args([command, *arguments])
        assert options.command == command
        assert callable(getattr(importlib.import_module(options.module), command))


def test_version(tmp_path: Path) -> None:
    assert isotrain("--version", folder=tmp_path).stdout == f"isotrain {VERSION}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (IsotrainError, 2),
        (SpecError, 2),
        (PlanError, 2),
        (UnsupportedError, 2),
        (DataError, 2),
        (PluginError, 2),
        (BackendUnavailableError, 3),
        (RunFailedError, 1),
    ],
)
def test_exit_code_of_each_error(error: type[IsotrainError], code: int) -> None:
    assert exit_code_of(error("words")) == code


def test_exit_codes_are_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text()
    for code in ExitCode:
        assert f"| {int(code)} |" in text, code


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required: COMMAND"),
        (["rn", "small.json"], "unknown command 'rn'. Did you mean 'run'?"),
        (["strategy"], "Did you mean 'strategies'?"),
        (
            ["--quiet", "run", "small.json"],
            "'--quiet'. Options of a command go after its name",
        ),
        (["run", "small.json"], "--backend"),
        (["run", "small.json", "--backends", "torch-ddp"], "Did you mean '--backend'?"),
        (
            ["compare", "small.json", "--repeats=3"],
            "unknown option '--repeats'. Did you mean '--repeat'",
        ),
        (["check", "small.json", "--replica-counts", "1"], "Did you mean '--replicas'?"),
        (["run", "small.json", "--epochs", "3"], "with --set epochs=VALUE"),
        (["run", "small.json", "--batch-size=3"], "with --set global_batch_size=VALUE"),
        (["run", "small.json", "--learning-rate", "3"], "with --set optimizer.lr=VALUE"),
        (
            ["run", "small.json", "--backend", "torch-ddp", "-r", "2"],
            "unknown option '-r'. Did you mean '--ranks'?",
        ),
        (["run", "small.json", "--backend", "torch-ddp", "--backend", "reference"], "given twice"),
        (["conformance", "reference", "--replicas", "2", "--replicas=3"], "given twice"),
        (["plan", "small.json", "--backend", "torch-ddp", "--perod=3"], "'--perod'.\n"),
        (["doctor", "torch-ddp"], "unexpected argument 'torch-ddp'"),
        (["doctor", "--launcher", "mpi", "--backend", "no-such"], "leave out --backend"),
        (["doctor", "--launcher-option", "a=1"], "needs --launcher NAME too"),
        (
            ["compare", "small.json", "--python", f"torch-dpp={sys.executable}"],
            "Did you mean 'torch-ddp'?",
        ),
        (["run", "small.json", "--backend", "torch-ddp", "--replicas", "0"], "at least 1"),
        (["run", "small.json", "--backend", "torch-ddp", "--port", "70000"], "65535"),
        (
            ["run", "small.json", "--backend", "torch-ddp", "--line-prefix=x"],
            "prefix of the lines of --json",
        ),
        (["run", "smal.json", "--backend", "torch-ddp"], "Did you mean 'small.json'?"),
        (["run", "small.json", "--backend", "torch-dp"], "Did you mean 'torch-ddp'?"),
        (["run", "small.json", "--backend", "torch-ddp:glu"], "gloo"),
        (["run", "small.json", "--backend", "torch-ddp", "--set", "epochs=-1"], "epochs"),
        (["plan", "small.json"], "--backend"),
        (["compare", "small.json", "--backend", "torch-dp"], "Did you mean 'torch-ddp'?"),
        (["compare", "small.json", "--strategy", "none"], "data-parallel"),
        (["compare", "small.json", "--reference", "torch-ddp"], "torch-ddp@1"),
        (["compare", "small.json", "--resume"], "--output"),
        (["compare", "small.json", "--fail-if-slower", "5%"], "--against"),
        (["compare", "small.json", "--python", "torch-ddp=/nowhere"], "no program"),
        (["report", "nowhere"], "no comparison"),
        (["run", "small.json", "--backend", "torch-ddp", "--strategy", "gosip"], "mean 'gossip'"),
        (["run", "small.json", "--backend", "torch-ddp", "--strategy", "=4"], "NAME[,OPTION=VALUE"),
        (
            ["run", "small.json", "--backend", "torch-ddp", "--logger", "csv,path"],
            "NAME[,OPTION=VALUE",
        ),
        (
            ["plan", "small.json", "--backend", "torch-ddp", "--strategy", "gossip,grap=ring"],
            "Did you mean 'graph'?",
        ),
        (
            ["plan", "small.json", "--backend", "torch-ddp", "--strategy", "gossip,graph=["],
            "not YAML",
        ),
        (["check", "small.json", "--backend", "torch-ddp", "--strategy", "gosip"], "mean 'gossip'"),
        (["compare", "small.json", "--strategy", "gosip,graph=ring"], "mean 'gossip'"),
        (["parity", "small.json", "--backend", "torch-ddp"], "nothing to compare"),
        (
            [
                "parity",
                "small.json",
                "--backend",
                "torch-ddp",
                "--strategy",
                "gossip",
                "--strategy",
                "x",
            ],
            "unknown strategy 'x'",
        ),
        (["plan", "small.json", "--diff", "torch-ddp@x", "torch-ddp"], "REPLICAS"),
        (["plan", "small.json", "--backend", "torch-ddp", "--diff", "a", "b"], "--diff"),
        (["check", "small.json"], "--backend"),
        (["check", "small.json", "--backend", "torch-ddp", "--replicas", "1,0"], "at least 1"),
        (["check", "small.json", "--backend", "torch-ddp", "--ignore", "ISO99"], "ISO"),
        (["check", "small.json", "--backend", "torch-ddp", "--set", "ignore=[ISO99]"], "ignore.0"),
    ],
)
def test_wrong_usage(
    folder: Path,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    assert main(arguments) == ExitCode.USAGE
    output, errors = capsys.readouterr()
    assert expected in errors
    assert "Traceback" not in errors
    assert not output
    assert not (folder / "runs").exists()


def test_an_error_is_the_last_line_of_json(folder: Path) -> None:
    for arguments in (["--backend", "torch-dp"], ["--bakend", "torch-ddp"]):
        found = in_process("run", "small.json", *arguments, "--json", folder=folder)
        error = json.loads(found.stdout.splitlines()[-1])
        assert error["event"] == "error"
        assert error["format"] == 1
        assert error["exit_code"] == found.returncode == ExitCode.USAGE
        assert error["message"] in found.stderr


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("run", ["--quiet"]),
        ("plan", []),
        ("check", []),
        pytest.param("parity", ["--replicas", "1,2", "--steps", "2"], marks=pytest.mark.slow),
        pytest.param("compare", ["--repeat", "1", "--run-limit", "0.5s"], marks=pytest.mark.slow),
    ],
)
def test_every_command_takes_a_spec_of_a_script(
    command: str, options: list[str], folder: Path
) -> None:
    (folder / "script.py").write_text(f"{MODULE}\nspec = {SPEC!r}\n")
    arguments = [command, "script.py:spec", "--backend", "reference", *options, "--json"]
    done = in_process(*arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "reference" in done.stdout


def test_an_unavailable_backend(folder: Path) -> None:
    (folder / "plugin").mkdir()
    (folder / "plugin" / "elsewhere.py").write_text(
        textwrap.dedent("""
        from isotrain.adapters.torch.adapter import TorchDDP
        from isotrain.core.contracts.capabilities import Availability
        from isotrain.core.plugins.hookspecs import hookimpl

        class Elsewhere(TorchDDP):
            name = "elsewhere"

            def availability(self):
                return Availability(False, None, "it is not installed", "install it")

        @hookimpl
        def isotrain_register_backends(register):
            register.add(Elsewhere)
        """)
    )
    (folder / "plugin" / "elsewhere-1.dist-info").mkdir()
    info = folder / "plugin" / "elsewhere-1.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[isotrain]\nelsewhere = elsewhere\n")
    variables = {**os.environ, "PYTHONPATH": str(folder / "plugin")}
    found = isotrain("run", "small.json", "--backend", "elsewhere", folder=folder, env=variables)
    assert found.returncode == ExitCode.UNAVAILABLE
    assert "it is not installed" in found.stderr
    listed = isotrain("backends", "--json", folder=folder, env=variables)
    by_name = {backend["name"]: backend for backend in json.loads(listed.stdout)["backends"]}
    assert by_name["elsewhere"]["reason"] == "it is not installed"
    assert by_name["torch-ddp"]["available"]


def test_run_as_json(folder: Path) -> None:
    arguments = ["--backend", "reference", "--replicas", "2", "--json", "--run-dir", "out"]
    found = isotrain("run", "small.json", *arguments, "--set", "epochs=1", folder=folder)
    assert found.returncode == ExitCode.OK, found.stderr
    events = [json.loads(line) for line in found.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds.count("started") == kinds.count("ready") == kinds.count("finished") == 2
    assert "making the data\n" in "".join(e["text"] for e in events if e["event"] == "output")
    result = events[-1]
    assert result["event"] == "result"
    assert result["format"] == 1
    steps = [event for event in events if event["event"] == "steps"]
    assert [event["first"] for event in steps[:1]] == [0]
    losses = [loss for event in steps for loss in event["losses"]]
    assert len(losses) == 3
    assert result["final_loss"] == losses[-1]
    assert result["run_directory"] == str(folder / "out")


def test_run_quietly_prints_the_result_alone(folder: Path) -> None:
    found = in_process("run", "small.json", "--backend", "reference", "--quiet", folder=folder)
    assert found.returncode == ExitCode.OK, found.stderr
    assert not found.stderr
    assert found.stdout.startswith("final loss ")
    assert "making the data" not in found.stdout
    directory = found.stdout.splitlines()[-1].split(maxsplit=2)[2]
    assert (Path(directory) / "result.json").is_file()


def test_a_result_is_printed_though_records_are_gone(folder: Path) -> None:
    text = (folder / "small.py").read_text()
    removal = "    __import__('pathlib').Path('run/versions.json').unlink()\n    inputs ="
    (folder / "small.py").write_text(text.replace("    inputs =", removal))
    run = ("run", "small.json", "--backend", "reference", "--run-dir", "run")
    done = in_process(*run, folder=folder)
    assert "final loss" in done.stdout
    assert "versions.json: removed from" in done.stderr
    assert done.returncode == ExitCode.RUN_FAILED


def test_run_in_plain_lines(folder: Path) -> None:
    found = in_process("run", "small.json", "--backend", "reference", folder=folder)
    assert found.returncode == ExitCode.OK, found.stderr
    lines = found.stderr.splitlines()
    assert lines[:2] == ["small on reference, 1 replica", "starting 1 process"]
    assert [line.split(":")[0] for line in lines if line.startswith("epoch")] == [
        "epoch 1/2",
        "epoch 2/2",
    ]
    assert found.stdout.startswith("making the data\nfinal loss ")


def test_other_ranks_are_shown_too_and_the_run_is_listed(folder: Path) -> None:
    arguments = ["--backend", "reference", "--replicas", "2", "--run-dir", "runs/two"]
    found = in_process("run", "small.json", *arguments, "--ranks", "1", folder=folder)
    assert found.returncode == ExitCode.OK, found.stderr
    assert "rank 1: making the data\n" in found.stdout
    assert not found.stdout.startswith("making the data")
    log = in_process("logs", "runs/two", "--rank", "1", folder=folder)
    assert "making the data\n" in log.stdout
    (listed,) = json.loads(in_process("runs", "--json", folder=folder).stdout)["runs"]
    assert listed["step"] == listed["total_steps"] == 6
    result = json.loads((folder / "runs" / "two" / "result.json").read_text())
    assert (listed["state"], listed["loss"]) == ("finished", result["final_loss"])
    refused = in_process("run", "small.json", *arguments[:4], "--ranks", "0,2", folder=folder)
    assert refused.returncode == ExitCode.USAGE
    assert "ranks: 2 is no rank of this run; expected 0 to 1" in refused.stderr


def test_a_failed_run(folder: Path) -> None:
    arguments = ["--backend", "reference", "--set", "model=small.py:broken_model", "--json"]
    found = in_process("run", "small.json", *arguments, folder=folder)
    assert found.returncode == ExitCode.RUN_FAILED
    assert "no such layer" in json.loads(found.stdout.splitlines()[-1])["message"]
    assert "no such layer" in found.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_every_process(folder: Path, number: signal.Signals, code: int) -> None:
    arguments = ["run", "small.json", "--backend", "reference", "--replicas", "2", "--json"]
    process = started([*arguments, "--set", "epochs=1000000"], folder, preexec_fn=heed_signals)
    assert process.stdout is not None
    while json.loads(process.stdout.readline())["event"] != "progress":
        pass
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.send_signal(number)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert json.loads(rest.splitlines()[-1])["exit_code"] == code
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not alive


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    process = started(["schema"], tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert not process.stderr.read()
    assert process.wait(timeout=60) == ExitCode.OUTPUT_CLOSED


def test_a_reader_that_leaves_a_run_ends_it(folder: Path) -> None:
    arguments = ["--backend", "reference", "--json", "--set", "epochs=1000000"]
    process = started(["run", "small.json", *arguments], folder)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert not process.stderr.read()
    assert process.wait(timeout=60) == ExitCode.OUTPUT_CLOSED


def redirected(command: str, folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `isotrain` by a shell, which opens and closes its streams, and does something before."""
    line = f"{before} exec {sys.executable} -m isotrain {command}"
    shell = ["sh", "-c", line]
    return subprocess.run(shell, cwd=folder, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("command", ["resume", "runs", "logs", "report"])
def test_a_path_that_is_too_long_is_told_in_a_line(command: str, tmp_path: Path) -> None:
    (told,) = in_process(command, "d" * 300, folder=tmp_path).stderr.splitlines()
    assert told.startswith("isotrain: ddd")
    assert told.endswith(": File name too long")


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("backends > /dev/full", 1, "the output, or a file, cannot be written: No space left"),
        ("plan nowhere.yaml --backend reference 2> /dev/full", 2, ""),
        ("plan nowhere.yaml --backend reference --json > /dev/full", 2, "no spec file"),
        ("rn 2>&-", 2, ""),
    ],
)
def test_output_that_takes_no_more(command: str, code: int, told: str, tmp_path: Path) -> None:
    done = redirected(command, tmp_path)
    assert done.returncode == code
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == bool(told), "neither tracebacks nor other noise"


def test_output_that_does_not_wait_is_no_lack_of_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = BlockingIOError(errno.EAGAIN, "write could not complete without blocking", 0)
    with mock.patch.object(list_command, "schema", side_effect=full):
        assert main(["schema"]) == ExitCode.RUN_FAILED
    assert capsys.readouterr().err.startswith("isotrain: the output, or a file, cannot be written")


def test_a_run_without_standard_streams(folder: Path) -> None:
    run = "run small.json --backend reference --replicas 2 --run-dir run"
    assert redirected(f"{run} <&- >&- 2>&-", folder).returncode == ExitCode.OK
    assert (folder / "run" / "result.json").is_file()
    assert (folder / "run" / "rank-0.log").read_text() == "making the data\n"


def test_characters_that_the_output_lacks() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with (
        mock.patch("sys.stdout", out),
        mock.patch.object(list_command, "schema", side_effect=lambda _: print("\u2013")),
    ):
        assert main(["schema"]) == ExitCode.OK
    assert out.buffer.getvalue() == b"\\u2013\n"  # type: ignore[attr-defined]


def test_a_folder_that_was_removed(folder: Path) -> None:
    inside = folder / "inside"
    inside.mkdir()
    plan = f"plan {folder}/small.json --backend reference --no-measure"
    done = redirected(plan, inside, before=f"rmdir {inside};")
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == "isotrain: the current folder was removed. Change to one that exists.\n"


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


def test_what_differs_between_plans(folder: Path) -> None:
    command = ["plan", "small.json", "--no-measure", "--diff"]
    found = in_process(*command, "torch-ddp@2", "tf-multiworker:ring@2", "--json", folder=folder)
    rows = {row["field"]: row for row in json.loads(found.stdout)["differences"]}
    assert rows["collective"]["first"] == "gloo"
    assert rows["collective"]["second"] == "ring"
    assert "global_batch_size" not in rows
    text = in_process(*command, "torch-ddp@2", "torch-ddp@3", folder=folder).stdout
    assert "| local_batch_sizes" in text
    same = in_process(*command, "torch-ddp", "torch-ddp", folder=folder).stdout
    assert same == "torch-ddp and torch-ddp: no difference\n"


def test_a_plan_is_under_the_strategy_that_is_asked_for(folder: Path) -> None:
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


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("gossip", "gossip", {}),
        ("local-sgd,every=4,start=10", "local-sgd", {"every": 4, "start": 10}),
        ("a, b = [1, 2], c='x,y', d=", "a", {"b": [1, 2], "c": "x,y", "d": None}),
        ("compressed,method=powersgd", "compressed", {"method": "powersgd"}),
    ],
)
def test_a_choice_is_a_name_and_options_in_yaml(
    text: str, name: str, options: dict[str, Any]
) -> None:
    assert name_with_options(text) == {"name": name, "options": options}


def test_a_check_says_by_its_exit_code_what_it_found(
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


def test_nccl_without_gpus_is_found(
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


def test_schema_accepts_a_spec_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    schema = json.loads(in_process("schema", folder=tmp_path).stdout)
    jsonschema.validate(SPEC, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**SPEC, "epochs": "many"}, schema)


def test_strategies_come_from_the_declarations(tmp_path: Path) -> None:
    found = json.loads(in_process("strategies", "--json", folder=tmp_path).stdout)["strategies"]
    host = plugin_manager()
    names = [strategy["name"] for strategy in found]
    assert [name for name in names if "," not in name] == host.strategies.names()
    first = names.index("sharded") + 1
    sharded = {
        "sharded,stage=3": {"stage": 3},
        "sharded,hybrid=true": {"hybrid": True},
    }
    assert names[first : first + len(sharded)] == list(sharded)
    for strategy in found:
        assert list(strategy["backends"]) == host.backends.names()
        name, _, options = strategy["name"].partition(",")
        own: Any = (
            host.strategy(name, sharded[strategy["name"]]) if options else host.strategies.get(name)
        )
        assert strategy["requires"] == sorted(own.requires)
        parallel_layout = own.parallel_layout.name
        for backend, pair in strategy["backends"].items():
            missing = (
                set(strategy["requires"])
                - host.backend(backend).capabilities_for(parallel_layout).has
            )
            assert pair["supported"] == (not missing)


def test_the_reason_for_a_no_is_shown_in_full() -> None:
    reason = "it has no send-receive: " + "words " * 40
    pairs = {"a": {"supported": True, "reason": None}, "b": {"supported": False, "reason": reason}}
    listed = [{"name": "gossip", "summary": "talks", "requires": [], "backends": pairs}]
    text = strategies(listed)
    assert "| gossip   | yes | no (1) |" in text
    assert reason.strip() in text


def test_a_plan_shows_what_an_engine_is_given(folder: Path) -> None:
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


def test_a_dry_run_writes_it(folder: Path) -> None:
    wanted = ["--backend", "torch-ddp", "--launcher", "kubernetes", "--run-dir", "here"]
    option = ["--launcher-option", "image=me/train:1", "--dry-run"]
    said = in_process("run", "small.json", *wanted, *option, folder=folder).stdout
    manifest = folder / "here" / "launcher" / "job.yaml"
    assert said.splitlines()[0] == str(manifest.resolve())
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
def test_what_is_of_a_training_is_refused_beside_work(folder: Path, more: list[str]) -> None:
    work = [
        "--internal-work",
        '{"work": "measure"}',
        "--json",
        "--line-prefix",
        "M",
        "--run-dir",
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
def test_a_machine_without_the_engine_plans_and_writes_and_starts_nothing(
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
    written = in_process("run", *asked, "--dry-run", "--run-dir", "written", folder=folder)
    assert written.returncode == 0
    assert any((folder / "written" / "launcher").glob("*"))
    if command is not None:
        assert written.stdout.splitlines()[-1].split()[:2] == command
    started = in_process("run", *asked, "--run-dir", "started", folder=folder)
    assert (started.returncode, lacking in started.stderr) == (ExitCode.USAGE, True)
    assert "--dry-run` do not need it" in started.stderr
    assert not (folder / "started").exists()


@pytest.mark.parametrize("text", ["nodes", "=2", "a b=2"])
def test_what_is_no_option_of_a_launcher(folder: Path, text: str) -> None:
    wanted = ["--backend", "torch-ddp", "--launcher", "slurm", "--launcher-option", text]
    found = in_process("run", "small.json", *wanted, folder=folder)
    assert (found.returncode, "expected NAME=VALUE" in found.stderr) == (2, True)
