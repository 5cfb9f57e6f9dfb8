"""Sharded runs equal data-parallel ones, save shards, and resume in other layouts."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param
from integration import sharded_cases as cases
from integration import sharded_models as models
from integration.sharded_observations import trained_and_sent

from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.plugins import selection
from isotrain.core.plugins.manager import plugin_manager
from isotrain.testing import reference_model
from isotrain.testing.consecutive_sessions import launched_in_turn
from isotrain.testing.launching import try_run

CLOSE = 1e-12
EVERY = tuple(cases.OPTIMIZERS)
STAGES = ("stage 1", "stage 2")
HYBRID = ("hybrid 1", "hybrid 2")
LAST = cases.LAST
TRIED: dict[tuple[str, int], cases.Tried] = {
    ("reference", 2): dict.fromkeys(EVERY, (*STAGES, "hybrid 1")),
    ("reference", 3): dict.fromkeys(EVERY, STAGES),
    ("reference", 4): dict.fromkeys(EVERY, HYBRID),
    ("torch-ddp", 3): {
        "momentum": ("stage 1",),
        cases.BY_NORMS: ("stage 2", "stage 3"),
        LAST: (*STAGES, "stage 3"),
    },
    ("horovod-torch", 2): {},
    ("horovod-torch", 3): {},
    ("horovod-torch", 4): {"momentum": ("hybrid 3",), LAST: ("hybrid 3",)},
    ("horovod-tf", 2): {LAST: ("stage 3",)},
}
"""Backend and replicas to the kinds that are tried with each optimizer: all where that is quick.

`test_it_resumes_as_data_parallel_and_back` has the third stage on `tf-multiworker`, and several hosts; the
conformance kit's momentum is that of portable models in stage 3.
"""
RECOMPUTED = {"torch-ddp": (cases.BY_NORMS,), "horovod-torch": (LAST,), "horovod-tf": (LAST,)}
"""With what sharded runs compute all layers again in the backward pass: where no record would be left out."""
NATIVELY = {
    ("horovod-torch", 2): ("stage 3",),
    ("horovod-torch", 3): ("stage 1", "stage 3"),
    ("horovod-tf", 2): ("stage 2", "stage 3"),
}
"""Kinds that are tried with native models, which have so many weights that what they send is counted.

Those of TensorFlow with the last optimizer: it has no portable model in stage 2.
"""
BESIDES = {
    ("horovod-torch", 2): cases.of_native("bfloat16", ("stage 3",), precision="bfloat16"),
    ("horovod-torch", 4): cases.unusual(),
}
"""What else is tried."""
COUNTED = [param(*run, features=run[0] != "reference") for run in TRIED]
CELLS = [
    param(*cell, features=cell[0] != "reference")
    for cell in (
        ("reference", 2, "stage 1"),
        ("reference", 4, "hybrid 1"),
        ("torch-ddp", 4, "hybrid 3"),
        ("tf-multiworker", 2, "stage 3"),
    )
]
"""What Horovod has a part in is only how parts are exchanged."""


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    with selection.using(["isotrain.testing.reference"], []):
        yield


def base(backend: str) -> dict[str, Any]:
    """Records and second epochs are tried on `torch-ddp`, TensorFlow without samples on Horovod."""
    changes: dict[str, Any] = {}
    if backend.startswith("horovod"):
        changes = {"epochs": 1, "capture": False}
    elif backend == "tf-multiworker":
        changes = {"data": models.full_batches}
    return reference_model.spec(plugin_manager().backend(backend), **changes)


def launched(work: Any, backend: str, replicas: int, strategy: Any) -> list[Any]:
    fields = cases.spec(strategy, base(backend), **cases.OPTIMIZERS[cases.LAST])
    run = try_run(work, fields, backend, replicas)
    assert run.failure is None, run.failure
    return run.returned


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    for kind in ("losses", "metrics", "evaluation", "weights"):
        assert_close(found[kind], expected[kind], f"{what}: {kind}")


def assert_close(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, dict):
        for name, value in expected.items():
            assert_close(found[name], value, f"{what}: {name}")
    elif isinstance(expected, list) and isinstance(expected[0], dict):
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, what)
    else:
        np.testing.assert_allclose(found, expected, rtol=CLOSE, atol=CLOSE, err_msg=what)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "replicas"), COUNTED)
def test_optimizer_sharding_equals_data_parallel(
    backend: str, replicas: int, tmp_path: Path
) -> None:
    tried = TRIED[backend, replicas]
    specs = cases.compared(base(backend), tried, RECOMPUTED.get(backend, ()))
    native = NATIVELY.get((backend, replicas), ())
    if native:
        changes = cases.OPTIMIZERS[LAST] if backend == "horovod-tf" else {}
        specs |= cases.of_native(cases.NATIVE, native, **changes)
    specs |= BESIDES.get((backend, replicas), {})
    work = functools.partial(cases.trained_or_passed_on, folder=str(tmp_path))
    processes = launched_in_turn(specs, work, backend, replicas)
    assert_as_parallel(processes, tried)
    assert_natively_as_parallel(processes, native)
    for found in processes:
        for way, passed_on in found.get(cases.UNUSUAL, {}).items():
            assert_equal(passed_on, found[cases.UNUSUAL]["parallel"], way)
        if (backend, replicas) == ("horovod-torch", 2):
            assert_taken(found[f"{cases.NATIVE}: stage 3"])
            assert_equal(found["bfloat16: stage 3"], found["bfloat16: parallel"], "sums of two")
    for name, kinds in tried.items():
        for found in processes:
            for kind in kinds:
                assert not found[f"{name}: {kind}"]["keeps gradients"], "it has not those of others"
        for kind in kinds:
            size = cases.HOST if kind.startswith("hybrid") else replicas
            for first in range(0, replicas, size):
                shares = [found[f"{name}: {kind}"] for found in processes[first : first + size]]
                assert sum(s["slots"] for s in shares) == processes[0][f"{name}: parallel"]["slots"]
                parts = [part for share in shares for part in share["parts"]]
                times = size if kind.endswith("3") else 1  # each has a part
                assert len(parts) == times * len(set(parts)), "a slot is kept twice"


def assert_natively_as_parallel(
    processes: Sequence[Mapping[str, Any]], kinds: Sequence[str]
) -> None:
    """Memory and traffic are as planned, and sharded state has the same names."""
    for kind in kinds:
        whole = processes[0][f"{cases.NATIVE}: parallel"]
        assert_sent(processes, f"{cases.NATIVE}: {kind}")
        held = [found[f"{cases.NATIVE}: {kind}"]["held"] for found in processes]
        assert sum(held) == whole["held"] * (1 if kind == "stage 3" else len(processes))
        for found in processes:
            own = found[f"{cases.NATIVE}: {kind}"]
            assert_equal(own, whole, kind)
            assert kind != "stage 3" or own["names"] == whole["names"]


def assert_taken(found: Mapping[str, Any]) -> None:
    """A step takes what the plan says, and not a unit more, where the model has eight."""
    unit = models.WIDTH**2 * 8
    assert abs(found["taken"] - found["to be taken"]) < 0.9 * unit, (
        "of weights and of gradients one"
    )


def assert_as_parallel(processes: Sequence[Mapping[str, Any]], tried: cases.Tried) -> None:
    for name, kinds in tried.items():
        for rank, found in enumerate(processes):
            for kind in kinds:
                what = f"{name}: {kind}"
                assert_equal(found[what], found[f"{name}: parallel"], f"{what}, rank {rank}")


def assert_sent(processes: Sequence[Mapping[str, Any]], name: str) -> None:
    """Gradients to those who update, and weights to all: as many bytes as the plan says, on average."""
    promised = processes[0][name]["to be sent"]
    sent = np.mean([found[name]["sent"] for found in processes])
    talk = 0.1 * promised  # of processes that keep in step
    assert 0.9 * promised < sent < 1.1 * promised + talk, name


NATIVE: cases.Tried = {"momentum": ("stage 1",), cases.BY_NORMS: ("hybrid 2",), LAST: HYBRID}
MEASURED = {"stage 1": 4, "stage 2": 4, "hybrid 1": cases.HOST, "hybrid 2": cases.HOST}
"""Kinds of which it is looked at what they take and send, and among how many replicas slots are spread."""


@pytest.fixture(scope="module")
def of_four() -> list[dict[str, Any]]:
    """What four replicas of torch's own models have found in their turns."""
    uneven = cases.native(**cases.UNEVEN, epochs=1)
    specs = {
        **cases.compared(cases.native(epochs=1), NATIVE),
        **cases.measured(MEASURED),
        **{f"uneven, {n}": s for n, s in cases.compared(uneven, {LAST: ("hybrid 3",)}).items()},
    }
    return launched_in_turn(specs, cases.trained_or_measured, "torch-ddp", 4)


@pytest.mark.features
def test_native_torch_models_and_optimizers_are_sharded(of_four: list[dict[str, Any]]) -> None:
    assert_as_parallel(of_four, NATIVE)


@pytest.mark.features
def test_hybrid_sharding_equals_data_parallel(
    of_four: list[dict[str, Any]],
) -> None:
    name = f"uneven, {LAST}"
    assert_as_parallel(of_four, {name: ("hybrid 3",)})
    slots = [found[f"{name}: hybrid 3"]["slots"] for found in of_four]
    for host in (slots[:2], slots[2:]):
        assert sum(host) == of_four[0][f"{name}: parallel"]["slots"]


@pytest.mark.features
@pytest.mark.parametrize(("name", "replicas"), [(cases.WHOLE, 2), ("momentum", 3)])
def test_full_sharding_equals_data_parallel(name: str, replicas: int) -> None:
    base = cases.native(epochs=1, **(cases.UNEVEN if replicas > 2 else {}))
    tried = {name: ("stage 3",)}
    processes = launched_in_turn(cases.compared(base, tried), cases.trained, "torch-ddp", replicas)
    assert_as_parallel(processes, tried)
    slots = [found[f"{name}: stage 3"]["slots"] for found in processes]
    assert sum(slots) == processes[0][f"{name}: parallel"]["slots"]


@pytest.mark.features
def test_sharded_weights_are_saved_and_resumed(tmp_path: Path) -> None:
    """They are resumed with other replicas, sharded and whole; of hosts, the first writes."""
    fields = {**cases.native(**cases.UNEVEN), **cases.OPTIMIZERS[cases.LAST]}
    folder = str(tmp_path)
    run = try_run(
        functools.partial(cases.saved_in_parts, fields=fields, folder=folder),
        fields,
        "torch-ddp",
        4,
    )
    assert run.failure is None, run.failure
    held = [found["held"]["0.weight"] for found in run.returned]
    assert held == 2 * [[0, 0, 3, 64], [3, 0, 2, 64]]
    saved = CheckpointFolder(tmp_path).newest()
    assert saved is not None
    assert saved.tensors("state")["0.weight"].parts == 2
    expected = run.returned[0]["parallel"]
    work = functools.partial(cases.gone_on, folder=folder)
    others = {
        3: {"sharded": cases.sharded(3)},
        2: {"whole": cases.PARALLEL, "sharded": cases.sharded(3)},
    }
    for replicas, strategies in others.items():
        specs = {name: {**fields, "strategy": each} for name, each in strategies.items()}
        for rank, turns in enumerate(launched_in_turn(specs, work, "torch-ddp", replicas)):
            for name, kind in itertools.product(specs, ("weights", "evaluation")):
                what = f"{replicas} replicas, {name}, rank {rank}: {kind}"
                assert_close(turns[name][kind], expected[kind], what)


@pytest.mark.features
def test_memory_and_traffic_are_as_planned(of_four: list[dict[str, Any]]) -> None:
    """The plan is of the replica that has most, and on average; with equal layers it is right to a tenth."""
    whole = models.LAYERS * models.WIDTH**2 * 8
    for kind, parts in MEASURED.items():
        all_found = [found[f"{cases.MEASURED}: {kind}"] for found in of_four]
        planned = all_found[0]["planned"]
        gradients = whole if kind.endswith("1") else whole / parts + whole / models.LAYERS
        assert planned == [whole, gradients, 2 * whole / parts], "two slots for each weight"
        most = np.max([found["found"] for found in all_found], axis=0)
        np.testing.assert_allclose(most, planned, rtol=0.1, err_msg=kind)
        sent = np.mean([found["sent"] for found in all_found])
        assert all_found[0]["to be sent"] == 2 * 3 / 4 * whole
        np.testing.assert_allclose(sent, 2 * 3 / 4 * whole, rtol=0.1, err_msg=f"{kind}: sent")
        to_each = np.stack([found["to each"] for found in all_found])
        between = to_each[:2, 2:] + to_each[2:, :2].T
        expected = np.eye(2) * whole if kind in HYBRID else np.ones((2, 2)) * whole
        np.testing.assert_allclose(between, expected, atol=0.05 * whole, err_msg=f"{kind}: between")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "replicas", "kind"),
    [*CELLS[:-1], param("tf-multiworker", 2, "stage 3", features=True, exhaustive=True)],
)
def test_it_resumes_as_data_parallel_and_back(
    backend: str, replicas: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CPU_ALLOCATOR_USE_BFC", "1")  # TensorFlow counts what it takes
    measures, folder = kind == "stage 3", str(tmp_path)
    options = {"base": base(backend), "folder": folder, "kind": kind, "measures": measures}
    work = functools.partial(cases.passed_on, **options)
    processes = launched(work, backend, replicas, cases.PARALLEL)
    if measures:
        assert_joined_by_layers([found.pop("measured") for found in processes])
        for found in processes:
            modules, by_hand = found.pop("modules"), found.pop("by hand")
            for each in by_hand:
                assert_close(modules[each], by_hand[each], f"of tf.Modules: {each}")
    for found in processes:
        restored, saved = found["restored"], found["parallel"]["saved"]
        assert restored["steps"] == cases.SAVED
        assert restored["saved"].keys() == saved.keys()
        assert_close(restored["saved"], saved, "restored as a whole")
    first = processes[0]
    del first["restored"]
    expected = first["parallel"]
    for name, found in first.items():
        assert_equal(found, expected, name)
    saved = CheckpointFolder(tmp_path / "sharded").newest()
    whole = CheckpointFolder(tmp_path / "parallel").newest()
    assert saved is not None
    assert whole is not None
    stored = saved.tensors("state")
    assert {name: replace(each, parts=1) for name, each in stored.items()} == whole.tensors("state")
    assert stored["hidden/kernel"].parts == (cases.HOST if kind.endswith("3") else 1)
    work = functools.partial(cases.gone_on, folder=str(tmp_path / "sharded"))
    others = {"hybrid 1": (3, "stage 1"), "hybrid 3": (3, "stage 3")}
    number, another = others.get(kind, (4, "hybrid 1"))
    (other, *_) = launched(work, backend, number, cases.KINDS[another])
    for name in (
        reference_model.starting_state()
    ):  # moving statistics are of the slices of so many replicas
        assert_close(other["weights"][name], expected["weights"][name], f"{another}: {name}")
    assert_close(other["evaluation"], expected["evaluation"], f"{another}: evaluation")


def assert_joined_by_layers(processes: Sequence[Mapping[str, Any]]) -> None:
    """TensorFlow's layers join their weights one after the other, and what cannot be so is refused."""
    whole = models.LAYERS * models.WIDE**2 * 8
    for found in processes:
        unit = whole / models.LAYERS
        assert found["planned"] == [whole / 2 + unit, whole / 2 + unit, whole]
        assert found["held"] == pytest.approx(1.5 * whole, rel=0.01)
        more = found["held"] + found["besides"] - sum(found["planned"])
        assert -0.9 * unit < more < 0.4 * unit, "of whole layers, no more and no less than planned"
        assert found["to be sent"] == 1.5 * whole, "weights twice, and gradients where they belong"
        assert found["sent"] == pytest.approx(1.5 * whole, rel=0.1)
        assert found["gathered"] == whole
        np.testing.assert_allclose(found["predicted sharded"], found["predicted"], rtol=CLOSE)
        np.testing.assert_allclose(found["set"], 1, rtol=CLOSE)
    unusual, refusals = processes[0]["unusual"], processes[0]["refusals"]
    assert unusual["far"] < CLOSE
    assert processes[0]["in bfloat16"] == {"far": 0, "summed": ["float32"]}
    assert unusual["draws"] == 2 * 2, "each dropout is computed again"
    assert unusual["norms"] == 13, "by lamb, of each weight"
    assert "recurs" not in refusals
    assert "kernel: stage=3 cannot shard a weight" in refusals["constraint"]
    assert "sets its trainable weight" in refusals["sets"]
    assert "first/kernel is read outside the layer" in refusals["reads past"]
    for name in ("reads outside", "reads outside, again"):
        assert "first/kernel is read outside the layer" in refusals[name]
    assert "first is called in a loop or a branch" in refusals["branches"]
    assert "called has the operation RandomStandardNormal" in refusals["draws"]
    assert "called updates variables that are not its own" in refusals["draws unseeded"]
    assert "inner/kernel has a regularizer, and its layer is not called" in refusals["skips"]
    assert processes[0]["modules, unusual"] < CLOSE
    refusals = processes[0]["modules, refusals"]
    assert "the weight weight is read outside the module" in refusals["past"]
    assert "is read in a nested tf.function" in refusals["in a function"]
    assert "the trained weight weight is set" in refusals["sets"]
    assert "is set in a loop, a branch" in refusals["sets in a branch"]
    assert "other has the operation RandomUniform" in refusals["draws"]
    assert "holds a layer of Keras" in refusals["layer"]
    assert "inner is called in a loop" in refusals["called in a loop"]
    assert "first refers back to one that holds it" in refusals["refers back"]


@pytest.mark.slow
def test_sessions_follow_one_that_is_fully_sharded() -> None:
    """torch's caches keep the group of a sharded module, which must not keep the port of the next one."""
    strategies = {"sharded": cases.sharded(3), "whole": cases.PARALLEL}
    specs = {
        f"{turn} {name}": cases.spec(strategy, cases.native(epochs=1))
        for turn in range(2)
        for name, strategy in strategies.items()
    }
    for turns in launched_in_turn(specs, cases.trained_or_measured, "torch-ddp", 2):
        for name in specs:
            assert_equal(turns[name], turns["0 whole"], name)


@pytest.mark.features
def test_memory_and_traffic_of_full_sharding_are_as_planned() -> None:
    """It runs Adam, whose gradients are each clipped by norm, as data-parallel runs."""
    whole = models.LAYERS * models.WIDTH**2 * 8
    strategies = {
        "parallel": cases.PARALLEL,
        "parts": cases.sharded(3, bucket_megabytes=8e-6 * models.WIDTH**2),
    }
    changes = cases.OPTIMIZERS["adam, by norms"]
    specs = {name: cases.spec(s, cases.native(), **changes) for name, s in strategies.items()}
    portable = cases.native(model=models.portable_model, epochs=1)
    specs["portable"] = cases.spec(strategies["parts"], portable)
    for turns in launched_in_turn(specs, trained_and_sent, "torch-ddp", 2):
        found = turns["parts"]
        assert_equal(found, turns["parallel"], "sharded")
        assert found["held"] == whole / 2
        assert found["to be sent"] == 2 * whole, "weights twice, and gradients as in an all-reduce"
        np.testing.assert_allclose(found["sent"], 2 * whole, rtol=0.1)
        found = turns["portable"]
        assert found["held"] == whole / 2
        assert found["to be sent"] == 1.5 * whole, "weights twice, and gradients where they belong"
        np.testing.assert_allclose(found["sent"], 1.5 * whole, rtol=0.1)
        assert_taken(found)
        assert found["between"] == found["again"] == models.LAYERS * 8, "one number for each"
        assert found["evaluated"] == whole
        refusals = found["refusals"]
        assert "kernel: stage=3 cannot shard a weight" in refusals["constraint"]
        assert "scale: stage=3 cannot shard a weight" in refusals["number"]
        assert "sets its trainable weight" in refusals["set"]
        assert "takes gradients by torch.func" in refusals["functional"]
        assert "wrapped: stage=3 gathers weights as Keras reads them" in refusals["module"]
        for name in ("native, clamped", "native, of data"):
            assert "weight is set in a forward pass" in refusals[name]
        assert "the data of a parameter is set" in refusals["native, data"]
        assert "takes gradients by torch.func" in refusals["native, functional"]
        assert "number: stage=3 cannot shard a weight" in refusals["native, number"]
        assert all(found["unusual"].values()), found["unusual"]
        chosen, skipped, reduced = found["apart"]  # the same on both replicas
        assert "replica 0 reads a/kernel, replica 1 reads b/kernel. " in chosen
        assert "replica 0 is through with its forward pass, replica 1 reads b/k" in skipped
        assert "replica 0 has the gradient of b/kernel, replica 1 reads b/kernel." in reduced
        assert found["departing"]["far"] < CLOSE
        chosen, reduced = found["departing"]["said"]
        assert "replica 0 reads a/kernel, replica 1 reads b/kernel. " in chosen
        assert "replica 0 has the gradient of b/kernel, replica 1 reads a/kernel." in reduced


def inapt(kind: str) -> Any:
    """A model with a weight that torch's fully_shard does not take apart."""
    import torch
    from torch import nn

    odd = {
        "number": torch.ones(()),
        "empty": torch.ones(0, 3),
        "channels_last": torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "types": torch.ones(2, dtype=torch.float64),
    }
    model = nn.Linear(models.WIDTH, 1)
    model.odd = nn.Parameter(odd[kind])
    return model


def nothing(session: Any) -> None:
    """A function that is never called."""


INAPT = {
    "number": "odd: stage=3 cannot shard a weight that is a single number",
    "empty": "odd: stage=3 shards contiguous weights only",
    "channels_last": r"odd: stage=3 shards contiguous weights only.* \(channels_last\)",
    "types": "one dtype, float32 or float64; received float32, float64",
}


@pytest.mark.features
def test_native_weights_that_cannot_be_sharded_are_named() -> None:
    spec = cases.spec(cases.sharded(3), cases.native(model={"torch": inapt}, precision="float32"))
    for kind, words in INAPT.items():
        found = try_run(nothing, spec | {"model_args": {"kind": kind}}, "torch-ddp", 2)
        assert re.search(words, str(found.failure)), (kind, found.failure)
