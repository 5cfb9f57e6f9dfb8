"""The command `isotrain run`: what it prints and returns, and how signals and closed streams end it."""

from __future__ import annotations

import itertools
import json
import os
import pkgutil
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.in_process import command as in_process
from helpers.signals import heed_signals
from unit.cli.small_project import MODULE, isotrain, redirected, started

from isotrain.core.cli.exit_codes import ExitCode


def test_an_unavailable_backend(folder: Path) -> None:
    (folder / "plugin").mkdir()
    (folder / "plugin" / "elsewhere.py").write_text(
        textwrap.dedent("""
        from isotrain.adapters.torch.adapter import TorchDDP
        from isotrain.core.contracts.backend.capabilities import Availability
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


def test_run_prints_json_events(folder: Path) -> None:
    arguments = ["--backend", "reference", "--replicas", "2", "--json", "--output", "out"]
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
    assert result["last_loss"] == losses[-1]
    sizes = 4, 4, 2
    total = sum(loss * size for loss, size in zip(losses, sizes, strict=True))
    assert result["final_loss"] == pytest.approx(total / 10)
    assert result["run_directory"] == str(folder / "out")


def test_run_quietly_prints_the_result_alone(folder: Path) -> None:
    found = in_process("run", "small.json", "--backend", "reference", "--quiet", folder=folder)
    assert found.returncode == ExitCode.OK, found.stderr
    assert not found.stderr
    assert found.stdout.startswith("final loss ")
    assert "making the data" not in found.stdout
    directory = found.stdout.splitlines()[-1].split(maxsplit=2)[2]
    assert (Path(directory) / "result.json").is_file()


@pytest.mark.parametrize(("option", "lines"), [("--verbose", 45), (None, 24)])
def test_every_epoch_is_shown_if_asked(folder: Path, option: str | None, lines: int) -> None:
    run = ("run", "small.json", "--backend", "reference", "--set", "epochs=45")
    found = in_process(*run, *([option] if option else []), folder=folder)
    assert found.returncode == ExitCode.OK, found.stderr
    assert found.stderr.count("\nepoch ") == lines


def test_a_result_is_printed_though_files_were_removed(folder: Path) -> None:
    text = (folder / "small.py").read_text()
    removal = "    __import__('pathlib').Path('run/versions.json').unlink()\n    inputs ="
    (folder / "small.py").write_text(text.replace("    inputs =", removal))
    run = ("run", "small.json", "--backend", "reference", "--output", "run")
    done = in_process(*run, folder=folder)
    assert "final loss" in done.stdout
    assert "versions.json: removed from" in done.stderr
    assert done.returncode == ExitCode.RUN_FAILED


def test_a_run_says_once_what_its_plan_warns_of(folder: Path) -> None:
    """What the model takes is known to the processes; all else before they start."""
    small = "\nfrom isotrain.core.system import hardware\nhardware.memory_bytes = lambda: 50\n"
    (folder / "small.py").write_text(MODULE + small)
    run = ["run", "small.json", "--backend", "reference", "--replicas", "2", "--output", "run"]
    found = in_process(*run, "--set", "backend_options.refrence.size=1", folder=folder)
    assert found.returncode == ExitCode.OK, found.stderr
    lines = found.stderr.splitlines()
    unused, memory = (
        [index for index, line in enumerate(lines) if line.startswith(f"warning: {begin}")]
        for begin in ("backend_options.refrence: unknown backend", "memory: 2 replicas take ")
    )
    assert len(unused) == len(memory) == 1
    assert unused < [lines.index("building the model")] < memory
    warnings = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    assert json.loads((folder / "run" / "result.json").read_text())["plan"]["warnings"] == warnings


def test_run_prints_plain_lines(folder: Path) -> None:
    found = in_process("run", "small.json", "--backend", "reference", folder=folder)
    assert found.returncode == ExitCode.OK, found.stderr
    lines = found.stderr.splitlines()
    directory = found.stdout.splitlines()[-1].split(maxsplit=2)[2]
    assert lines[:3] == [
        "small on reference, 1 replica",
        f"run directory: {directory}",
        "starting 1 process",
    ]
    assert "6 steps, 2 epochs, 10 samples, 4 parameters" in lines
    assert [line.split(":")[0] for line in lines if line.startswith("epoch")] == [
        "epoch 1/2",
        "epoch 2/2",
    ]
    assert found.stdout.startswith("making the data\nfinal loss ")


def test_chosen_ranks_are_shown_and_the_run_is_listed(folder: Path) -> None:
    arguments = ["--backend", "reference", "--replicas", "2", "--output", "runs/two"]
    found = in_process("run", "small.json", *arguments, "--ranks", "1", folder=folder)
    assert found.returncode == ExitCode.OK, found.stderr
    assert "rank 1: making the data\n" in found.stdout
    assert not found.stdout.startswith("making the data")
    log = in_process("logs", "runs/two", "--rank", "1", folder=folder)
    assert "making the data\n" in log.stdout
    (folder / "runs" / "two" / "rank-1.log").write_text("")
    silent = in_process("logs", "runs/two", "--rank", "1", folder=folder)
    assert (silent.stdout, silent.returncode) == ("", ExitCode.OK)
    assert "rank 1 of runs/two printed nothing" in silent.stderr
    (listed,) = json.loads(in_process("runs", "--json", folder=folder).stdout)["runs"]
    assert listed["step"] == listed["total_steps"] == 6
    result = json.loads((folder / "runs" / "two" / "result.json").read_text())
    assert (listed["state"], listed["loss"]) == ("finished", result["last_loss"])
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_without_standard_streams(folder: Path) -> None:
    run = "run small.json --backend reference --replicas 2 --output run"
    assert redirected(f"{run} <&- >&- 2>&-", folder).returncode == ExitCode.OK
    assert (folder / "run" / "result.json").is_file()
    assert (folder / "run" / "rank-0.log").read_text() == "making the data\n"


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--profile", {"first_step": 10, "steps": 10, "all_processes": False}),
        ("--profile=3", {"first_step": 10, "steps": 3, "all_processes": False}),
    ],
)
def test_profile_sets_the_field_of_the_spec(
    folder: Path, option: str, expected: dict[str, int]
) -> None:
    """The run of a few steps refuses it, and has kept its spec."""
    arguments = ["--backend", "reference", option, "--output", "out"]
    found = in_process("run", "small.json", *arguments, folder=folder)
    assert "profile" in found.stderr
    assert json.loads((folder / "out" / "spec.json").read_text())["profile"] == expected


INTERRUPTING = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"


@pytest.mark.slow
def test_an_interrupt_says_what_is_left_and_how_to_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ("small.json", "--backend", "reference")
    done = in_process("run", *spec, "--output", "run", folder=folder)
    assert done.returncode == ExitCode.OK, done.stderr

    def left_by(*words: str, first_runs: int = 0) -> str:
        """What a command prints whose processes are interrupted after some complete runs."""
        with monkeypatch.context() as patch:
            for name in (
                "core.launching.probe_run.run_job",
                "analysis.parity.trace_runner.run_job",
                "analysis.find.trial.launch",
            ):
                _interrupt_after(patch, f"isotrain.{name}", first_runs)
            ended = in_process(*words, folder=folder)
        assert (ended.stdout, ended.returncode) == ("", ExitCode.INTERRUPTED)
        return ended.stderr.partition("isotrain: interrupted\n")[2]

    samples = ("--data", "small.py:data", "--output", "made.npy")
    for words in (("predict", "run", *samples), ("evaluate", "run", "--data", "small.py:data")):
        assert left_by(*words).startswith("Nothing was written, and the run is as it was.")
    assert left_by("find", "rate", *spec).startswith("Nothing is left of the search.")
    assert left_by("find", "batch", *spec).startswith("No global batch has fitted yet.")
    assert "add --first-batch 4 " in left_by("find", "batch", *spec, first_runs=1)
    assert left_by("parity", *spec, "--replicas", "1,2").startswith("Nothing is left of the check.")
    kept = left_by("parity", *spec, "--replicas", "1,2", "--output", "parity", first_runs=1)
    assert "runs before: parity/fingerprints\n" in kept
    assert len([*(folder / "parity" / "fingerprints").iterdir()]) == 1
    for output, begun, again in (
        ((), "", "use the same command"),
        (("--output", "empty"), "", "use the same command"),
        (
            ("--output", "begun"),
            "open('begun/rank-0-1.jsonl', 'w').close();",
            "use another --output",
        ),
    ):
        recorded = left_by("trace", *output, "--", sys.executable, "-c", begun + INTERRUPTING)
        told = f"No step of all processes was recorded. To start again, {again}."
        assert recorded.startswith(told)
    assert not [*folder.glob("trace-*"), *folder.glob("made*")]


def _interrupt_after(patch: pytest.MonkeyPatch, name: str, runs: int) -> None:
    """Makes a function raise `KeyboardInterrupt` after so many calls."""
    function, calls = pkgutil.resolve_name(name), itertools.count()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls) < runs:
            return function(*arguments, **options)
        raise KeyboardInterrupt

    patch.setattr(name, interrupted)
