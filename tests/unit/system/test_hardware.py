"""What the machine has is found out without any framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.core.system import hardware


def test_the_smallest_visible_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *--id=1) echo 81559;; *) echo 81559; echo 24564;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.gpu_memory_bytes({}) == 24564 * 2**20
    assert hardware.gpu_memory_bytes({"CUDA_VISIBLE_DEVICES": "1"}) == 81559 * 2**20
    tool.write_text("#!/bin/sh\necho '[N/A]'\n")
    assert hardware.gpu_memory_bytes({}) is None
    tool.unlink()
    assert hardware.gpu_memory_bytes({}) is None
