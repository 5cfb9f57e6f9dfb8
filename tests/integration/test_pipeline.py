"""Models in stages train as on one replica: every schedule, with skipped layers, in float64 to 1e-12."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.pipeline_models import data, layered, module, reentrant, short
from integration.pipeline_tasks import (
    BASE,
    CASES,
    FITTED,
    PIPELINES,
    SAVED,
    STOP,
    Tasks,
    again,
    done,
    first_loss,
    fitted,
    fitting,
    followed,
    going_on,
    profiled_and_sent,
    saving,
    saving_and_profiled,
    saving_listed,
    under,
    unsaved,
)

import isotrain
from isotrain.analysis.compare import summary
from isotrain.core.checkpoints.safetensors_file import SafetensorsFile
from isotrain.core.system.trace_events import Span
from isotrain.testing.check_context import assert_same
from isotrain.testing.consecutive_sessions import Work

pytestmark = pytest.mark.features


PLAIN = {"normalised": False, "dropped": 0.0}
"""Arguments of a model that computes the same for any number of processes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With checkpoints by case."""
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module")
def stage_results(folder: Path) -> Sequence[dict[str, Any]]:
    """Of each of two stages, by pipeline; and what was saved and gone on with, by case."""
    tasks: dict[str, Any] = {
        n: ({**BASE, **CASES[case], **under(o), "recompute": again(n)}, followed)
        for n, (case, o) in PIPELINES.items()
    }
    tasks["named"][0]["model_args"] = {"names_them": True}
    tasks |= {
        f"saved/{case}": ({**BASE, **CASES[case], **under({})}, partial(saving, folder=folder))
        for case in SAVED
    }
    tasks["profile"] = {**BASE, **CASES["native"], **under({"cut": ["2"]})}, profiled_and_sent
    return done(tasks | {"fitted": ({**fitting(folder / "best"), **under({})}, fitted)}, 1)


@pytest.fixture(scope="module")
def alone(folder: Path, stage_results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one replica without stages, by case; and how it went on from what stages saved."""
    tasks: dict[str, Any] = {n: ({**BASE, **changes}, followed) for n, changes in CASES.items()}
    dense = {**BASE, **CASES["sequential"]}
    tasks["plain"] = {**BASE, "model_args": PLAIN}, followed
    tasks["saved/sequential"] = dense, partial(unsaved, folder=folder)
    return done(tasks | {"fitted": (fitting(folder / "best-alone"), fitted)}, 1)[0]


def assert_as(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """What goes on from a checkpoint ends as a run that was never interrupted."""
    assert_equal(ours, {**theirs, "loss": theirs["loss"][STOP:]})


def assert_equal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Losses, weights, slots and metrics, to 1e-12."""
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-12)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for kind in ("weights", "slots"):
        for name, value in ours[kind].items():
            near = theirs[kind][name]
            np.testing.assert_allclose(value, near, rtol=1e-12, atol=1e-12, err_msg=name)
    for kind in ("evaluated", "train"):
        assert ours[kind] == pytest.approx(theirs[kind], rel=1e-12)


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_train_as_one_replica(
    alone: dict[str, Any], stage_results: Sequence[dict[str, Any]], name: str
) -> None:
    """Dropout, batch normalisation and clipping are the same; each stage has its own slots."""
    expected = alone[PIPELINES[name][0]]
    for stage in stage_results:
        assert_equal(stage[name], expected)
    slots = [set(stage[name]["slots"]) for stage in stage_results]
    assert set.union(*slots) == set(expected["slots"])
    common = {each.rpartition("/")[2] for each in slots[0] & slots[1]}
    assert common <= {"iteration", "learning_rate"}


def test_modules_are_timed_and_hold_and_send_what_the_plan_says(
    stage_results: Sequence[dict[str, Any]],
) -> None:
    for place in stage_results:
        layers = place["profile"]["layers"]
        assert [layer["name"] for layer in layers] == ["0", "1", "2", "3", "4"]
        assert [layer["chunk"] for layer in layers] == [0, 0, 1, 1, 1]
        assert [list(layer["sources"]) for layer in layers] == [[], [0], [1], [2], [3]]
        assert [layer["weight_bytes"] for layer in layers] == [8 * n for n in (56, 0, 88, 0, 36)]
        assert [layer["activation_bytes"] for layer in layers] == [
            8 * 2 * n for n in (8, 8, 8, 8, 4)
        ]
        as_many = 4 * layers[1]["activation_bytes"]
        assert place["profile"]["sent"] == as_many, "activations go forward, and gradients back"
    for stage, place in enumerate(stage_results):
        own = sum(e["weight_bytes"] for e in place["profile"]["layers"] if e["chunk"] == stage)
        assert place["profile"]["held"] == [own, own, 2 * own], "as the plan says, and no other's"


def test_sent_activations_are_freed_when_their_gradients_arrive(
    stage_results: Sequence[dict[str, Any]],
) -> None:
    """The first of two stages keeps all four micro-batches with gpipe, and two with 1f1b."""
    assert {name: stage_results[0][name]["sending"] for name in ("gpipe", "1f1b")} == {
        "gpipe": 4,
        "1f1b": 2,
    }


@pytest.mark.parametrize(
    ("name", "predicted"),
    [("gpipe", 20), ("1f1b", 20), ("interleaved", 11), ("one micro-batch", 50)],
)
def test_a_comparison_reports_idle_time_and_its_prediction(
    stage_results: Sequence[dict[str, Any]], name: str, predicted: int
) -> None:
    """There are two stages and four micro-batches, with two chunks on each stage or one."""
    assert_told([stage[name] for stage in stage_results], 1, predicted)


def assert_told(places: Sequence[dict[str, Any]], replicas: int, predicted: int) -> None:
    """Processes have noted when they took their passes."""
    spans = [
        Span(f"rank {rank}", what, begin - place["taken"][0][1], end - begin)
        for rank, place in enumerate(places)
        for what, begin, end in place["taken"]
    ]
    (told,) = summary.idle_notes(spans, replicas)
    seen = re.search(rf"for (\d+)% of the time .* predicts {predicted}%", told)
    assert seen, told
    assert 0 <= int(seen[1]) <= 100


@pytest.mark.parametrize("case", SAVED)
def test_stages_resume_from_their_checkpoints(
    stage_results: Sequence[dict[str, Any]], case: str
) -> None:
    """They continue to the bit, also where they had all weights when they saved."""
    for found in (stage[f"saved/{case}"] for stage in stage_results):
        for part, kind in itertools.product(("again", "joined"), found["whole"]):
            ours, theirs = found[part][kind], found["whole"][kind]
            if kind in ("weights", "slots", "random"):
                assert_same(ours, theirs, f"{part}: {kind}")
            else:
                assert ours == theirs, (part, kind)


def test_one_replica_resumes_from_checkpoints_of_stages(
    alone: dict[str, Any], stage_results: Sequence[dict[str, Any]]
) -> None:
    by_one = alone["saved/sequential"]
    for found in (
        by_one["again"],
        *(stage["saved/sequential"]["whole"] for stage in stage_results),
    ):
        assert_as(found, by_one["whole"])


def test_each_stage_writes_its_own_state(
    folder: Path, stage_results: Sequence[dict[str, Any]]
) -> None:
    """State that both have, such as the count of updates, is written by the first alone."""
    files = sorted((folder / "sequential").rglob("state-*.safetensors"))
    written = [set(SafetensorsFile(path).dtypes) for path in files]
    assert len(written) == 2
    assert not written[0] & written[1]
    for stage, names in zip(stage_results, written, strict=True):
        slots = {n for n in stage["saved/sequential"]["whole"]["slots"] if "/sequential/" in n}
        assert slots <= names
        assert {name.partition("/")[0] for name in names} - {"optimizer"}


def test_stages_keep_the_best_weights_and_end_early(
    alone: dict[str, Any], stage_results: Sequence[dict[str, Any]]
) -> None:
    expected = alone["fitted"]
    assert expected["best"] < expected["steps"] < 3 * FITTED["epochs"]
    for found in (stage["fitted"] for stage in stage_results):
        assert (found["steps"], found["best"]) == (expected["steps"], expected["best"])
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
        for name, value in expected["weights"].items():
            np.testing.assert_allclose(found["weights"][name], value, rtol=1e-9, err_msg=name)


SEVERAL = {
    **BASE,
    "data": short,
    "model_args": {"normalised": False},
    "gradient_accumulation_steps": 2,
}
"""Trained by two replicas: on each, statistics of a batch would be those of its slice."""


@pytest.fixture(scope="module")
def replicated(folder: Path, stage_results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of two replicas without stages, from the start, and from what stages saved."""
    dense, goes_on = {**BASE, **CASES["sequential"]}, partial(going_on, folder=folder)
    return done({"": (SEVERAL, followed), "saved/sequential": (dense, goes_on)}, 2)[0]


def test_stages_of_several_replicas_train_as_replicas(
    folder: Path, alone: dict[str, Any], replicated: dict[str, Any]
) -> None:
    """The mesh has two replicas with two stages each; some micro-batches are empty."""
    dense, by_one = {**BASE, **CASES["sequential"]}, alone["saved/sequential"]["whole"]
    assert_as(replicated["saved/sequential"], by_one)
    tasks: Tasks = {
        "": ({**SEVERAL, **under({})}, followed),
        "saved/sequential": ({**dense, **under({})}, partial(going_on, folder=folder)),
    }
    for place in done(tasks, 2):
        assert_equal(place[""], replicated[""])
        assert_as(place["saved/sequential"], by_one)


def assert_elsewhere(
    several: Mapping[str, Any],
    expected: dict[str, Any],
    by_one: dict[str, Any],
    backend: str,
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    modules: Sequence[str] = (),
    more: Tasks | None = None,
) -> Sequence[dict[str, Any]]:
    """Two replicas of two stages train as replicas, and go on from checkpoints; what else processes found."""
    dense = {**BASE, **CASES["sequential"], "gradient_accumulation_steps": 2, **(changes or {})}
    tasks: Tasks = {
        "interleaved": (
            {**several, **under(PIPELINES["interleaved"][1]), "recompute": "*"},
            followed,
        ),
        "saved/sequential": saved_by_gpipe(dense, folder, modules=modules),
    }
    places = done({**tasks, **(more or {})}, 2, backend)
    assert_told([place["interleaved"] for place in places], 2, 20)
    for rank, place in enumerate(places):
        assert_equal(place["interleaved"], expected)
        assert_saved(place["saved/sequential"], by_one, rank % 2)
    return places


def saved_by_gpipe(
    dense: Mapping[str, Any], folder: Path, **options: Any
) -> tuple[dict[str, Any], Work]:
    """Saves, goes on, and is profiled."""
    stage_results = {**dense, **under({"schedule": "gpipe", **options})}
    return stage_results, partial(saving_and_profiled, folder=folder)


def assert_saved(found: Mapping[str, Any], by_one: Mapping[str, Any], stage: int) -> None:
    assert_as(found["whole"], by_one)
    for part in ("again", "joined"):
        assert_equal(found[part], found["whole"])
    assert_profile(found["profile"])
    own = sum(each["weight_bytes"] for each in found["profile"] if each["chunk"] == stage)
    assert found["held"] == own, "as the plan says, and no other's"


def test_stages_train_as_replicas_on_horovod_torch(
    alone: dict[str, Any], replicated: dict[str, Any], tmp_path: Path
) -> None:
    by_one = alone["saved/sequential"]["whole"]
    assert_elsewhere(SEVERAL, replicated[""], by_one, "horovod-torch", tmp_path)


def test_stages_train_as_replicas_on_tensorflow(alone: dict[str, Any], tmp_path: Path) -> None:
    """Its dropout differs from torch's; one of four micro-batches is empty in every step: it traces once."""
    several = {**SEVERAL, "global_batch_size": 3, "drop_remainder": True}
    expected = done({"": (several, followed)}, 2, "tf-mirrored")[0][""]
    by_one = alone["saved/sequential"]["whole"]
    listed = {"model": {"tensorflow": layered}}
    names = ["dense_*", "head"]
    mixed = {
        **BASE,
        **CASES["sequential"],
        **under({}),
        "precision": "bfloat16",
        "gradient_accumulation_steps": 1,
    }
    more: Tasks = {"bfloat16": (mixed, first_loss)}
    for place in assert_elsewhere(
        several, expected, by_one, "tf-multiworker", tmp_path, listed, names, more
    ):
        assert place["bfloat16"] == pytest.approx(alone["sequential"]["loss"][0], rel=0.01)


def test_stages_train_as_one_replica_on_horovod_tf(alone: dict[str, Any], tmp_path: Path) -> None:
    """Passes in both directions meet between the stages; they train as torch without stages."""
    spec = {**BASE, **CASES["nothing dropped"], **under({"schedule": "1f1b"})}
    listed = {**BASE, **CASES["sequential"], "model": {"tensorflow": module}}
    listed |= under(PIPELINES["interleaved"][1])
    tasks: Tasks = {
        "": (spec, followed),
        "saved/listed": (listed, partial(saving_listed, folder=tmp_path)),
        "saved/sequential": saved_by_gpipe({**BASE, **CASES["sequential"]}, tmp_path),
    }
    by_one = alone["saved/sequential"]["whole"]
    for stage, place in enumerate(done(tasks, 1, "horovod-tf")):
        assert_equal(place[""], alone["nothing dropped"])
        saved = place["saved/listed"]
        assert_as({**saved["whole"], "slots": {}}, by_one)
        for part in ("again", "joined"):
            assert_equal(saved[part], saved["whole"])
            assert_same(saved[part]["random"], saved["whole"]["random"], f"{part}: random")
        assert saved["first slots"] == 1
        assert "sequential/head/bias, sequential/head/kernel is in none of them" in saved["noise"]
        assert (
            "noise, head, one after the other, do not compute what the model (Net)" in saved["head"]
        )
        assert_saved(place["saved/sequential"], by_one, stage)


UNEQUAL = {
    "torch-ddp": {"2-1": [2, 1], "1-2": [1, 2], "2-1-1": [2, 1, 1]},
    "tf-multiworker": {"2-1-1": [2, 1, 1]},
}
"""Numbers of processes of each stage."""


@pytest.mark.parametrize(
    ("backend", "name"), [(backend, name) for backend, names in UNEQUAL.items() for name in names]
)
def test_stages_of_several_processes_train_as_one_replica(
    alone: dict[str, Any], tmp_path: Path, backend: str, name: str
) -> None:
    """The last global batch is smaller; runs continue in stages from their checkpoints."""
    options = under({"stages": UNEQUAL[backend][name]})
    spec = {**BASE, **CASES["nothing dropped"], "data": data, "model_args": PLAIN, **options}
    dense = {**BASE, **CASES["sequential"], **options}
    tasks: Tasks = {"": (spec, followed)}
    if name == "2-1-1":
        tasks = {**tasks, "saved/sequential": (dense, partial(saving, folder=tmp_path))}
    for place in done(tasks, 1, backend):
        assert_equal(place[""], alone["plain"])
        if saved := place.get("saved/sequential"):
            assert_as(saved["whole"], alone["saved/sequential"]["whole"])
            for part in ("again", "joined"):
                assert_equal(saved[part], saved["whole"])


def test_checkpoints_lead_into_stages_of_several_processes_and_out(
    folder: Path, alone: dict[str, Any], stage_results: Sequence[dict[str, Any]], tmp_path: Path
) -> None:
    """Stages of 2, 1 and 1 processes go on from what two stages saved; data-parallel goes on from theirs."""
    by_one, dense = alone["saved/sequential"]["whole"], {**BASE, **CASES["sequential"]}
    unequal = {**dense, **under({"stages": [2, 1, 1]})}
    tasks: Tasks = {
        "into/sequential": (unequal, partial(going_on, folder=folder)),
        "saved/sequential": (unequal, partial(saving, folder=tmp_path)),
    }
    for place in done(tasks, 1):
        assert_as(place["into/sequential"], by_one)
    for replicas in (1, 2):
        work = {"out/sequential": (dense, partial(going_on, folder=tmp_path))}
        for place in done(work, replicas):
            assert_as(place["out/sequential"], by_one)


@pytest.mark.parametrize(
    ("backend", "schedule"),
    [
        ("torch-ddp", "1f1b"),
        ("tf-multiworker", "1f1b"),
        pytest.param("tf-multiworker", "2bw", marks=pytest.mark.features),
    ],
)
def test_stages_of_several_processes_drop_the_same_after_a_resume(
    tmp_path: Path, backend: str, schedule: str
) -> None:
    """On TensorFlow they drop what one process for each stage drops; torch draws per process."""

    def trained(name: str, stages: Any, steps: int, resume: Any = None) -> Any:
        options = under({"stages": stages, "schedule": schedule})
        spec = {**BASE, "model_args": {"normalised": False}, **options}
        spec |= {"epochs": None, "steps": steps, "checkpoint": {"every_steps": 2}}
        output = tmp_path / name
        return isotrain.run(
            spec, backend=backend, replicas=1, quiet=True, output=output, resume=resume
        )

    expected = trained("whole", [2, 1], 4)
    before = trained("before", [2, 1], 2)
    results = [trained("resumed", [2, 1], 4, before.run_directory)]
    if backend != "torch-ddp":
        results.append(trained("alone", 2, 4))
    for result in results:
        assert result.last_loss == pytest.approx(expected.last_loss, rel=1e-12)
        for name, weight in expected.weights.items():
            np.testing.assert_allclose(result.weights[name], weight, rtol=1e-12, atol=1e-12)


def assert_profile(found: Sequence[dict[str, Any]]) -> None:
    """Of layers that each take what the one before gives, in float64, for two samples."""
    assert [layer["name"] for layer in found] == ["dense_0", "dense_1", "dense_2", "head"]
    assert [list(layer["sources"]) for layer in found] == [[], [0], [1], [2]]
    assert [layer["weight_bytes"] for layer in found[:3]] == [8 * 7 * (n + 1) for n in (6, 7, 7)]
    given = [layer["activation_bytes"] for layer in found]
    assert given == [8 * 2 * n for n in (7, 7, 7, 4)]
    assert [layer["chunk"] for layer in found] == sorted(layer["chunk"] for layer in found)
    assert all(layer["forward"] > 0 and layer["backward"] >= 0 for layer in found)


def test_measured_plan_draws_the_stages() -> None:
    spec = {**BASE, **CASES["sequential"], **under({"cut": ["dense_2"]})}
    plan = isotrain.measured_plan(spec, backend="torch-ddp", replicas=1)
    found = plan.stages
    assert found is not None
    first, second = found.stages
    assert plan.exchanged_bytes_per_step == 4 * first.sent_bytes, "activations, or their gradients"
    assert first.layers == ("dense_0", "dense_1")
    assert second.layers == ("dense_2", "head")
    assert (first.weight_bytes, first.slot_bytes) == (8 * 7 * (7 + 8), 8 * 7 * (7 + 8))
    assert (first.sent_bytes, second.sent_bytes) == (8 * 2 * 7, 0)
    assert first.activation_bytes == 2 * 2 * (8 * 2 * 7)  # two layers, of two micro-batches
    assert [set(line) & set("0123") for line in found.drawing] == [set("0123")] * 2


def test_reentrant_checkpoints_are_planned_as_they_are_trained() -> None:
    """torch refuses their gradients to `torch.autograd.grad`, which no step calls."""
    spec = {**BASE, "model": {"torch": reentrant}, **under({"cut": ["1"]})}
    found = isotrain.measured_plan(spec, backend="torch-ddp", replicas=1).stages
    assert found is not None
    assert found.stages[1].layers == ("1", "2")
    assert found.stages[1].backward > 0


def test_plan_shows_the_mesh_and_idle_time() -> None:
    plan = isotrain.plan({**BASE, **under({})}, backend="torch-ddp", replicas=2)
    assert plan.device_mesh.sizes == {"data": 2, "stage": 2}
    assert [process.replicas for process in plan.processes] == [(0,), (0,), (1,), (1,)]
    assert plan.collective == "gloo"
    assert any("stages (2) wait 20% of a step" in note for note in plan.notes)
