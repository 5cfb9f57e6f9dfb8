"""Parity between runs that a launcher starts."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from integration.scheduler_launchers import SPEC

import isotrain
from isotrain.analysis.parity import trace_runner as parity_tracer
from isotrain.analysis.parity.targets import ParityTarget
from isotrain.analysis.parity.trace_runner import TraceRunner
from isotrain.core.contracts.launcher import LauncherChoice
from isotrain.core.plugins.manager import plugin_manager

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reference", "wrapper")]

WANTED = ParityTarget(
    "reference",
    1,
    "data-parallel",
    "reference@1",
    isotrain.load_spec(SPEC),
    LauncherChoice("wrapper"),
)


def tracer_of(output: Path | None) -> TraceRunner:
    return TraceRunner(plugin_manager(()), WANTED, 2, {}, output, print)


def test_parity_runs_use_a_launcher(tmp_path: Path) -> None:
    """The second run starts from the first one's weights, in another precision."""
    tracer, spec = tracer_of(tmp_path / "kept"), WANTED.spec
    with tracer.running():
        first = tracer.trace(WANTED, spec.replace(precision="float32"), "the reference")
        second = tracer.trace(WANTED, spec, "again")
    assert first.plan["launcher"] == second.plan["launcher"] == "wrapper"
    assert second.start == first.start != second.initializer_start
    assert [step.loss for step in second.steps] == pytest.approx(
        [step.loss for step in first.steps], rel=1e-5
    )
    assert len(sorted((tmp_path / "kept" / "fingerprints").iterdir())) == 2


def test_an_unwritable_parity_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, f"no space for {path.name}")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "touch", full)
        refused = pytest.raises(isotrain.PlanError, match=r"no space for marker.*Give --output")
        with refused, tracer_of(tmp_path / "kept").running():
            pass
    assert not [*(tmp_path / "kept").iterdir()]
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    refused = pytest.raises(isotrain.PlanError, match="the current folder cannot be written")
    with refused, tracer_of(None).running():
        pass


@pytest.mark.parametrize("error", [isotrain.RunFailedError, isotrain.PlanError])
def test_files_of_a_failed_parity_run_are_kept(
    error: type[isotrain.IsotrainError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(*args: Any) -> None:
        (args[-1].path / "rank-0.log").write_text("said last")
        raise error("failed")

    monkeypatch.setattr(parity_tracer, "run_job", run_job)
    tracer = tracer_of(tmp_path)
    with pytest.raises(error, match="failed"), tracer.running():
        tracer.trace(WANTED, WANTED.spec, "")
    (log,) = tmp_path.glob("isotrain-parity-*/1/rank-0.log")
    assert log.read_text() == "said last"
