"""`isotrain parity` of a program's trace, beside a run of a spec or what is none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.in_process import Done
from helpers.in_process import command as in_process
from unit.cli.small_project import SPEC

from isotrain.analysis.program_trace.recorder import Recorder
from isotrain.core.cli.exit_codes import ExitCode

INPUTS = np.arange(30, dtype=np.float32).reshape(10, 3) / 30
TARGETS = INPUTS.sum(axis=1, keepdims=True)
PASSES = {"training": True, "gradients": True, "dropout": False, "batch_norm": False}


def write_trace(folder: Path, steps: int, *, late: float = 1.0, optimizers: int = 1) -> None:
    """Writes the trace of a linear model with the spec's data; the last gradients are times `late`."""
    folder.mkdir()
    recorder = Recorder(folder, steps)
    recorder.set_rank(0, 1)
    weights = {
        "linear.weight": np.float32([[0.1, -0.2, 0.3]]),
        "linear.bias": np.float32([0.05]),
    }
    for step in range(steps):
        rows = slice(4 * (step % 3), 4 * (step % 3) + 4)
        x, y = INPUTS[rows], TARGETS[rows]
        error = x @ weights["linear.weight"].T + weights["linear.bias"] - y
        factor = 2 * (late if step == steps - 1 else 1) / len(x)
        gradients = {
            "linear.weight": factor * (error.T @ x),
            "linear.bias": factor * error.sum(axis=0),
        }
        for optimizer in range(optimizers):
            facts = {"autocast": False, "wrapper": "Linear", "random": {}}
            recorder.event("forward", rows=recorder.rows([x]), **PASSES, **facts)
            recorder.event("backward", loss=float(np.mean(np.square(error))))
            start = {} if step else recorder.start(weights, {})
            weights = {name: w - np.float32(0.1) * gradients[name] for name, w in weights.items()}
            group = {"optimizer": "SGD", "dtype": "float32", "options": {"lr": 0.1}}
            recorder.step(
                optimizer,
                {
                    **start,
                    "groups": [{**group, "names": [*weights]}],
                    "gradient": recorder.fingerprints(gradients),
                    "weight": recorder.fingerprints(weights),
                },
            )


@pytest.fixture
def spec(folder: Path) -> str:
    """The spec, whose last global batch of an epoch is smaller."""
    (folder / "spec.json").write_text(json.dumps({**SPEC, "shuffle": False}))
    return "spec.json"


def parity(*words: str, folder: Path) -> Done:
    return in_process("parity", *words, "--backend", "reference", folder=folder)


def test_every_recorded_step_is_compared(folder: Path, spec: str) -> None:
    """Also the last one, in whose place `parity` of a spec alone traces a smaller batch that comes later."""
    write_trace(folder / "right", 2)
    write_trace(folder / "wrong", 2, late=5.0)
    found = parity("right", spec, "--replicas", "2", folder=folder)
    assert "AGREE: spec.json and right train alike in 2 steps" in found.stdout, found.stdout
    assert found.returncode == ExitCode.OK
    found = parity(spec, "wrong", "--json", folder=folder)
    facts = json.loads(found.stdout)
    assert (found.returncode, facts["verdict"], facts["steps"]) == (
        *(ExitCode.DIFFERENT, "difference"),
        2,
    )
    assert (facts["differences"][0]["step"], facts["causes"][0]["code"]) == (1, "gradients-scaled")


def test_as_many_steps_as_asked_for_are_taken(folder: Path, spec: str) -> None:
    write_trace(folder / "wrong", 4, late=5.0)
    found = parity("wrong", spec, "--steps", "3", folder=folder)
    assert "train alike in 3 steps" in found.stdout, found.stdout + found.stderr
    found = parity("wrong", spec, "--steps", "5", folder=folder)
    assert (found.returncode, found.stdout) == (ExitCode.USAGE, "")
    assert "expected at least 5 steps in wrong, found 4" in found.stderr


def test_a_run_with_fewer_steps_is_told(folder: Path, spec: str) -> None:
    write_trace(folder / "long", 4)
    found = parity("long", spec, "--set", "epochs=1", folder=folder)
    assert "train alike in 3 steps" in found.stdout
    assert "steps of the reference alone, not compared: 1" in found.stdout


def test_weights_without_a_certain_counterpart_end_the_run(folder: Path, spec: str) -> None:
    with (folder / "small.py").open("a") as module:
        module.write(
            "\ndef deep():\n    layers = [Dense(3, 3, name='a'), Dense(3, 1, name='b')]\n"
            "    return Network(layers)\n"
        )
    write_trace(folder / "made", 2)
    found = parity("made", spec, "--set", "model=small.py:deep", folder=folder)
    assert found.returncode == ExitCode.RUN_FAILED
    assert "the model's weights are not the reference's" in found.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("small.json", "small.json"), "received small.json and small.json, which are no folders"),
        (("small.json", "other.json"), "received small.json and other.json"),
        (("made", "run"), "run is the directory of a run, and no trace"),
        (("run",), "The spec of this run is run/spec.json"),
        (
            ("several", "small.json"),
            "expected a program with one optimizer, as the spec has, found 2",
        ),
        (("several", "updates.json"), "optimizers 0 and 1 train the same weights"),
        (("updates.json", "--replicas", "1,2"), "found updates (first, second)"),
        (("made", "made", "--replicas", "1"), "--backend, --replicas: two traces are compared"),
        (("made", "small.json", "--launcher", "slurm"), "srun"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: tuple[str, ...], told: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))  # without SLURM, which this machine may have
    write_trace(folder / "made", 2)
    write_trace(folder / "several", 2, optimizers=2)
    (folder / "run").mkdir()
    (folder / "run" / "spec.json").write_text(json.dumps(SPEC))
    fields = {name: value for name, value in SPEC.items() if name != "optimizer"}
    update = {"weights": ["*"], "optimizer": SPEC["optimizer"]}
    updates = {"first": update, "second": update}
    (folder / "updates.json").write_text(json.dumps({**fields, "updates": updates}))
    found = parity(*words, folder=folder)
    assert told in found.stderr
    assert (found.returncode, found.stdout) == (ExitCode.USAGE, "")
    assert "Traceback" not in found.stderr


def test_one_of_several_ranks_makes_no_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trace(folder / "made", 2)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    words = ("parity", "made", "small.json", "--backend", "reference")
    found = in_process(*words, folder=folder)
    assert "has started 2 processes" in found.stderr
    assert found.returncode == ExitCode.USAGE
