"""`parity --bits` finds the first step and tensor with other bits, and counts them."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.session_specs import spec

import isotrain
from isotrain.analysis.parity import text
from isotrain.analysis.parity.bit_trace import distance, stage_differences
from isotrain.analysis.parity.targets import ParityTarget
from isotrain.analysis.parity.trace_runner import TraceRunner
from isotrain.core.cli.main import main

STRATEGIES = ["data-parallel", {"name": "sharded", "options": {"stage": 2}}]

pytestmark = pytest.mark.usefixtures("reference")


def compared(**fields: Any) -> Any:
    options: dict[str, Any] = fields.pop("options", {"replicas": [1, 3]})
    chosen = spec(precision="float32", optimizer={"name": "adam", "lr": 0.0625}, **fields)
    return isotrain.parity(chosen, backends="reference", bits=True, quiet=True, **options)


@pytest.mark.slow
def test_runs_with_the_same_bits_agree(tmp_path: Path) -> None:
    options = {"replicas": [3, 1], "strategies": STRATEGIES, "output": tmp_path / "out"}
    found = compared(reproducible="bits", options=options)
    assert (found.verdict, found.reference) == ("agree", "reference@3 data-parallel")
    assert [run.status for run in found.runs] == ["reference", "equal", "equal", "equal"]
    assert found.steps == list(range(9))
    assert not any(run.notes for run in found.runs)
    assert json.loads((tmp_path / "out/parity.json").read_text())["verdict"] == "agree"
    assert "Noise floor" not in text.result(found)
    for page in ((tmp_path / "out/report.html").read_text(), found._repr_html_()):
        assert "Noise floor" not in page


STAGE_3 = {"name": "sharded", "options": {"stage": 3}}


def compared_shards(backend: str = "torch-ddp", **options: Any) -> Any:
    chosen = spec(
        precision="float32", optimizer={"name": "adam", "lr": 0.0625}, reproducible="bits"
    )
    return isotrain.parity(chosen, backends=backend, steps=3, bits=True, quiet=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["torch-ddp", pytest.param("tf-multiworker", marks=pytest.mark.features)]
)
def test_shards_of_weights_are_compared_with_those_of_other_processes(backend: str) -> None:
    """The reference has shards of three processes; the others have whole weights, or shards of two."""
    found = compared_shards(backend, replicas=[3, 2], strategies=[STAGE_3, "data-parallel"])
    assert [run.status for run in found.runs] == ["reference", "equal", "equal", "equal"]
    assert not any(run.notes for run in found.runs)


@pytest.mark.slow
def test_a_shard_with_other_bits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process alone: the other one has the shard that is equal."""
    trace_bits = TraceRunner.trace_bits

    def traced(runner: TraceRunner, target: ParityTarget) -> list[dict[str, Any]]:
        ranks = trace_bits(runner, target)
        for file in tmp_path.rglob("bits/1-1.npz"):
            with np.load(file) as archive:
                numbers = {name: archive[name] for name in archive.files}
            shard = numbers["weight/sequential/first/kernel"]
            shard.view(np.uint32).flat[0] ^= 0b101
            np.savez(file, **numbers)
        return ranks

    monkeypatch.setattr(TraceRunner, "trace_bits", traced)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = compared_shards(replicas=2, strategies=[STAGE_3, "data-parallel"])
    (first,) = found.runs[1].divergences
    assert (first.step, first.stage, first.name, first.bits) == (
        1,
        "weight",
        "sequential/first/kernel",
        2,
    )


def test_parts_of_the_model_that_round_otherwise_are_refused() -> None:
    reason = "a process has a part of the layers that are cut"
    with pytest.raises(isotrain.PlanError, match=rf"parity --bits: torch-ddp@2 .*{reason}"):
        isotrain.parity(
            spec(),
            backends="torch-ddp",
            replicas=2,
            bits=True,
            strategies=["tensor", "data-parallel"],
        )


def test_replicas_with_weights_of_their_own_are_compared_by_rank() -> None:
    """Before their first exchange, which neither run reaches."""
    strategies = [{"name": "local-sgd", "options": {"every": every}} for every in (8, 9)]
    options = {"replicas": 2, "strategies": strategies, "steps": 3}
    assert compared(options=options).verdict == "agree"
    with pytest.raises(isotrain.PlanError, match="have weights of their own"):
        compared(options={**options, "replicas": [2, 1]})


def test_booleans_and_unsigned_integers_have_a_difference() -> None:
    for one, other in (
        (np.array([True, False]), np.array([True, True])),
        (np.uint8([1]), np.uint8([2])),
    ):
        found = distance(one, other)
        assert 0.0 < found["difference"] <= 1.0


def test_arrays_of_other_shapes_or_dtypes_differ_in_all_bits() -> None:
    """Also where their bytes are the same."""
    zeros = np.zeros((2, 3), np.float32)
    for other in (zeros.T, zeros.astype(np.int32), zeros[:1]):
        assert stage_differences(3, {"weight/w": other}, {"weight/w": zeros}) == [
            {"step": 3, "stage": "weight", "name": "w", "bits": 192, "difference": math.inf}
        ]
    assert not stage_differences(3, {"weight/w": zeros.copy()}, {"weight/w": zeros})


def test_what_only_one_run_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the runs were of two backends, one of which counts its steps."""
    trace_bits = TraceRunner.trace_bits

    def traced(runner: TraceRunner, target: ParityTarget) -> list[dict[str, Any]]:
        ranks = trace_bits(runner, target)
        for rank in ranks if target.replicas == 3 else ():
            rank["names"] = [*rank["names"], "state/counter"]
            rank["expected"] = [*rank["expected"], "optimizer/step"]
        return ranks

    monkeypatch.setattr(TraceRunner, "trace_bits", traced)
    found = compared(reproducible="bits")
    assert found.verdict == "agree"
    assert found.runs[1].notes == [
        "not compared, because the reference has none: state/counter",
        "not compared, because the run has none: optimizer/step",
    ]
    assert "the reference has none: state/counter" in text.result(found)


def test_the_first_tensor_with_other_bits_is_named(tmp_path: Path) -> None:
    """Replicas sum in another order: the bits are those of the weights that runs of one step end with."""
    found = compared()
    (reference, run) = found.runs
    assert (found.verdict, run.status, run.first.step, run.first.stage) == (
        *("difference", "difference"),
        *(0, "weight"),
    )
    chosen = spec(
        precision="float32", optimizer={"name": "adam", "lr": 0.0625}, steps=1, epochs=None
    )
    ends = [
        isotrain.run(
            *(chosen,),
            backend="reference",
            replicas=count,
            output=tmp_path / str(count),
            on_event=lambda event: None,
        ).weights
        for count in (1, 3)
    ]
    bits = {
        name: (
            int.from_bytes(weight.tobytes()) ^ int.from_bytes(ends[1][name].tobytes())
        ).bit_count()
        for name, weight in ends[0].items()
    }
    expected = {name: count for name, count in bits.items() if count}
    assert {each.name: each.bits for each in run.divergences} == expected
    assert "the spec does not say `reproducible: bits`." in run.notes
    assert f"{run.first.bits} bit" in text.result(found)
    assert reference.first is None


def test_what_has_no_bits_in_common_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(isotrain.PlanError, match="one framework, received tensorflow and torch"):
        isotrain.parity(spec(), backends=["torch-ddp", "tf-mirrored"], bits=True)
    with pytest.raises(isotrain.PlanError, match="Leave --map out"):
        compared(options={"replicas": [1, 2], "map": {}})
    assert main(["parity", str(tmp_path), str(tmp_path), "--bits"]) != 0
    assert "a trace has fingerprints" in capsys.readouterr().err
