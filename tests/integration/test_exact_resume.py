"""Runs that go on from the state of others, to the bit: what the conformance kit's own models do not have."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from integration import native_resume_models, portable_resume_models

import isotrain
from isotrain.testing import reference_model
from isotrain.testing.check_context import assert_same
from isotrain.testing.checks import resume as resume_checks

pytestmark = pytest.mark.features

OBJECTIVE = f"{Path(__file__).with_name('noisy_objective.py')}:objective"
SCALED = {"precision": "float16", "loss_scale": {"initial": 1024.0, "growth_steps": 4}}
NATIVE: dict[str, dict[str, Any]] = {
    "adam": {},
    "momentum": {"optimizer": {"name": "sgd", "lr": 0.0625, "momentum": 0.5}},
    "without slots": {"optimizer": {"name": "sgd", "lr": 0.0625}},
    "own optimizer": {"optimizer": {"custom": native_resume_models.counting, "lr": 0.0625}},
    "lamb, accumulated": {
        "optimizer": {"name": "lamb", "lr": 0.0625},
        "gradient_accumulation_steps": 2,
    },
    "float16": SCALED,
    "bfloat16": {"precision": "bfloat16"},
}
"""Changes of the spec with a native model, by name."""
PORTABLE: dict[str, dict[str, Any]] = {
    "a metric that is made late": {
        "model": portable_resume_models.small,
        "metrics": ["r2_score", "mean_absolute_error"],
    },
    "two outputs, at a falling rate": {
        "optimizer": {"custom": portable_resume_models.falling, "lr": 2.0**-5},
        "model": portable_resume_models.two_outputs,
        "data": portable_resume_models.two_targets,
        "loss": dict.fromkeys(("near", "far"), "mean_squared_error"),
        "metrics": {name: ["mean_absolute_error"] for name in ("near", "far")},
    },
    "seeds of no layer": {
        "model": portable_resume_models.small,
        "loss": None,
        "objective": OBJECTIVE,
    },
}
TWICE_ADDED = f"{Path(__file__).with_name('double_update_metrics.py')}:"
REPLAYED: dict[str, dict[str, Any]] = {
    "convolutions": {},
    "a metric that is recorded late": {
        "metrics": [{"name": f"{TWICE_ADDED}TwiceAdded", "late": True}]
    },
    "a metric that was left out": {"metrics": [f"{TWICE_ADDED}Counting", "mean_absolute_error"]},
}
"""Where a record rounds otherwise than Keras."""
MIRRORED = "tf-mirrored"
SEVERAL: dict[str, tuple[str, dict[str, Any]]] = {
    "local-sgd, momenta": ("local-sgd", {"every": 3, "average_momenta": True}),
    "compressed, topk": ("compressed", {"method": "topk", "ratio": 0.1}),
    "elastic-averaging": ("elastic-averaging", {"every": 3}),
    "diloco": ("diloco", {"every": 3, "bits": 4, "fragments": 2, "overlap": 2}),
}
"""On that backend, where a process has several replicas: one for each kind of what is kept.

With one in each process, `test_resume_backends.py` has them go on.
"""
NATIVE_CELLS = [
    *(("torch-ddp", 2, name) for name in NATIVE),
    ("torch-ddp", 3, "lamb, accumulated"),
    *(("horovod-torch", 2, name) for name in ("lamb, accumulated", "float16")),
]
"""What is exchanged in another way has what comes after the exchange in common."""
Specs = dict[str, Mapping[str, Any]]


def twenty() -> isotrain.DataSet:
    """Four global batches of 5, for which frameworks trace once: a replica has more than the other."""
    return isotrain.DataSet(reference_model.samples(20, noise=0.5))


ONE_SIZE = {"data": twenty, "global_batch_size": 5, "threads": 1}


def several() -> Specs:
    cases = {
        name: resume_checks.strategy_resume_case(*given, MIRRORED)
        for name, given in SEVERAL.items()
    }
    return {name: {**spec, **ONE_SIZE} for name, spec in cases.items()}


def portable(backend: str) -> Specs:
    given = PORTABLE | (REPLAYED if backend == "torch-ddp" else {})
    return {name: portable_resume_models.spec(**changes) for name, changes in given.items()}


@functools.cache
def with_native_models(backend: str, replicas: int) -> dict[str, str]:
    names = [name for *run, name in NATIVE_CELLS if run == [backend, replicas]]
    specs = {name: native_resume_models.spec(**NATIVE[name]) for name in names}
    return resume_checks.problems(specs, backend, replicas)


@functools.cache
def with_portable_models(backend: str) -> dict[str, str]:
    return resume_checks.problems(
        portable(backend) | (several() if backend == MIRRORED else {}), backend
    )


@pytest.mark.kernels
@pytest.mark.parametrize(("backend", "replicas", "name"), NATIVE_CELLS)
def test_native_models(backend: str, replicas: int, name: str) -> None:
    """Three replicas add up gradients in the order in which the other run did."""
    told = with_native_models(backend, replicas)[name]
    assert not told, told


@pytest.mark.parametrize(
    ("backend", "name"),
    [(backend, name) for backend in ("torch-ddp", MIRRORED) for name in portable(backend)],
)
def test_portable_models(backend: str, name: str) -> None:
    told = with_portable_models(backend)[name]
    assert not told, told


@pytest.mark.parametrize("name", SEVERAL)
def test_strategies(name: str) -> None:
    told = with_portable_models(MIRRORED)[name]
    assert not told, told


def test_a_parameter_server() -> None:
    spec = resume_checks.strategy_resume_case("parameter-server", {}, "tf-multiworker")
    (told,) = resume_checks.problems(
        {"parameter-server": {**spec, **ONE_SIZE}}, "tf-multiworker"
    ).values()
    assert not told, told


def test_workers_continue_their_random_generators() -> None:
    spec = native_resume_models.spec(strategy="parameter-server", metrics=["mean_squared_error"])
    (told,) = resume_checks.problems({"parameter-server": spec}, "torch-ddp").values()
    assert not told, told


def test_late_state_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    """A metric that waits for samples creates its sums in a step."""
    changes: dict[str, Any] = {
        "strategy": {"name": "compressed", "options": {"method": "fp16"}},
        "model": portable_resume_models.small,
        "metrics": ["r2_score"],
        "epochs": None,
        "checkpoint": {"every_steps": 6},
    }

    def run() -> isotrain.RunResult:
        return isotrain.run(
            portable_resume_models.spec(**changes, steps=8),
            backend="horovod-tf",
            replicas=2,
            output=tmp_path / "run",
            resume="auto",
            on_event=lambda event: None,
        )

    whole = run()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000000008")
    resumed = run()
    assert_same(dict(resumed.weights), dict(whole.weights), "weights")
    assert resumed.metrics == whole.metrics
    assert resumed.history.loss == whole.history.loss
