"""Backends really compared: what is measured, what happens to failures, interruptions, interpreters."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.in_process import command
from helpers.signals import heed_signals

import isotrain
from isotrain.analysis.compare.result import Comparison, read_comparison

pytestmark = pytest.mark.features

MODULE = """
import sys
import numpy as np
import isotrain

def network():
    from isotrain.testing.reference.layers import Dense
    from isotrain.testing.reference.network import Network
    return Network([Dense(3, 8, "tanh", name="hidden"), Dense(8, 1, name="head")])

def model():
    import keras
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,)), *layers])

def data():
    inputs = np.random.default_rng(0).standard_normal((20, 3)).astype("float32")
    train = inputs, inputs.sum(axis=1, keepdims=True)
    return isotrain.DataSet(train, (inputs[:6], inputs[:6, :1]))
"""
WAITING = """
def waiting():
    import json, pathlib, time
    folder = pathlib.Path(__file__).parent
    kept = folder / "out" / "comparison.json"
    while (folder / "wait").exists() and kept.exists():
        if not json.loads(kept.read_text())["cells"][0]["repeats"]:
            break
        time.sleep(0.02)
    return data()
"""
"""Data that wait, where a first repeat is kept, as long as there is a file."""
SPEC = {
    "name": "small",
    "model": {
        "numpy": "small.py:network",
        **dict.fromkeys(("torch", "tensorflow"), "small.py:model"),
    },
    "data": "small.py:data",
    "loss": "mean_squared_error",
    "metrics": ["mean_absolute_error"],
    "optimizer": {"name": "sgd", "lr": 0.0625},
    "global_batch_size": 8,
    "epochs": 3,
}
QUICK = ("--repeats", "1", "--run-limit", "0.5s")
ARGUMENTS = (
    *("--plugin=isotrain.testing.reference", "--backend=reference", "--backend=tf-mirrored"),
    "--backend=torch-ddp:nccl",  # only planned
    *("--replicas=1,2", "--steps=5", *QUICK),
)
BARE_NEEDS = (
    *("annotated_types", "cloudpickle", "markdown_it", "mdurl", "numpy", "numpy.libs", "pluggy"),
    *("psutil", "pydantic", "pydantic_core", "pygments", "rich", "typing_extensions.py"),
    *("typing_inspection", "yaml"),
)
"""What isotrain imports besides frameworks."""


def write_spec(folder: Path) -> None:
    (folder / "small.py").write_text(MODULE)
    (folder / "small.json").write_text(json.dumps(SPEC))


def started(
    arguments: Sequence[str], folder: Path, python: str = sys.executable
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, "-m", "isotrain", "compare", "small.json", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )


def compared(*arguments: str, folder: Path) -> tuple[int, str, str]:
    done = command("compare", "small.json", *arguments, folder=folder)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path, str]:
    """Two backends with one and two replicas, one of which cannot be used with that collective."""
    folder = tmp_path_factory.mktemp("compare")
    write_spec(folder)
    code, output, errors = compared(*ARGUMENTS, "--output", "out", folder=folder)
    assert code == 0, errors
    return read_comparison(folder / "out"), folder, output


def test_every_cell_has_its_figures(found: tuple[Comparison, Path, str]) -> None:
    comparison = found[0]
    cells = {cell.name: cell for cell in comparison.cells}
    done = [f"{name}@{count}" for name in ("reference", "tf-mirrored") for count in (1, 2)]
    assert [name for name, cell in cells.items() if cell.status == "finished"] == done
    for cell in (cells[name] for name in done):
        (repeat,) = cell.repeats
        assert cell.samples_per_s is not None
        assert cell.samples_per_s.low <= cell.samples_per_s.value <= cell.samples_per_s.high
        rate = sum(repeat.block_samples) / sum(repeat.block_seconds)
        assert cell.samples_per_s.value == pytest.approx(rate)
        steps = repeat.block_steps * len(repeat.block_seconds)
        assert 20 / 3 * steps - 20 <= sum(repeat.block_samples) <= 20 / 3 * steps + 20
        assert repeat.warm_up_steps >= 5
        assert 0 < repeat.first_step_s < repeat.run_s
        processes = 1 if cell.backend == "tf-mirrored" else cell.replicas
        assert len(repeat.peak_memory_bytes) == processes
        assert min(repeat.peak_memory_bytes) > 20e6
        assert repeat.cpu_s > 0
        assert {span.track for span in cell.timeline} == {f"rank {r}" for r in range(processes)}
        exchange = ["exposed exchange"] if cell.replicas > 1 else []
        expected = ["input", "forward", "backward", *exchange, "update", "device"]
        assert [s.name for s in cell.timeline if s.track == "rank 0"] == expected
        assert cell.plan["threads"] == cells["reference@1"].plan["threads"]
        assert cell.versions["python"]
    assert [c.order for name in done for c in cells[name].repeats] != [0, 1, 2, 3]  # in drawn order
    assert comparison.finished


def test_all_reduce_is_measured_with_several_replicas(found: tuple[Comparison, Path, str]) -> None:
    for cell in found[0].cells[:4]:
        assert (cell.all_reduce_s is None) == (cell.replicas == 1)
        if cell.all_reduce_s is not None:
            size = cell.plan["gradient_bytes"]  # over two links, each way half of it
            assert cell.bus_bandwidth is not None
            assert cell.bus_bandwidth.value == pytest.approx(size / cell.all_reduce_s.value)
            assert cell.speedup is not None
            assert cell.efficiency is not None
            assert cell.efficiency.value == pytest.approx(cell.speedup.value / 2)


def test_training_is_the_same_in_every_cell(found: tuple[Comparison, Path, str]) -> None:
    first, *others = found[0].cells[:4]
    assert found[0].reference == first.name == "reference@1"
    assert len(first.losses) == 5
    assert len(set(first.losses)) == 5
    assert first.loss_difference == 0.0
    assert first.last_loss == first.losses[-1]
    assert set(first.metrics) == {
        *("mean_absolute_error", "validation_mean_absolute_error", "validation_loss")
    }
    for cell in others:
        assert cell.losses == pytest.approx(first.losses, rel=1e-5)
        assert cell.metrics == pytest.approx(first.metrics, rel=1e-5)
        assert cell.loss_difference is not None
        assert cell.loss_difference < 1e-5
        assert ("replicas", 1, 2) in cell.plan_differences or cell.replicas == 1


def test_a_skipped_cell_is_a_row_with_its_reason(found: tuple[Comparison, Path, str]) -> None:
    comparison, folder, output = found
    refused = comparison.cells[4:]
    assert [cell.name for cell in refused] == ["torch-ddp:nccl@1", "torch-ddp:nccl@2"]
    for cell in refused:
        assert cell.status == "skipped"
        assert cell.samples_per_s is None
        assert "GPUs" in str(cell.reason)
    assert comparison.verdict.pick is None  # one run of each tells nothing
    assert len(comparison.verdict.tied) == 4
    assert comparison.verdict.reason in output
    with (folder / "out" / "comparison.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["name"] for row in rows] == [cell.name for cell in comparison.cells]
    assert rows[4]["samples_per_s"] == ""
    assert not list((folder / "out" / "runs").iterdir())


def test_the_report_can_be_rewritten(found: tuple[Comparison, Path, str]) -> None:
    _, folder, output = found
    (folder / "out" / "comparison.csv").unlink()
    again = command("report", "out", folder=folder)
    assert again.returncode == 0, again.stderr
    assert again.stdout.split("results")[0] == output.split("results")[0]
    assert (folder / "out" / "comparison.csv").exists()


def test_a_regression_ends_with_a_code_of_its_own(found: tuple[Comparison, Path, str]) -> None:
    folder = found[1]
    shutil.copytree(folder / "out", folder / "again")
    old = json.loads((folder / "out" / "comparison.json").read_text())
    for cell in old["cells"]:
        if cell["name"] == "reference@1":
            for repeat in cell["repeats"]:
                repeat["block_samples"] = [1000 * count for count in repeat["block_samples"]]
    (folder / "old.json").write_text(json.dumps(old))
    arguments = (*ARGUMENTS, "--resume=again", "--against=old.json")  # nothing is run
    code, output, errors = compared(*arguments, "--fail-if-slower=5%", folder=folder)
    assert code == 5, errors
    assert [line.split("|")[1].strip() for line in output.splitlines() if "SLOWER" in line] == [
        "reference@1"
    ]
    assert not errors
    changes = {change.cell: change for change in read_comparison(folder / "again").changes}
    same = changes["tf-mirrored@2"].samples_per_s
    assert same is not None
    assert same.value == 1.0
    assert not changes["tf-mirrored@2"].slower
    assert changes["torch-ddp:nccl@1"].note == "skipped then, skipped now"


def test_an_interrupted_comparison_resumes(tmp_path: Path) -> None:
    """The second repeat waits for the interrupt."""
    write_spec(tmp_path)
    (tmp_path / "small.py").write_text(MODULE + WAITING)
    (tmp_path / "wait").touch()
    spec = {**SPEC, "data": "small.py:waiting"}
    (tmp_path / "small.json").write_text(json.dumps(spec))
    arguments = ["--plugin=isotrain.testing.reference", "--backend=reference", *QUICK[2:]]
    arguments += ["--repeats", "2"]
    process = started([*arguments, "--output", "out", "--json"], tmp_path)
    kept = tmp_path / "out" / "comparison.json"
    while process.poll() is None:
        if kept.exists() and read_comparison(kept).cells[0].repeats:
            break
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    _, alive = psutil.wait_procs(family, timeout=120)
    assert not alive
    shown, ended = json.loads(output[: output.index("\n}\n") + 2]), output.splitlines()[-1]
    assert json.loads(ended)["exit_code"] == 130
    assert shown["finished"] is False
    assert len(shown["cells"][0]["repeats"]) == 1
    assert (tmp_path / "out" / "comparison.csv").exists()

    (tmp_path / "wait").unlink()
    (tmp_path / "small.json").write_text(json.dumps({**spec, "global_batch_size": 4}))
    code, _, errors = compared(*arguments, "--resume", "out", folder=tmp_path)
    assert code == 2
    assert "spec.global_batch_size was 8, now 4" in errors
    (tmp_path / "small.json").write_text(json.dumps(spec))
    code, _, errors = compared(*arguments, "--resume", "out", folder=tmp_path)
    assert code == 0, errors
    comparison = read_comparison(tmp_path / "out")
    first, second = comparison.cells[0].repeats
    assert first.block_seconds == shown["cells"][0]["repeats"][0]["block_seconds"]
    assert second.order == 1
    assert comparison.finished


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment that has isotrain and no framework."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "env", symlinks=True)
    packages = folder / "packages"
    packages.mkdir()
    for name in BARE_NEEDS:
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "bare.pth").write_text(f"{packages}\n{Path(isotrain.__file__).parents[1]}\n")
    return str(folder / "env" / "bin" / "python")


def test_a_backend_runs_in_its_own_interpreter(tmp_path: Path, bare_python: str) -> None:
    write_spec(tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    check = "import importlib.util as u; assert not any(map(u.find_spec, ('torch', 'keras')))"
    subprocess.run([bare_python, "-c", check], check=True, env=environment)
    arguments = ["--backend=torch-ddp", "--backend=tf-mirrored", *QUICK, "--output", "out"]
    arguments += ["--interpreter", f"torch-ddp={sys.executable}"]
    process = started(arguments, tmp_path, bare_python)
    _, errors = process.communicate(timeout=250)
    assert process.returncode == 1, errors
    own, missing = read_comparison(tmp_path / "out").cells
    assert own.status == "finished", own.reason
    assert own.python == sys.executable
    assert own.samples_per_s is not None
    assert "torch" in own.versions
    assert missing.status == "failed"
    assert "not installed" in str(missing.reason)


def test_objects_are_refused_with_another_interpreter(tmp_path: Path) -> None:
    def here() -> Any:
        raise AssertionError("never called")

    comparison = isotrain.compare(
        {**SPEC, "model": here, "data": "json:loads"},
        backends=["torch-ddp"],
        interpreters={"torch-ddp": sys.executable},
        output=tmp_path / "out",
    )
    assert comparison.cells[0].status == "failed"
    assert "received an object, which cannot be sent" in str(comparison.cells[0].reason)
