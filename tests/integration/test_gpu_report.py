"""The report of checks on GPUs, made on the CPU: its processes, verdicts and file are the real ones."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from helpers.stand_in_nvml import StandInNvml

from isotrain.testing import gpu_report
from isotrain.testing.gpu_speed import ahead, bound_of_native, judged

pytestmark = pytest.mark.features


SKIPPED_ON_CPUS = {"copies", "conformance-nccl"}


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_makes_all_checks_on_cpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that seems to have two GPUs: the report shows them, and no check takes them."""
    gpus = "gpu 0 GPU-1 143771 NVIDIA H200\ngpu 0 GPU-2 143771 NVIDIA H200\n"
    StandInNvml(monkeypatch, tmp_path).becomes(f"driver 580.159.04\n{gpus}")
    path, folder = tmp_path / "report.json", tmp_path / "current"
    folder.mkdir()
    monkeypatch.chdir(folder)
    code = gpu_report.main(["--device", "cpu", "--output", str(path)])
    report = json.loads(path.read_text())
    verdicts = {name: each["verdict"] for name, each in report["checks"].items()}
    assert verdicts == {
        name: "skipped" if name in SKIPPED_ON_CPUS else "passed" for name in gpu_report.CHECKS
    }, {name: each.get("error") for name, each in report["checks"].items()}
    assert code == 0
    assert report["machine"]["cards"] == 2 * ["NVIDIA H200, 140.4 GiB"]
    assert report["machine"]["versions"]["torch"]
    assert report["machine"]["commit"]
    others = report["checks"]["parity-of-backends"]["figures"]
    assert all(isinstance(each, float) for each in others.values()), others
    for times in report["checks"]["speed"]["figures"].values():
        for kind in ("native", "portable"):
            found, verdicts_of_speed = times[kind], ("reached", "open", "missed")
            assert found["verdict"] in verdicts_of_speed
            assert found["ms"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in gpu_report.CHECKS)
    assert not [*folder.iterdir()], "the current folder may be somebody else's"


def test_a_check_that_takes_too_long_fails_with_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves no folder, and is no failure where it had less than its own time."""
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    limits = {**gpu_report.CHECKS, "precision": (gpu_report.precision, 1)}
    monkeypatch.setattr(gpu_report, "CHECKS", limits)
    path = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--output", str(path), "--check", "precision"]
    assert gpu_report.main(arguments) == 1
    outcome = json.loads(path.read_text())["checks"]["precision"]
    assert outcome["verdict"] == "failed"
    assert "no end after 1 s" in outcome["error"]
    assert '\n  File "' in outcome["error"], (
        "the stack, whose first lines are left out if it is long"
    )
    monkeypatch.setattr(gpu_report, "CHECKS", {"precision": (gpu_report.precision, 240)})
    assert gpu_report.main([*arguments, "--minutes", "0.02"]) == 0
    outcome = json.loads(path.read_text())["checks"]["precision"]
    assert outcome["verdict"] == "skipped"
    assert "in the 1 s that were left; --minutes gives more" in outcome["figures"]["skipped"]
    assert not [*folders.glob("isotrain-gpu-report-*")]


def test_checks_for_which_no_time_is_left_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--output", str(path), "--check", "precision"]
    assert gpu_report.main([*arguments, "--minutes", "0"]) == 0
    outcome = json.loads(path.read_text())["checks"]["precision"]
    assert outcome["verdict"] == "skipped"
    assert "--minutes" in outcome["figures"]["skipped"]
    # the others leave time for `speed`, and no check goes on after the end
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    names = ["precision", "speed"]
    assert gpu_report.limit_of("precision", 1230.0, names) == 30
    assert gpu_report.limit_of("speed", 1230.0, names) == 230
    assert gpu_report.limit_of("precision", 1230.0, ["precision"]) == 230
    assert gpu_report.limit_of("precision", 9999.0, names) == 240
    nvml = StandInNvml(monkeypatch, tmp_path)
    for gpus, minutes in ((1, 10), (2, 20)):
        lines = "".join(f"gpu 0 GPU-{n} 143771 NVIDIA H200\n" for n in range(gpus))
        nvml.becomes(f"driver 580.159.04\n{lines}")
        assert gpu_report.deadline_of(None, "gpu") == 1000 + 60 * minutes
    assert gpu_report.deadline_of(None, "cpu") == math.inf


def test_times_are_judged_by_the_goals() -> None:
    """Reached by the median; missed where all rounds are above the goal; open between."""
    by_hand = [10.0, 10.0, 20.0]
    verdicts = {
        factors: judged([f * each for f, each in zip(factors, by_hand, strict=True)], by_hand, 1.02)
        for factors in ((1.01, 1.02, 1.5), (1.0, 1.03, 1.04), (1.03, 1.03, 1.5))
    }
    assert [each["verdict"] for each in verdicts.values()] == ["reached", "open", "missed"]
    assert [each["ratio"] for each in verdicts.values()] == [1.02, 1.03, 1.03]
    assert bound_of_native(1.0) == 1.02
    assert bound_of_native(0.1) == pytest.approx(1.2)


def test_the_loop_by_hand_gets_its_batches_ahead() -> None:
    made = [threading.Event() for _ in range(5)]

    def batches() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    found = []
    for batch in ahead(batches()):
        found.append(batch)
        assert all(event.wait(60) for event in made[batch : batch + 3])
    assert found == [*range(5)]


def test_the_versions_of_torch_are_those_of_the_requirements() -> None:
    requirement = next(r for r in metadata.requires("isotrain") or () if r.startswith("torch"))
    found = requirement.partition(";")[0].strip()
    assert sorted(found[5:].split(",")) == sorted(gpu_report.TORCH[5:].split(","))
    for version, is_refused in (("2.10.2", True), ("2.11.0+cu130", False), ("2.15.0", False)):
        assert (gpu_report.reason_for_old_torch({"version": version}) is not None) == is_refused


_OLD_TORCH = """
class Everything:
    def __getattr__(self, name): return self
    def __call__(self, *arguments): return None
__version__ = "2.4.1+cu121"
version = backends = cuda = Everything()
version.cuda, version.hip = "", None
"""


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_an_old_torch_is_refused_before_anything_starts(tmp_path: Path, device: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(_OLD_TORCH)
    ended = report_with_modules_of(tmp_path, "--device", device, "--output", "report.json")
    assert ended.returncode == 2, ended.stderr
    told = (
        "No check is made: torch 2.4.1+cu121 was found, which is older than isotrain takes"
        f" ({gpu_report.TORCH}). Install one of these: pip install '{gpu_report.TORCH}'"
    )
    assert ended.stderr.strip().splitlines()[-1] == told
    assert "begins" not in ended.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["checks"], report["why_no_gpu"]) == ({}, None)
    assert report["why_no_check"] in told


def report_with_modules_of(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The report in a process of its own, as this one has imported torch; `folder` may have another one."""
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    return subprocess.run(
        (sys.executable, "-m", "isotrain.testing.gpu_report", "--check", "precision", *arguments),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_cards_are_those_of_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where no `nvidia-smi` is installed, as in many containers."""
    StandInNvml(monkeypatch, tmp_path).becomes(
        "driver 580.159.04\ngpu 0 GPU-1 143771 NVIDIA H200\ngpu 15 GPU-2 143771 NVIDIA H200\n"
    )
    machine = gpu_report.machine()
    assert machine["cards"] == ["NVIDIA H200, 140.4 GiB"]
    assert (machine["nvidia_driver"], machine["gpu_faults"]) == ("580.159.04", "GPU 1: GPU is lost")


def test_without_a_gpu_no_check_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert gpu_report.main(["--check", "precision", "--output", str(path)]) == 2
    reason = f"torch {torch.__version__} is a build without CUDA"
    assert f"torch can use no GPU here: {reason}" in capsys.readouterr().err
    report = json.loads(path.read_text())
    assert report["checks"] == {}
    assert report["why_no_gpu"] == reason


def test_a_torch_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    """As one whose CUDA libraries are of another version."""
    (tmp_path / "torch").mkdir()
    text = "raise ImportError('libcudart.so.99: cannot open shared object file')"
    (tmp_path / "torch" / "__init__.py").write_text(text)
    ended = report_with_modules_of(tmp_path)
    assert ended.returncode == 2
    assert "libcudart.so.99: cannot open shared object file" in ended.stderr


def test_what_was_made_before_ctrl_c_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str, device: str, limit: float) -> dict[str, object]:
        if name == "resume":
            raise KeyboardInterrupt
        return {"verdict": "passed", "seconds": 1.0, "figures": {}}

    monkeypatch.setattr(gpu_report, "in_process", interrupted)
    arguments = ["--device", "cpu", "--check", "precision", "--check", "resume"]
    assert gpu_report.main([*arguments, "--output", str(tmp_path / "report.json")]) == 130
    assert "precision" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError):  # at once
        gpu_report.main([*arguments, "--output", str(tmp_path / "none" / "report.json")])
