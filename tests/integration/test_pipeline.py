"""Models in stages train as on one replica: every schedule, with skipped layers, in float64 to 1e-12."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.testing.launching import attempt
from isotrain.testing.native import train
from isotrain.testing.series import PATIENT, next_session

pytestmark = pytest.mark.slow


def data() -> Any:
    """The last global batch is smaller than the others: one of two replicas then has empty micro-batches."""
    generator = np.random.default_rng(7)
    inputs, targets = generator.standard_normal((31, 6)), generator.integers(0, 4, 31)
    return isotrain.DataSet((inputs[:22], targets[:22]), (inputs[22:], targets[22:]))


def skipping(normalised: bool = True) -> Any:
    """Layers skip others, one is an operation, and one takes what the model is given."""
    from keras import Input, Model, layers

    inputs = Input((6,))
    first = layers.Dense(8, activation="tanh", name="first")(inputs)
    second = layers.Dense(8, activation="tanh", kernel_regularizer="l2", name="second")(first)
    third = layers.Dense(8, name="third")(first + layers.Dropout(0.25, name="dropout")(second))
    outputs = layers.BatchNormalization(name="norm")(third) if normalised else third
    outputs = layers.ActivityRegularization(l2=0.125)(layers.concatenate([outputs, first, inputs]))
    return Model(inputs, layers.Dense(4, name="head")(outputs))


def sequential() -> Any:
    from keras import Input, Sequential, layers

    dense = [layers.Dense(7, activation="tanh", name=f"dense_{n}") for n in range(5)]
    return Sequential([Input((6,)), *dense, layers.Dense(4, name="head")])


def shared() -> Any:
    from keras import Input, Model, layers

    inputs, twice = Input((6,)), layers.Dense(6, name="twice")
    return Model(inputs, layers.Dense(4, name="head")(twice(twice(inputs))))


ADAM = {"name": "adam", "lr": 2.0**-6, "beta_1": 0.875, "beta_2": 0.96875, "epsilon": 2.0**-13}
BASE: dict[str, Any] = {
    "model": skipping,
    "data": data,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "metrics": ["accuracy"],
    "optimizer": ADAM,
    "clip": {"global_norm": 0.25},
    "precision": "float64",
    "global_batch": 8,
    "accumulate": 4,
    "epochs": 2,
    "threads": 1,
    "record": False,
    "timeouts": PATIENT,
}
CASES: dict[str, dict[str, Any]] = {
    "skipping": {},
    "sequential": {
        "model": sequential,
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "record": True,  # with layers whose evaluation is recorded; training in stages is not
    },
    "one micro-batch": {"accumulate": 1},
}
PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpipe": ("skipping", {"schedule": "gpipe"}),
    "1f1b": ("skipping", {"schedule": "1f1b"}),
    "interleaved": ("skipping", {"schedule": "interleaved", "chunks": 2}),
    "cut": ("skipping", {"cut": ["dropout"]}),
    "sequential": ("sequential", {}),
    "one micro-batch": ("one micro-batch", {}),
}


def under(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"strategy": {"name": "pipeline", "options": {"stages": 2, **options}}}


def under_way(exchange: Any) -> list[int]:
    """For how many micro-batches tensors were kept at each sending of a stage."""
    send, found = exchange.send, []

    def noting(*given: Any) -> None:
        send(*given)
        found.append(len(exchange.under_way))

    exchange.send = noting
    return found


def followed(session: isotrain.Session) -> dict[str, Any]:
    """Trains and evaluates; what each process then has."""
    exchange: Any = session.group.exchange  # type: ignore[attr-defined]
    kept = under_way(exchange) if "stage" in session.plan.mesh.sizes else []
    found = train(session)
    evaluated, state = session.evaluate(), session.read_state(("optimizer",))
    found["sending"] = max(kept, default=0)
    return {**found, "evaluated": evaluated, "train": session.metrics(), "slots": state}


def work(session: isotrain.Session, specs: Mapping[str, Any]) -> dict[str, Any]:
    """Trains several in turn; a run's work."""
    found = {}
    for name, spec in specs.items():
        with next_session(session, name, spec) as session:
            found[name] = followed(session)
    return found


def trained(specs: Mapping[str, Any], replicas: int) -> Sequence[dict[str, Any]]:
    first = next(iter(specs.values()))
    run = attempt(partial(work, specs=specs), first, "torch-ddp", replicas)
    assert run.failure is None, run.failure
    return run.returned


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Of one replica without stages, by case."""
    return trained({name: {**BASE, **changes} for name, changes in CASES.items()}, 1)[0]


@pytest.fixture(scope="module")
def staged() -> Sequence[dict[str, Any]]:
    """Of each of two stages, by pipeline."""
    specs = {n: {**BASE, **CASES[case], **under(o)} for n, (case, o) in PIPELINES.items()}
    return trained(specs, 1)


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
    alone: dict[str, Any], staged: Sequence[dict[str, Any]], name: str
) -> None:
    """Dropout drops the same, batch normalisation and clipping see the same; each keeps its own slots."""
    expected = alone[PIPELINES[name][0]]
    for stage in staged:
        assert_equal(stage[name], expected)
    slots = [set(stage[name]["slots"]) for stage in staged]
    assert set.union(*slots) == set(expected["slots"])
    common = {each.rpartition("/")[2] for each in slots[0] & slots[1]}
    assert common <= {"iteration", "learning_rate"}


def test_what_was_sent_is_let_go_when_its_gradients_come(staged: Sequence[dict[str, Any]]) -> None:
    """The first of two stages keeps all four micro-batches with gpipe, and two with 1f1b."""
    assert {name: staged[0][name]["sending"] for name in ("gpipe", "1f1b")} == {
        "gpipe": 4,
        "1f1b": 2,
    }


def test_stages_of_several_replicas_train_as_replicas() -> None:
    """On a mesh of two replicas with two stages each; a slice of the last batch is empty."""
    plain = {**BASE, "model_args": {"normalised": False}}
    expected = trained({"": plain}, 2)[0][""]
    for place in trained({"": {**plain, **under({})}}, 2):
        assert_equal(place[""], expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "objective": ({"loss": None, "objective": data, "metrics": None}, "calls the whole model"),
    "scaled": ({"precision": "float16"}, "float16|Float16"),
    "checkpoint": ({"checkpoint": {"every_steps": 2}}, "not written yet"),
    "compile": ({"compile": True}, "not compiled in staged runs"),
    "schedule": (under({"schedule": "1b1f"}), "did you mean|1f1b"),
    "chunks": (under({"chunks": 2}), "interleaved"),
    "groups": (under({"schedule": "interleaved", "chunks": 2, "stages": 3}), "a multiple"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_cannot_honour_is_refused(name: str) -> None:
    changes, told = REFUSED[name]
    fields = {**BASE, **under({}), **changes}
    with pytest.raises(isotrain.IsotrainError, match=told):
        isotrain.plan(
            {k: v for k, v in fields.items() if v is not None}, backend="torch-ddp", replicas=1
        )


def test_plan_tells_places_and_waiting() -> None:
    plan = isotrain.plan({**BASE, **under({})}, backend="torch-ddp", replicas=2)
    assert plan.mesh.sizes == {"data": 2, "stage": 2}
    assert [process.replicas for process in plan.processes] == [(0,), (0,), (1,), (1,)]
    assert plan.collective == "gloo"
    assert any("2 stages, 4 micro-batches" in remark and "20%" in remark for remark in plan.remarks)


def test_a_layer_on_both_sides_of_a_cut_is_refused() -> None:
    spec = {**BASE, "model": shared, **under({})}
    run = attempt(followed, spec, "torch-ddp", 1)
    assert run.failure is not None
    assert "twice is called on both sides of a cut" in run.failure
    run.forget()
