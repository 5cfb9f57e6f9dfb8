"""`parity` finds and names what is planted, raises no alarm where nothing is, and says it clearly."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.in_process import command
from integration import parity_cases as cases

import isotrain
from isotrain.analysis.parity.divergence import RunVerdict, judge
from isotrain.analysis.parity.noise_floor import NoiseFloor, NoiseRun, scale_between
from isotrain.analysis.parity.run_trace import RunTrace, assemble_trace
from isotrain.core.plugins import selection
from isotrain.core.spec.loading import load_spec
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS
from isotrain.testing.launching import try_run

ROOT = Path(__file__).parents[2]
PLANTED = {
    "parting-sum-for-mean": ("reduced", "sum-instead-of-mean", 0),
    "parting-clipping-before-reduction": ("reduced", "clipping-before-reduction", 0),
    "parting-batch-norm-not-synced": ("state", "batch-norm-not-synced", 0),
    "parting-duplicated-padding": ("gradient", "duplicated-padding", 3),
    "parting-padded-steps": ("reduced", "duplicated-padding", 3),
    "parting-epsilon-elsewhere": ("weight", "epsilon-elsewhere", 0),
    "parting-dropout-streams": ("gradient", "dropout-streams", 0),
    "parting-float64-in-float32": ("gradient", "float64-in-float32", 0),
}
"""Backend to the stage, the cause and the step that must be named."""


@functools.cache
def planted() -> dict[str, RunTrace]:
    """The run as it is and with each fault in float64, and as it is in float32; in one launch."""
    spec = {**cases.faulty_spec("float64"), "timeouts": LONG_TIMEOUTS}
    with selection.using(["plugins.diverging_backends"], []):
        run = try_run(cases.trace_faults, spec, "torch-ddp", 2)
    assert run.failure is None, run.failure
    ranks = run.returned
    return {name: assemble_trace(name, [rank[name] for rank in ranks]) for name in ranks[0]}


def judged(runs: dict[str, RunTrace], name: str) -> RunVerdict:
    spec = load_spec(cases.faulty_spec("float64"))
    right, other = runs["right"], runs["float32"]
    floor = NoiseFloor(right, [NoiseRun(other, scale_between(other, right))])
    return judge(spec, runs[name], right, floor, other, lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize("backend", PLANTED)
def test_a_planted_fault_is_found_and_named(backend: str) -> None:
    found = judged(planted(), backend)
    stage, code, step = PLANTED[backend]
    assert found.status == "difference"
    assert found.first is not None
    assert (found.first.stage, found.first.step) == (stage, step)
    assert [cause.code for cause in found.causes] == [code], found.causes
    assert all(cause.evidence and cause.advice for cause in found.causes)


@functools.cache
def clean() -> list[list[RunTrace]]:
    """The traces of every clean spec: those to compare with, and of the other framework the last."""
    traced = [
        launched(cases.references, "torch-ddp", 1),
        launched(cases.others, "tf-mirrored", 2),
    ]
    return [
        [assemble_trace(str(number), [trace]) for trace in (*references, *others)]
        for number, (references, others) in enumerate(zip(*traced, strict=True))
    ]


def launched(work: Callable[[isotrain.Session], Any], backend: str, replicas: int) -> Any:
    """What the first process returns."""
    run = try_run(work, {**cases.spec(), "timeouts": LONG_TIMEOUTS}, backend, replicas)
    assert run.failure is None, run.failure
    return run.returned[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(cases.CLEAN)))
def test_equal_runs_are_no_finding(number: int) -> None:
    """It holds without float64 too."""
    reference, *noise, run = clean()[number]
    assert run.replicas == cases.CLEAN[number][0]
    floor = NoiseFloor(
        reference, [NoiseRun(other, scale_between(other, reference)) for other in noise]
    )
    spec = load_spec(cases.CLEAN[number][1])
    found = judge(spec, run, reference, floor, None, lambda: None)
    assert found.status in ("equal", "rounding"), found


SPEC = """
name: parity
model: integration.parity_cases:dense
data: integration.parity_cases:data
objective: integration.parity_cases:objective
optimizer: {name: adam, lr: 0.0078125, epsilon: 0.0001220703125}
global_batch_size: 8
epochs: 1
threads: 1
"""


@pytest.mark.slow
def test_a_difference_is_confirmed_in_float64(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC, encoding="utf-8")
    bad = "parting-epsilon-elsewhere"
    done = command(
        *("parity", "spec.yaml", "--backend", "torch-ddp", "--backend", bad, "--steps", "3"),
        *("--plugin", "plugins.diverging_backends", "--output", "out", "--json"),
        folder=tmp_path,
    )
    assert done.returncode == 6, done.stderr
    found = json.loads(done.stdout)
    assert json.loads((tmp_path / "out" / "parity.json").read_text(encoding="utf-8")) == found
    assert len(list((tmp_path / "out" / "fingerprints").iterdir())) == 5
    assert (found["format"], found["verdict"]) == (1, "difference")
    assert [source["failed"] for source in found["noise"]] == [None, None]
    run = found["runs"][1]
    assert (run["name"], run["status"]) == (f"{bad}@1", "difference")
    assert (run["first"]["stage"], run["first"]["step"]) == ("weight", 0)
    assert run["first"]["precision"] == "float64"
    assert run["confirmed"] > 1e-4
    assert run["causes"][0]["code"] == "epsilon-elsewhere"


def linear_model() -> Any:
    import torch

    return torch.nn.Linear(4, 2)


def linear_data() -> Any:
    generator = np.random.default_rng(5)
    return generator.normal(size=(32, 4)), generator.normal(size=(32, 2))


@pytest.mark.slow
def test_runs_under_several_strategies_are_compared() -> None:
    spec = {
        "model": {"torch": linear_model},
        "data": linear_data,
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 8,
        "epochs": 1,
        "precision": "float64",
        "threads": 1,
    }
    local = {"name": "local-sgd", "options": {"every": 2, "start": 2}}
    strategies = ["data-parallel", "hierarchical", local]
    found = isotrain.parity(
        spec, backends=["torch-ddp"], replicas=[2], strategies=strategies, steps=4
    )
    reference, same, diverging = found.runs
    assert (found.verdict, found.reference) == ("difference", "torch-ddp@2 data-parallel")
    assert reference.name == found.reference
    assert (same.name, same.strategy) == ("torch-ddp@2 hierarchical", "hierarchical")
    assert same.status in ("equal", "rounding")
    assert same.plan["strategy"] == "hierarchical"
    assert diverging.name == "torch-ddp@2 local-sgd,every=2,start=2"
    assert diverging.status == "difference"
    assert diverging.first is not None
    assert diverging.first.step == 2
    assert not any("not meant to train" in note for note in same.notes)
    assert any("local-sgd,every=2,start=2 is not meant" in note for note in diverging.notes)


def classified_data() -> tuple[np.ndarray, np.ndarray]:
    inputs, targets = linear_data()
    return inputs, (targets[:, 0] > 0).astype(np.int64)


@pytest.mark.slow
def test_a_note_says_which_means_are_those_of_slices() -> None:
    spec = {
        "model": {"torch": linear_model},
        "data": classified_data,
        "loss": {"name": "torch.nn:CrossEntropyLoss", "ignore_index": 1},
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 8,
        "epochs": 1,
        "threads": 1,
    }
    strategies = ["data-parallel", "parameter-server"]
    found = isotrain.parity(
        spec, backends=["torch-ddp"], replicas=[2], strategies=strategies, steps=1
    )
    reference, parameter_server = found.runs
    assert parameter_server.plan["strategy"] == "parameter-server"
    assert any(
        "on the workers of a parameter-server run" in note for note in parameter_server.notes
    )
    assert not any("targets have different weights" in note for note in reference.notes)


NATIVE = """
name: native
model: {torch: "digits_native:torch_model", tensorflow: "digits_native:tensorflow_model"}
data: digits:data
loss: {name: sparse_categorical_crossentropy, from_logits: true}
optimizer: {name: sgd, lr: 0.125, momentum: 0.875}
global_batch_size: 64
epochs: 1
threads: 1
"""


@pytest.mark.slow
@pytest.mark.usefixtures("digits_at_hand")
def test_native_models_agree_by_a_map_of_names(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(NATIVE, encoding="utf-8")
    names = str(ROOT / "examples" / "digits_native_names.yaml")
    backends = ("--backend", "torch-ddp", "--backend", "tf-mirrored")
    asked = ("spec.yaml", *backends, "--map", names, "--steps", "3")
    done = command("parity", *asked, folder=tmp_path, path=[ROOT / "examples"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("AGREE: tf-mirrored@1 trains like torch-ddp@1")
    assert "run 4: tf-mirrored@1" in done.stderr
