"""The command line, judged by output and exit code; in a process of its own where that makes a difference."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.in_process import command as in_process
from unit.cli.small_project import MODULE, SPEC, isotrain

from isotrain.core.cli.app import parser
from isotrain.core.cli.argument_types import name_with_options
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import exit_code_of, main
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
from isotrain.core.reporting.text import strategies
from isotrain.core.system.version import VERSION

COMMANDS = (
    *("run", "plan", "compare", "report", "check"),
    *("backends", "strategies", "doctor", "schema"),
)


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
    """Users wait for the imports of the plan before those of the framework begin."""
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


def test_nothing_help_and_version_are_options_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words, option in (([], "--help"), (["help"], "--help"), (["version"], "--version")):
        assert main(words) == main([option]) == ExitCode.OK
        said = capsys.readouterr().out
        assert said == said[: len(said) // 2] * 2
    assert main(["help", "run"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "usage: isotrain run" in text
    assert not any(name in text for name in ("--internal-work", "--return-files", "--line-prefix"))


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == ExitCode.OK
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:2] == "  "]
    assert set(COMMANDS) <= set(listed)


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("words", [[], *([command] for command in parser().commands)], ids=str)
def test_help_fits_the_terminal_but_for_commands_to_copy(
    words: list[str],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*words, "--help"]) == ExitCode.OK
    text, _, examples = capsys.readouterr().out.partition("examples:")
    assert max(map(len, text.splitlines())) <= columns
    lines = [line for line in examples.splitlines() if len(line) > columns]
    assert all(line.startswith(("  isotrain ", "    ")) for line in lines)


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
    ids=str,
)
def test_help_has_colours_in_a_terminal_that_has_them(
    variables: dict[str, str],
    coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["run", "--help"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert ("\x1b[1moptions:\x1b[0m\n\x1b[36m  -h, --help\x1b[0m  " in text) == coloured
    assert ("\x1b" in text) == coloured


def test_a_mistake_is_one_line_and_where_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "spec.yaml", "-n", "0"]) == ExitCode.USAGE
    mistake, hint = capsys.readouterr().err.splitlines()
    assert mistake.endswith("-n/--replicas: expected a whole number of at least 1, received '0'")
    assert hint == "`isotrain run --help` explains it."


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ru"], ["run", "runs"]),
        (["run", "--rep"], ["--replicas"]),
        (["checkpoint", "di"], ["diff"]),
    ],
)
def test_bash_completes(
    words: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == ExitCode.OK
    asked = f"COMP_WORDS=(isotrain {' '.join(words)}); COMP_CWORD={len(words)}; _isotrain"
    program = f'{capsys.readouterr().out}\n{asked}; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == ExitCode.OK
        assert "replicas" in capsys.readouterr().out


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
        (["run"], "required: SPEC"),
        (["rn", "small.json"], "unknown command 'rn'. Did you mean 'run'?"),
        (["strategy"], "Did you mean 'strategies'?"),
        (
            ["--quiet", "run", "small.json"],
            "'--quiet'. Options of a command go after its name",
        ),
        (["run", "small.json", "--backends", "torch-ddp"], "Did you mean '--backend'?"),
        (
            ["compare", "small.json", "--repeat=3"],
            "unknown option '--repeat'. Did you mean '--repeats'",
        ),
        (["check", "small.json", "--replica-counts", "1"], "Did you mean '--replicas'?"),
        (["run", "small.json", "--epochs", "3"], "with --set epochs=VALUE"),
        (["run", "small.json", "--batch-size=3"], "with --set global_batch_size=VALUE"),
        (["run", "small.json", "--learning-rate", "3"], "with --set optimizer.lr=VALUE"),
        (["run", "small.json", "--num-workers", "2"], "with --set loader.workers=VALUE"),
        (
            ["run", "small.json", "--clip", "1"],
            "with --set clip.KEY=VALUE, where KEY is one of value, norm, global_norm",
        ),
        (
            ["run", "small.json", "--elastic"],
            "elastic.KEY=VALUE, where KEY is one of min (needed),",
        ),
        (["run", "small.json", "--class-weight"], "with --set 'class_weight={KEY: VALUE}'"),
        (["run", "small.json", "--ema", "0.9"], "with --set ema=VALUE"),
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
            ["compare", "small.json", "--interpreter", f"torch-dpp={sys.executable}"],
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
        (["compare", "small.json", "--backend", "torch-dp"], "Did you mean 'torch-ddp'?"),
        (["compare", "small.json", "--strategy", "none"], "data-parallel"),
        (["compare", "small.json", "--reference", "torch-ddp"], "torch-ddp@1"),
        (["compare", "small.json", "--resume", "a", "--output", "b"], "--output"),
        (["compare", "small.json", "--fail-if-slower", "5%"], "--against"),
        (["compare", "small.json", "--interpreter", "torch-ddp=/nowhere"], "no program"),
        (["report", "nowhere"], "nowhere has no results. Expected the folder of a run"),
        (["report", "nowhere", "--follow"], "is no run"),
        (["run", "--profile", "small.json"], "--profile=STEPS"),
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
        (["run", "small.json", "--num-processes", "2"], "Did you mean '--replicas'?"),
        (["plan", "small.json", "--strategy", "fsdp"], "Did you mean 'sharded'?"),
        (["plan", "small.json", "--backend", "torch-ddp", "--diff", "a", "b"], "--diff"),
        (["check", "small.json", "--backend", "torch-ddp", "--replicas", "1,0"], "at least 1"),
        (["check", "small.json", "--backend", "torch-ddp", "--ignore", "ISO99"], "ISO"),
        (
            ["check", "small.json", "--backend", "torch-ddp", "--set", "ignore=[ISO99]"],
            "in small.json with --set ignore=[ISO99]",
        ),
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
        pytest.param("compare", ["--repeats", "1", "--run-limit", "0.5s"], marks=pytest.mark.slow),
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


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("gossip", "gossip", {}),
        ("local-sgd,every=4,start=10", "local-sgd", {"every": 4, "start": 10}),
        ("a, b = [1, 2], c='x,y', d=", "a", {"b": [1, 2], "c": "x,y", "d": None}),
        ("compressed,method=powersgd", "compressed", {"method": "powersgd"}),
    ],
)
def test_a_strategy_argument_is_a_name_and_yaml_options(
    text: str, name: str, options: dict[str, Any]
) -> None:
    assert name_with_options(text) == {"name": name, "options": options}


def test_schema_accepts_a_spec_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    schema = json.loads(in_process("schema", folder=tmp_path).stdout)
    jsonschema.validate(SPEC, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**SPEC, "epochs": "many"}, schema)


def test_the_strategies_table_follows_the_declarations(tmp_path: Path) -> None:
    found = json.loads(in_process("strategies", "--json", folder=tmp_path).stdout)["strategies"]
    host = plugin_manager()
    names = [strategy["name"] for strategy in found]
    assert [name for name in names if "," not in name] == host.strategies.names()
    variants = {
        "sharded,stage=3": {"stage": 3},
        "sharded,hybrid=true": {"hybrid": True},
        "pipeline,schedule=2bw": {"schedule": "2bw"},
        "pipeline,schedule=pipedream": {"schedule": "pipedream"},
    }
    for before, name in itertools.pairwise(names):
        assert ("," in name) == (name in variants)
        assert name not in variants or before.partition(",")[0] == name.partition(",")[0]
    for strategy in found:
        assert list(strategy["backends"]) == host.backends.names()
        name, _, options = strategy["name"].partition(",")
        own: Any = (
            host.strategy(name, variants[strategy["name"]])
            if options
            else host.strategies.get(name)
        )
        assert strategy["requires"] == sorted(own.requires)
        parallel_layout = own.parallel_layout.name
        for backend, pair in strategy["backends"].items():
            missing = (
                set(strategy["requires"])
                - host.backend(backend).capabilities_for(parallel_layout).has
            )
            assert pair["supported"] == (not missing)


def test_the_reason_of_an_unsupported_pair_is_shown_in_full() -> None:
    reason = "it has no send-receive: " + "words " * 40
    pairs = {"a": {"supported": True, "reason": None}, "b": {"supported": False, "reason": reason}}
    listed = [{"name": "gossip", "summary": "talks", "requires": [], "backends": pairs}]
    text = strategies(listed)
    assert "| gossip   | yes | no (1) |" in text
    assert reason.strip() in text


def test_backends_of_a_comparison_may_stand_in_one_list() -> None:
    for command in ("compare", "parity", "check"):
        words = [command, "spec.yaml", "-b", "torch-ddp,tf-multiworker:ring", "-b", "numpy"]
        chosen = parser().parse_args(words).backend
        assert chosen == ["torch-ddp", "tf-multiworker:ring", "numpy"]
