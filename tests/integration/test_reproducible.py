"""With `reproducible`, all numbers of a run are equal to the bit for any number of replicas."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.reproducible_models import (
    CASES,
    EVERYTHING,
    NATIVE,
    SPEC,
    counting,
    functionally_dropping,
    tf_module,
)
from integration.session_specs import spec

import isotrain
from isotrain.core.contracts.backend import tree_sum
from isotrain.core.errors import SpecError
from isotrain.testing.consecutive_sessions import launched_in_turn
from isotrain.testing.reference.layers import BatchNormalization, Dense, Dropout
from isotrain.testing.reference.network import Network

BITS = {"reproducible": "bits"}
FEW_CASES = {"cnn": CASES["cnn"], "lstm": CASES["lstm"], "everything": EVERYTHING}
SHARDED: dict[str, Any] = {
    "stage 1": {"name": "sharded", "options": {"bucket_megabytes": 0.001}},
    "stage 2": {"name": "sharded", "options": {"stage": 2}},
    "hybrid": {"name": "sharded", "options": {"hybrid": True, "host_size": 1}},
}
"""Strategies that shard the optimizer state."""


def stage_3(**options: Any) -> dict[str, Any]:
    """The strategy that shards weights too, of which several layers are gathered one after the other."""
    return {"name": "sharded", "options": {"stage": 3, "bucket_megabytes": 0.001, **options}}


CUT: dict[str, dict[str, Any]] = {
    "mlp": CASES["mlp"] | {"clip": {"norm": 0.05}, "strategy": stage_3()},
    "adamw": CASES["mlp"]
    | {"optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.01}, "strategy": stage_3()},
    "transformer": CASES["transformer"] | {"strategy": stage_3()},
    "orthogonal": CASES["orthogonal"] | {"strategy": stage_3()},
    "everything": EVERYTHING | {"strategy": stage_3(hybrid=True, host_size=2)},
    "module": NATIVE["module"] | {"clip": {"norm": 0.05}, "strategy": stage_3()},
    "transposed": NATIVE["transposed"] | {"strategy": stage_3()},
}
"""Models whose weights are sharded, with sizes that fill no vector of the processor."""


CUT_ON_TENSORFLOW: dict[str, dict[str, Any]] = {
    **{name: CUT[name] for name in ("mlp", "adamw", "transformer", "everything")},
    "momentum": CUT["adamw"] | {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    "tf module": CUT["adamw"] | {"model": {"tensorflow": tf_module}},
}


def normalized() -> Network:
    last = Dense(5, 1, name="last")
    return Network([Dense(3, 5, "tanh", name="first"), BatchNormalization(5, name="bn"), last])


def dropping() -> Network:
    return Network([Dense(3, 5, "tanh", name="first"), Dropout(0.5), Dense(5, 1, name="last")])


def trained(session: isotrain.Session, name: str = "") -> dict[str, np.ndarray]:
    """All that a session computes: losses, metrics, weights and optimizer state, by name."""
    numbers: dict[str, list[float]] = {"losses": []}
    for batch in session.batches():
        numbers["losses"].append(float(session.step(batch)))
        if batch.is_last_of_epoch:
            for each, value in {**session.metrics(), **session.validate()}.items():
                numbers.setdefault(each, []).append(value)
    return {**{each: np.array(n) for each, n in numbers.items()}, **state(session)}


def state(session: isotrain.Session) -> dict[str, np.ndarray]:
    """The state by name, in the shapes of whole tensors: NaN stands for what only other ranks have."""
    placed = session.read_state()
    for name, info in session.group.describe_state().items():
        if info.offset is not None and placed[name].shape != info.shape:
            shard, placed[name] = placed[name], np.full(info.shape, np.nan, info.dtype)
            ends = zip(info.offset, shard.shape, strict=True)
            placed[name][tuple(slice(start, start + count) for start, count in ends)] = shard
    return placed


def trained_in_another_order(session: isotrain.Session, name: str) -> dict[str, np.ndarray]:
    """As `trained`, with a tree that adds the parts one after the other."""

    def add(tree: tree_sum.SumTree, first: int, count: int, sums: Any) -> None:
        if tree.subtrees:
            first, before, left = tree.subtrees.pop()
            count, sums = before + count, [a + b for a, b in zip(left, sums, strict=True)]
        tree.subtrees.append((first, count, sums))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_sum.SumTree, "add", add)
        return trained(session)


class CountedBound(int):
    """A bound that knows whether a number has reached it."""

    is_reached = False

    def __le__(self, other: int) -> bool:
        reached = super().__le__(other)
        self.is_reached |= reached
        return reached


def trained_by_transfers(session: isotrain.Session, name: str) -> dict[str, np.ndarray]:
    """As `trained`, with gradients that count as large."""
    large = CountedBound(1 << 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_sum, "LARGE", large)
        results = trained(session)
    assert large.is_reached, "no vector was sent by transfers"
    return results


def differing(results: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray]) -> list[str]:
    """Names of what differs in a bit."""
    assert results.keys() == others.keys()
    return [name for name in results if results[name].tobytes() != others[name].tobytes()]


def together(ranks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What the ranks have, which is equal where several have it: each has optimizer state of its shard."""
    merged: dict[str, np.ndarray] = {}
    for results in ranks:
        for name, array in results.items():
            before = merged.setdefault(name, array)
            merged[name] = np.where(np.isnan(before), array, before)
            expected = np.where(np.isnan(array), array, merged[name])
            assert array.tobytes() == expected.tobytes(), name
    return merged


def run(backend: str, replicas: int, work: Any = trained, **fields: Any) -> dict[str, np.ndarray]:
    """What the ranks have computed."""
    chosen = spec(
        precision="float32", metrics=["mean_absolute_error"], validation_split=0.25, **fields
    )
    ranks = [results[""] for results in launched_in_turn({"": chosen}, work, backend, replicas)]
    return together(ranks)


@pytest.mark.parametrize("case", ["plain", "clipped", "normalized", "uneven"])
@pytest.mark.usefixtures("reference")
def test_the_numpy_backend_has_the_same_bits(case: str) -> None:
    fields: dict[str, Any] = {
        "plain": {},
        "clipped": {"clip": {"global_norm": 0.01}},
        "normalized": {"model": {"numpy": normalized}, "global_batch_size": 12},
        "uneven": {"global_batch_size": 7},
    }[case]
    first, *others = (run("reference", replicas, **BITS, **fields) for replicas in (1, 2, 3, 8))
    sharded = [run("reference", 3, **BITS, **fields, strategy=each) for each in SHARDED.values()]
    assert [differing(first, other) for other in (*others, *sharded)] == [[]] * 6


@pytest.mark.usefixtures("reference")
def test_without_it_bits_depend_on_the_number_of_replicas() -> None:
    assert differing(run("reference", 1), run("reference", 3))


@pytest.mark.usefixtures("reference")
def test_another_order_of_one_sum_shows() -> None:
    fields = {**BITS, "global_batch_size": 9}
    one = run("reference", 1, trained_in_another_order, **fields)
    assert differing(one, run("reference", 1, **fields))
    assert differing(one, run("reference", 3, trained_in_another_order, **fields))


def until_killed(session: isotrain.Session) -> None:
    """Trains with checkpoints until the last rank's process ends itself, in the middle of an epoch."""
    for batch in session.batches():
        session.step(batch)
        if batch.is_last_of_epoch:
            session.end_epoch(batch.epoch, {**session.metrics(), **session.validate()})
        session.save_if_due()
        if session.steps_done == 8 and session.rank == session.replicas - 1:
            os._exit(1)


def _require_same_bits_after_a_kill(
    fields: dict[str, Any],
    backend: str,
    replicas: int,
    folder: Path,
    strategies: tuple[Any, Any] = ("data-parallel", "data-parallel"),
) -> None:
    """Compares a run that is not killed with one of 3 replicas that goes on with another number.

    Args:
        fields: Spec of the runs, with a global batch or more after step 8.
        backend: Backend of the runs.
        replicas: Number of replicas that the killed run goes on with.
        folder: Folder for the runs.
        strategies: Strategy of the killed run, and that with which it goes on.
    """
    fields = fields | {"checkpoint": {"every_steps": 2, "background": False}}
    whole = isotrain.run(
        fields, backend=backend, replicas=2, output=folder / "whole", on_event=_ignore
    )
    killed: dict[str, Any] = {"backend": backend, "output": folder / "killed"}
    before, after = ({**fields, "strategy": strategy} for strategy in strategies)
    with pytest.raises(isotrain.IsotrainError):
        isotrain.launch(until_killed, before, replicas=3, on_event=_ignore, **killed)
    events: list[dict[str, Any]] = []
    resumed = isotrain.run(
        after, replicas=replicas, resume="auto", on_event=events.append, **killed
    )
    done = [event["done"] for event in events if event["event"] == "resumed"]
    assert done in ([6], [8]), "another rank may not have saved step 8 before it was ended"
    assert not differing(whole.weights, resumed.weights)
    assert whole.history == resumed.history


def _ignore(event: dict[str, Any]) -> None:
    """Prints nothing."""


@pytest.mark.slow
@pytest.mark.usefixtures("reference")
def test_a_killed_run_goes_on_with_another_number_of_replicas(tmp_path: Path) -> None:
    fields = spec(**BITS, metrics=["mean_absolute_error"], global_batch_size=5, epochs=6)
    _require_same_bits_after_a_kill(fields, "reference", 4, tmp_path)


@pytest.mark.usefixtures("reference")
def test_random_layers_are_refused(tmp_path: Path) -> None:
    fields = spec(**BITS, model={"numpy": dropping})
    options: dict[str, Any] = {"output": tmp_path / "run", "on_event": lambda event: None}
    with pytest.raises(isotrain.IsotrainError, match="random_layers: per-sample"):
        isotrain.run(fields, backend="reference", replicas=2, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "local-sgd"}, "strategy 'local-sgd' exchanges"),
        ({"reproducible": {"granularity": 2}}, r"Use fewer.*granularity: 4"),
    ],
)
@pytest.mark.usefixtures("reference")
def test_plans_that_depend_on_replicas_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(isotrain.IsotrainError, match=message):
        isotrain.plan(spec(**{**BITS, **fields}), backend="reference", replicas=3)


def test_an_optimizer_that_takes_norms_of_cut_weights_is_refused() -> None:
    fields = spec(**BITS, strategy=stage_3(), optimizer={"name": "lamb", "lr": 0.1})
    with pytest.raises(isotrain.UnsupportedError, match=r"lamb takes the norms of weights"):
        isotrain.plan(fields, backend="torch-ddp", replicas=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("gradient_accumulation_steps", 2), ("batch_norm", "global"), ("precision", "float16")],
)
def test_fields_that_depend_on_replicas_are_refused(field: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"{field}: got .*with reproducible"):
        isotrain.TrainingSpec(**spec(**BITS, **{field: value}))


@pytest.mark.usefixtures("reference")
def test_the_plan_has_one_thread_and_the_bytes_of_an_all_reduce() -> None:
    plan = isotrain.plan(spec(**BITS, threads=None), backend="reference", replicas=2)
    assert plan.threads == 1
    assert "in 8 parts" in " ".join(plan.notes)


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.timeout(900)
def test_torch_has_the_same_bits() -> None:
    _require_same_bits(FEW_CASES | NATIVE, "torch-ddp", (1, 3))


EXHAUSTIVE = pytest.mark.exhaustive
FURTHER = {name: case for name, case in CASES.items() if name not in FEW_CASES}


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("cases", "backend", "counts"),
    [
        pytest.param(FURTHER, "torch-ddp", (1, 3), id="models"),
        pytest.param({"transformer": CASES["transformer"]}, "torch-ddp", (1, 2, 8), id="counts"),
        pytest.param({"everything": EVERYTHING} | NATIVE, "horovod-torch", (1, 3), id="horovod"),
    ],
)
def test_further_models_and_counts_have_the_same_bits_on_torch(
    cases: dict[str, Any], backend: str, counts: tuple[int, ...]
) -> None:
    """All pairs of models and counts are compared by `benchmarks/same_bits.py`."""
    _require_same_bits(cases, backend, counts)


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "names", "counts"),
    [
        pytest.param(
            *("torch-ddp", ("mlp", "transformer"), (2,)), marks=[pytest.mark.kernels, EXHAUSTIVE]
        ),
        pytest.param(
            *("torch-ddp", ("adamw", "orthogonal", "module", "transposed"), (3,)), marks=EXHAUSTIVE
        ),
        ("torch-ddp", ("mlp", "everything"), (4,)),
        ("horovod-torch", ("mlp", "transformer"), (3,)),
    ],
)
def test_weights_that_are_cut_on_torch_have_the_same_bits(
    backend: str, names: Sequence[str], counts: tuple[int, ...]
) -> None:
    _require_same_bits_where_cut({name: CUT[name] for name in names}, backend, counts)


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "cases", "counts"),
    [
        ("tf-multiworker", ("mlp", "momentum"), (2,)),
        pytest.param("tf-multiworker", ("adamw", "transformer"), (3,), marks=EXHAUSTIVE),
        pytest.param("tf-multiworker", ("everything", "tf module"), (4,), marks=EXHAUSTIVE),
        ("horovod-tf", ("mlp", "tf module"), (3,)),
    ],
)
def test_weights_that_are_cut_on_tensorflow_have_the_same_bits(
    backend: str, cases: Sequence[str], counts: tuple[int, ...]
) -> None:
    _require_same_bits_where_cut({n: CUT_ON_TENSORFLOW[n] for n in cases}, backend, counts)


def _require_same_bits_where_cut(
    cases: Mapping[str, dict[str, Any]], backend: str, counts: tuple[int, ...]
) -> None:
    """Compares runs that shard weights over so many replicas with those of one replica."""
    whole = {name: fields | {"strategy": "data-parallel"} for name, fields in cases.items()}
    (one,) = launched_in_turn(whole, trained, backend, 1)
    for replicas in counts:
        ranks = launched_in_turn(cases, trained, backend, replicas)
        for name in cases:
            assert not differing(one[name], together([rank[name] for rank in ranks])), name


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.parametrize(
    "backend", ["torch-ddp", "horovod-torch", "tf-mirrored", "tf-multiworker", "horovod-tf"]
)
def test_large_vectors_have_the_same_bits_on_three_replicas(backend: str) -> None:
    """3 replicas send these in another order; here vectors count as large from a few thousand elements on."""
    cases = {"mlp": CASES["mlp"] | {"epochs": 1}}
    (one,) = launched_in_turn(cases, trained, backend, 1)
    three = launched_in_turn(cases, trained_by_transfers, backend, 3)
    assert not differing(one["mlp"], three[0]["mlp"])


def trained_by_keras_operations(session: isotrain.Session, name: str) -> int:
    """Trains; returns the number of captured graphs. It fails if a faster one may round otherwise."""
    from isotrain.adapters.torch.graph.trace import TracedGraph

    make_faster = TracedGraph.optimized

    def make_faster_exactly(graph: TracedGraph, *, exactly: bool) -> TracedGraph | None:
        assert exactly
        return make_faster(graph, exactly=exactly)

    captured: list[TracedGraph] = []
    replay = TracedGraph.__call__

    def replay_and_note(graph: TracedGraph, *batch: Any) -> Any:
        captured.append(graph)
        return replay(graph, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TracedGraph, "optimized", make_faster_exactly)
        patch.setattr(TracedGraph, "__call__", replay_and_note)
        trained(session)
    return len(set(map(id, captured)))


@pytest.mark.slow
@pytest.mark.features
def test_what_is_replayed_on_torch_rounds_as_keras_does() -> None:
    """Faster graphs may not, and a run that resumes would meet other batches in which they agree."""
    case = {"cnn": CASES["cnn"] | {"epochs": 2}}
    (results,) = launched_in_turn(case, trained_by_keras_operations, "torch-ddp", 1)
    assert results["cnn"] > 0


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("case", "optimizer"),
    [*(("cnn", each) for each in ("adam", "adamw", "rmsprop", "lamb")), ("transformer", "adam")],
)
def test_what_is_not_captured_on_torch_has_the_same_bits(case: str, optimizer: str) -> None:
    captured = CASES[case] | {"epochs": 4, "optimizer": {"name": optimizer, "lr": 0.003}}
    cases = {"captured": captured, "not captured": captured | {"capture": False}}
    (results,) = launched_in_turn(cases, trained, "torch-ddp", 1)
    assert not differing(*results.values())


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("tf-mirrored", ("lstm",)),
        ("tf-multiworker", ("cnn", "everything")),
        ("horovod-tf", ("everything",)),
    ],
)
def test_tensorflow_has_the_same_bits(backend: str, names: Sequence[str]) -> None:
    """Tracing takes long: more models and numbers are compared by `benchmarks/same_bits.py`."""
    _require_same_bits({name: FEW_CASES[name] for name in names}, backend, (1, 3))


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_counters_of_layers_move_once_in_a_step(backend: str, tmp_path: Path) -> None:
    """Though a step calls the model for each of its parts."""
    fields = SPEC | {"model": counting, "epochs": 1}
    options: dict[str, Any] = {"backend": backend, "on_event": lambda event: None}
    for replicas in (1, 2):
        folder = tmp_path / str(replicas)
        made = isotrain.run(fields, replicas=replicas, output=folder, **options)
        (calls,) = [value for name, value in made.weights.items() if "calls" in name]
        assert calls == 3, "one for each batch of an epoch"


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.parametrize(("parts", "replicas"), [pytest.param(8, 3, marks=EXHAUSTIVE), (2, 2)])
def test_a_run_on_tensorflow_has_the_same_bits(parts: int, replicas: int, tmp_path: Path) -> None:
    """Replicas with 3, 3 and 2 parts, or 1 each, which also try the metrics before the first step."""
    fields = CASES["dropout"] | {"epochs": 1, "reproducible": {"granularity": parts}}
    options: dict[str, Any] = {"backend": "tf-mirrored", "on_event": lambda event: None}
    alone, together = (
        isotrain.run(fields, replicas=count, output=tmp_path / str(count), **options)
        for count in (1, replicas)
    )
    assert not differing(alone.weights, together.weights)
    assert alone.history == together.history


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.features
def test_a_killed_run_goes_on_with_another_number_of_replicas_on_tensorflow(tmp_path: Path) -> None:
    _require_same_bits_after_a_kill(EVERYTHING | {"epochs": 6}, "tf-multiworker", 1, tmp_path)


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.kernels
def test_a_killed_run_goes_on_with_another_number_of_replicas_on_torch(tmp_path: Path) -> None:
    _require_same_bits_after_a_kill(CASES["cnn"] | {"epochs": 6}, "torch-ddp", 1, tmp_path)


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("strategies", "replicas"),
    [((stage_3(), SHARDED["stage 2"]), 2), (("data-parallel", stage_3()), 4)],
    ids=["from shards", "to shards"],
)
def test_a_killed_run_goes_on_with_weights_that_are_cut_otherwise(
    strategies: tuple[Any, Any], replicas: int, tmp_path: Path
) -> None:
    fields = CASES["mlp"] | {
        "epochs": 6,
        "gradient_norm": False,
    }  # which sharded runs do not measure
    _require_same_bits_after_a_kill(fields, "torch-ddp", replicas, tmp_path, strategies)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "replicas", "seed"),
    [("tf-mirrored", 1, None), ("torch-ddp", 1, 5), ("torch-ddp", 2, 5)],
)
def test_draws_by_replica_are_refused(
    backend: str, replicas: int, seed: int | None, tmp_path: Path
) -> None:
    fields = SPEC | {"model": functionally_dropping, "model_args": {"seed": seed}}
    options: dict[str, Any] = {"output": tmp_path / "run", "on_event": lambda event: None}
    with pytest.raises(isotrain.IsotrainError, match=r"reproducible: the operation .* by replica"):
        isotrain.run(fields, backend=backend, replicas=replicas, **options)


def _require_same_bits(
    cases: Mapping[str, dict[str, Any]], backend: str, counts: tuple[int, ...]
) -> None:
    """Compares runs on so many replicas; three of them also shard the state of some models."""
    ways = {"mlp": "stage 1", "tagger": "hybrid", "module": "stage 2", "everything": "stage 2"}
    strategies = {case: SHARDED[way] for case, way in ways.items()}
    if "torch" in backend:
        strategies |= {"cnn": stage_3()}
    sharded = {
        f"{case}, sharded": {**cases[case], "strategy": strategy}
        for case, strategy in strategies.items()
        if case in cases
    }
    first: dict[str, Any] | None = None
    for replicas in counts:
        is_sharded = replicas == 3 and backend != "tf-mirrored"
        all_cases = {**cases, **(sharded if is_sharded else {})}
        ranks = launched_in_turn(all_cases, trained, backend, replicas)
        results = {case: together([rank[case] for rank in ranks]) for case in all_cases}
        first = first or results
        found = {case: differing(first[case.split(",")[0]], results[case]) for case in results}
        assert not any(found.values()), (replicas, found)
    assert first is not None
    assert all(len(results["losses"]) >= 50 for results in first.values())
