"""The report of checks on GPUs, made on the CPU: its processes, verdicts and file are the real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.stand_in_nvml import StandInNvml

from isotrain.testing import gpu_report

pytestmark = pytest.mark.features


def test_makes_checks_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks pass or are skipped, one that takes too long fails with its stack, and all are written."""
    limits = {**gpu_report.CHECKS, "precision": (gpu_report.precision, 1)}
    monkeypatch.setattr(gpu_report, "CHECKS", limits)
    names = ("native-equality", "copies", "conformance-nccl", "precision", "parity-of-backends")
    arguments = [part for name in names for part in ("--check", name)]
    report = tmp_path / "report.json"
    code = gpu_report.main(["--device", "cpu", "--output", str(report), *arguments])
    checks = json.loads(report.read_text())["checks"]
    verdicts = {name: checks[name]["verdict"] for name in names}
    assert verdicts == {
        "native-equality": "passed",
        "copies": "skipped",
        "conformance-nccl": "skipped",
        "precision": "failed",
        "parity-of-backends": "passed",
    }
    assert "no end after 1 s" in checks["precision"]["error"]
    assert "most recent call first" in checks["precision"]["error"]
    assert code == 1
    assert "native-equality" in capsys.readouterr().out


def test_cards_are_those_of_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where no `nvidia-smi` is installed, as in many containers."""
    StandInNvml(monkeypatch, tmp_path).becomes(
        "driver 580.159.04\ngpu 0 GPU-1 143771 NVIDIA H200\ngpu 15 GPU-2 143771 NVIDIA H200\n"
    )
    machine = gpu_report.machine()
    assert machine["cards"] == ["NVIDIA H200, 140.4 GiB"]
    assert (machine["nvidia_driver"], machine["gpu_faults"]) == ("580.159.04", "GPU 1: GPU is lost")


def test_without_a_gpu_no_check_begins(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main(["--check", "precision"]) == 2
    assert "torch can use no GPU here" in capsys.readouterr().err


def test_what_was_made_before_ctrl_c_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str, device: str) -> dict[str, object]:
        if name == "resume":
            raise KeyboardInterrupt
        return {"verdict": "passed", "seconds": 1.0, "figures": {}}

    monkeypatch.setattr(gpu_report, "in_process", interrupted)
    arguments = ["--device", "cpu", "--check", "precision", "--check", "resume"]
    assert gpu_report.main([*arguments, "--output", str(tmp_path / "report.json")]) == 130
    assert "precision" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError):  # at once
        gpu_report.main([*arguments, "--output", str(tmp_path / "none" / "report.json")])
