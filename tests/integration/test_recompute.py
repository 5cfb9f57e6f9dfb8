"""Layers that are computed again in the backward pass train as if they were kept, in less memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from integration import recomputed_models as models

import isotrain
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, next_session
from isotrain.testing.launching import try_run
from isotrain.testing.native_equality import train

pytestmark = [
    pytest.mark.features,
    pytest.mark.filterwarnings("ignore:Layer 'block' .* was passed an input with a mask"),
]

BASE: dict[str, Any] = {
    "model": models.portable,
    "data": models.data,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "optimizer": "adam",
    "precision": "float64",
    "global_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "epochs": 2,
    "threads": 1,
    "capture": False,  # a record computes with other operations
    "timeouts": LONG_TIMEOUTS,
}
NATIVE = {"torch": models.of_torch, "tensorflow": models.of_tensorflow}
IN_PARTS = {"name": "sharded", "options": {"stage": 3, "bucket_megabytes": 2e-4}}
EXCHANGING: dict[str, dict[str, Any]] = {
    "local-sgd": {"every": 2},
    "gossip": {},
    "compressed": {"method": "topk", "ratio": 0.25},
    "hierarchical": {"host_size": 1},
}
"""Strategies with steps of their own."""
BLOCKS = {"recompute": "blocks.*"}
TRAINED: dict[str, dict[str, Any]] = {
    "kept": {},
    "every": {"recompute": "*"},
    "some": {"recompute": ["attention", "block/dense*"]},
    "in-parts": {"recompute": "*", "strategy": IN_PARTS},
    "mixed-kept": {"precision": "bfloat16"},
    "mixed": {"precision": "bfloat16", "recompute": "*"},
    "native-kept": {"model": NATIVE, "gradient_accumulation_steps": 1},
    "native": {"model": NATIVE, "gradient_accumulation_steps": 1, **BLOCKS},
    **{
        f"{strategy}{kept}": {
            "model": NATIVE,
            "gradient_accumulation_steps": 1,
            "epochs": 1,
            "strategy": {"name": strategy, "options": options},
            **again,
        }
        for strategy, options in EXCHANGING.items()
        for kept, again in {"-kept": {}, "": BLOCKS}.items()
    },
}
COMPARED = {
    "every": "kept",
    "some": "kept",
    "in-parts": "kept",
    "mixed": "mixed-kept",
    "native": "native-kept",
    **{strategy: f"{strategy}-kept" for strategy in EXCHANGING},
}
TRIED = {"torch-ddp": tuple(TRAINED), "tf-multiworker": ("kept", "every", "native-kept", "native")}
"""All where that is quick."""
SIZES = {"torch-ddp": (2, 8), "tf-multiworker": (1, 6)}
"""Replicas, and a global batch, which leaves a smaller one where that is not traced anew.

TensorFlow's optimizer of graphs folds most away where nothing is exchanged.
"""
WIDE = {
    **BASE,
    "model": models.deep,
    "data": models.wide_data,
    "precision": "float32",
    "optimizer": {"name": "sgd", "lr": 0.125},
    "global_batch_size": 1024,
    "gradient_accumulation_steps": 1,
    "epochs": 1,
}
DEEP = {"model": {"torch": models.deep}, "model_args": {"native": True}}
"""The like as torch's own modules."""


def work(session: isotrain.Session) -> dict[str, Any]:
    """Trains all, and looks how much is alive with and without; a run's work."""
    found: dict[str, Any] = {}
    base = {**BASE, "global_batch_size": session.plan.global_batch_size}
    for name in TRIED[session.plan.backend]:
        with next_session(session, name, {**base, **TRAINED[name]}) as session:
            found[name] = train(session)
    measured = {"bytes": {}, **({"native-bytes": DEEP} if "mixed" in found else {})}
    for name, given in measured.items():
        for kept, again in {"-kept": {}, "": {"recompute": "*"}}.items():
            with next_session(session, name + kept, {**WIDE, **given, **again}) as session:
                found[name + kept] = models.peak_bytes(session)
    return found


@pytest.fixture(scope="module", params=["torch-ddp", "tf-multiworker"])
def found(request: pytest.FixtureRequest, monkeypatch_module: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param != "torch-ddp":
        monkeypatch_module.setenv("TF_CPU_ALLOCATOR_USE_BFC", "1")  # which counts
    replicas, size = SIZES[request.param]
    run = try_run(work, {**BASE, "global_batch_size": size}, request.param, replicas)
    assert run.failure is None, run.failure
    return {"bits": request.param == "torch-ddp", **run.returned[-1]}


@pytest.fixture(scope="module")
def monkeypatch_module() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.kernels
def test_recomputed_layers_train_as_others(found: dict[str, Any]) -> None:
    """Dropout is the same, and statistics move once; on torch it is the same to the bit."""
    for name, kept in COMPARED.items():
        if name in found:
            bound = 0.0 if found["bits"] and name != "in-parts" else 1e-12
            assert_near(found[name], found[kept], bound, name)


def assert_near(again: dict[str, Any], once: dict[str, Any], bound: float, what: str) -> None:
    np.testing.assert_allclose(again["loss"], once["loss"], rtol=bound, atol=0, err_msg=what)
    assert again["weights"].keys() == once["weights"].keys()
    for name, value in once["weights"].items():
        np.testing.assert_allclose(
            again["weights"][name], value, rtol=bound, atol=bound, err_msg=f"{what}: {name}"
        )


def test_recomputing_saves_memory(found: dict[str, Any]) -> None:
    """Of eight blocks of three layers, only the inputs and one block's activations are alive."""
    for name in ("bytes", "native-bytes"):
        if name in found:
            assert found[name] < 0.7 * found[f"{name}-kept"], name


def refused(changes: dict[str, Any], backend: str) -> str:
    run = try_run(take_a_step, {**BASE, **changes}, backend, 1)
    run.forget()
    assert run.failure is not None
    return run.failure


def take_a_step(session: isotrain.Session) -> None:
    session.step(next(iter(session.batches())))


def test_a_pattern_without_a_layer_is_an_error_with_the_names() -> None:
    told = refused({"recompute": ["block", "blok*"]}, "torch-ddp")
    assert "'blok*' fits none" in told
    assert "attention, " in told
    assert "block/dropout" in told
    native = refused({"model": NATIVE, "recompute": "block"}, "torch-ddp")
    assert "blocks.0, " in native
    assert "blocks, " not in native


def test_a_random_layer_without_a_generator_is_refused() -> None:
    told = refused({"model": models.drawing, "recompute": "block"}, "torch-ddp")
    assert "block moves variables that are not its own" in told


def test_plan_says_that_steps_are_not_replayed() -> None:
    spec = {**BASE, "capture": True, "recompute": "*"}
    (note,) = isotrain.measured_plan(spec, backend="torch-ddp", replicas=1).notes
    assert note.startswith("training steps are not replayed")
    assert "`recompute`" in note
