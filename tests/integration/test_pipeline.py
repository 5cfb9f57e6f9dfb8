"""Models in stages train as on one replica: every schedule, with skipped layers, in float64 to 1e-12."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.checkpoint_reads import restore_own

import isotrain
from isotrain.analysis.compare import summary
from isotrain.analysis.compare.records import Span
from isotrain.core.checkpoints.safetensors_file import SafetensorsFile
from isotrain.core.contracts.state import StateKind
from isotrain.core.pipeline.partition import PipelineSplit
from isotrain.core.session.weights.weights_file import WEIGHTS
from isotrain.core.worker.fit import fit
from isotrain.testing.check_context import assert_same
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, Work, next_session
from isotrain.testing.launching import try_run
from isotrain.testing.native_equality import train

pytestmark = pytest.mark.slow


def data() -> Any:
    """The last global batch is smaller than the others."""
    generator = np.random.default_rng(7)
    inputs, targets = generator.standard_normal((31, 6)), generator.integers(0, 4, 31)
    return isotrain.DataSet((inputs[:22], targets[:22]), (inputs[22:], targets[22:]))


def short() -> Any:
    """The last global batch has as many samples as there are replicas: others of micro-batches are empty."""
    generator = np.random.default_rng(9)
    inputs, targets = generator.standard_normal((11, 6)), generator.integers(0, 4, 11)
    return isotrain.DataSet((inputs[:10], targets[:10]), (inputs[10:], targets[10:]))


def even() -> Any:
    """All global batches have one size, for which TensorFlow traces once."""
    generator = np.random.default_rng(8)
    inputs, targets = generator.standard_normal((32, 6)), generator.integers(0, 4, 32)
    return isotrain.DataSet((inputs[:24], targets[:24]), (inputs[24:], targets[24:]))


def skipping(normalised: bool = True, dropped: float = 0.25) -> Any:
    """Layers skip others, one is an operation, and one takes what the model is given."""
    from keras import Input, Model, layers
    from keras.regularizers import L2

    inputs = Input((6,))
    first = layers.Dense(8, activation="tanh", name="first")(inputs)
    second = layers.Dense(8, activation="tanh", kernel_regularizer=L2(2.0**-7), name="second")(
        first
    )
    third = layers.Dense(8, name="third")(first + layers.Dropout(dropped, name="dropout")(second))
    outputs = layers.BatchNormalization(name="norm")(third) if normalised else third
    outputs = layers.ActivityRegularization(l2=0.125)(layers.concatenate([outputs, first, inputs]))
    return Model(inputs, layers.Dense(4, name="head")(outputs))


def sequential() -> Any:
    from keras import Input, Sequential, layers

    dense = [layers.Dense(7, activation="tanh", name=f"dense_{n}") for n in range(3)]
    return Sequential([Input((6,)), *dense, layers.Dense(4, name="head")])


def modules() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
        nn.Tanh(),
        nn.Linear(8, 4),
    )


def written(names_them: bool = False) -> Any:
    """Modules that a `forward` of its own applies, one after the other."""
    from torch import Tensor, nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.bend = nn.Tanh()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)
            )
            self.head = nn.Linear(8, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.bend(self.first(inputs))
            for block in self.blocks:
                outputs = block(outputs)
            return self.head(outputs)

    class Naming(Net):
        def pipeline_modules(self) -> list[nn.Module]:
            return [self.first, self.bend, *self.blocks, self.head]

    return Naming() if names_them else Net()


def layers_by_name() -> dict[str, Any]:
    """The layers of `sequential`, built alike, for models of TensorFlow that apply them themselves."""
    from keras import layers, name_scope

    found = {f"dense_{n}": layers.Dense(7, activation="tanh", name=f"dense_{n}") for n in range(3)}
    found["head"] = layers.Dense(4, name="head")
    with name_scope("sequential"):
        for layer, width in zip(found.values(), (6, 7, 7, 7), strict=True):
            layer.build((None, width))
    return found


def layered() -> Any:
    """They as a model of Keras that has no graph."""
    import keras

    class Net(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense_0, self.dense_1, self.dense_2, self.head = layers_by_name().values()
            self.built = True

        def call(self, inputs: Any) -> Any:
            return self.head(self.dense_2(self.dense_1(self.dense_0(inputs))))

    return Net()


def module() -> Any:
    """They as a tf.Module, which also draws what changes nothing, on its last stage."""
    import tensorflow as tf

    class Dense(tf.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.kernel, self.bias = (tf.Variable(w.value, name=w.path) for w in layer.weights)

        def __call__(self, inputs: Any) -> Any:
            return inputs @ self.kernel + self.bias

    class Noise(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = tf.random.Generator.from_seed(3)

        def __call__(self, inputs: Any, training: bool = False) -> Any:
            if not training:
                return inputs
            return inputs * tf.math.ceil(self.generator.uniform([], dtype=inputs.dtype))

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            *self.blocks, self.head = map(Dense, layers_by_name().values())
            self.noise = Noise()

        def __call__(self, inputs: Any, training: bool = False) -> Any:
            for block in self.blocks:
                inputs = tf.tanh(block(inputs))
            return self.head(self.noise(inputs, training=training))

        def pipeline_modules(self) -> list[Any]:
            bent = [part for block in self.blocks for part in (block, tf.tanh)]
            return [*bent, self.noise, self.head]

    return Net()


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
    "global_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "epochs": 2,
    "threads": 1,
    "capture": False,
    "timeouts": LONG_TIMEOUTS,
}
CASES: dict[str, dict[str, Any]] = {
    "skipping": {},
    "sequential": {
        "model": sequential,
        "data": even,
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "clip": None,  # so that a sum for a mean would be seen
        "capture": True,  # with layers whose evaluation is recorded; training in stages is not
    },
    "one micro-batch": {"gradient_accumulation_steps": 1},
    "native": {"model": {"torch": modules}},
    "written": {"model": {"torch": written}},
    "nothing dropped": {"model_args": {"dropped": 0.0}, "data": even},
}
PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpipe": ("skipping", {"schedule": "gpipe"}),
    "1f1b": ("skipping", {"schedule": "1f1b"}),
    "interleaved": ("skipping", {"schedule": "interleaved", "chunks": 2}),
    "cut": ("skipping", {"cut": ["dropout"]}),
    "sequential": ("sequential", {}),
    "one micro-batch": ("one micro-batch", {}),
    "native": ("native", {}),
    "listed, interleaved": (
        "written",
        {
            "schedule": "interleaved",
            "chunks": 2,
            "cut": ["bend", "blocks.0", "head"],
            "modules": ["first", "bend", "blocks.*", "head"],
        },
    ),
    "named": ("written", {}),
}
RECOMPUTED = ("cut", "listed, interleaved")
"""Pipelines whose layers are computed again in the backward pass, with the same dropped."""


def under(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"strategy": {"name": "pipeline", "options": {"stages": 2, **options}}}


def again(name: str) -> str | None:
    return "*" if name in RECOMPUTED else None


def under_way(exchange: Any) -> list[int]:
    """For how many micro-batches tensors were kept at each sending of a stage."""
    send, found = exchange.send, []

    def noting(*given: Any) -> None:
        send(*given)
        found.append(len(exchange.pending_sends))

    exchange.send = noting
    return found


def followed(session: isotrain.Session, name: str = "") -> dict[str, Any]:
    """Trains and evaluates; what each process then has."""
    session.group.enable_action_timing()
    exchange = getattr(session.group, "communicator", None)
    kept = under_way(exchange) if hasattr(exchange, "pending_sends") else []
    found = train(session)
    evaluated, state = session.evaluate(), session.read_state(("optimizer",))
    found["sending"] = max(kept, default=0)
    found["taken"] = [(each.name, each.begin, each.end) for each in session.group.last_actions()]
    return {**found, "evaluated": evaluated, "train": session.metrics(), "slots": state}


STOP = 4
"""Steps after which a checkpoint is saved: the second epoch has begun."""
SAVED = ("skipping", "sequential")
"""Cases of which the stages save checkpoints; the latter draws nothing, and others go on as they would."""


def saving(session: isotrain.Session, name: str, *, folder: Path) -> dict[str, Any]:
    """Saves in the middle, and goes on to the end, twice; then from where all weights were everywhere.

    They are where a batch is evaluated, of which nothing else remains.
    """
    for batch in itertools.islice(session.batches(), STOP):
        session.step(batch)
    session.save(folder / name)
    whole = ended(session)
    found = {"whole": whole, "again": going_on(session, name, folder=folder)}
    session.restore(folder / name)
    session.try_metrics(next(session.batches()))
    session.save(folder / f"{name}-joined")
    return found | {"joined": going_on(session, f"{name}-joined", folder=folder)}


def saving_listed(session: isotrain.Session, name: str, *, folder: Path) -> dict[str, Any]:
    """And what is said of lists that are not the model; how large slots are before stages are known."""
    from isotrain.adapters.tensorflow.pipeline.modules import PipelineModules
    from isotrain.adapters.tensorflow.pipeline.replica_group import PipelineTrainer

    found = saving(session, name, folder=folder)
    slots = PipelineTrainer(session.spec).update.variables
    found["first slots"] = max(each.shape.num_elements() for each in slots)
    session.seek(0)
    given = next(session.batches()).slices[0][0].inputs
    program: Any = session.group.trainer  # type: ignore[attr-defined]
    for patterns in (("blocks.*", "noise"), ("blocks.*", "noise", "head")):
        try:
            cut = PipelineSplit(2, modules=patterns)
            PipelineModules(program, session.spec, cut).check_equivalence(given)
        except isotrain.SpecError as error:
            found[patterns[-1]] = str(error)
    return found


def saving_and_profiled(session: isotrain.Session, name: str, *, folder: Path) -> dict[str, Any]:
    """And what weights take here after one more step, when they have all been here."""
    found = saving(session, name, folder=folder) | {"profile": profiled(session, name)}
    session.step(next(session.batches()))
    return found | {"held": bytes_of_weights(session)}


def bytes_of_weights(session: isotrain.Session) -> int:
    program: Any = session.group.trainer  # type: ignore[attr-defined]
    if session.plan.framework == "torch":
        return sum(each.untyped_storage().nbytes() for each in program.trainable.values())
    return sum(each.read_value().numpy().nbytes for each in program.part("trainable"))


def going_on(session: isotrain.Session, name: str, *, folder: Path) -> dict[str, Any]:
    restore_own(session, folder / name)
    return ended(session)


def unsaved(session: isotrain.Session, name: str, *, folder: Path) -> dict[str, Any]:
    """Trains without any checkpoint; then from that of others."""
    return {"whole": ended(session), "again": going_on(session, name, folder=folder)}


def ended(session: isotrain.Session) -> dict[str, Any]:
    """What each process has after all the steps that are left."""
    losses = [float(session.step(batch)) for batch in session.batches()]
    found = {"loss": losses, "train": session.metrics(), "evaluated": session.evaluate()}
    kinds: dict[str, tuple[StateKind, ...]] = {
        "weights": WEIGHTS,
        "slots": ("optimizer",),
        "random": ("random",),
    }
    return found | {name: session.read_state(kind) for name, kind in kinds.items()}


def first_loss(session: isotrain.Session, name: str) -> float:
    """Of a step, in which activations and gradients go over a cut."""
    return float(session.step(next(session.batches())))


def fitted(session: isotrain.Session, name: str) -> dict[str, Any]:
    """Trained by the built-in loop, which keeps the best weights and ends early."""
    metrics = fit(session)
    found = {"steps": session.steps_done, "best": session.best_step, "metrics": metrics}
    return found | {"weights": session.read_state(WEIGHTS)}


def profiled_and_sent(session: isotrain.Session, name: str) -> dict[str, Any]:
    """The layers; and how many bytes of activations and their gradients this stage sends in a step."""
    found = {"layers": profiled(session, name)}
    exchange: Any = session.group.communicator  # type: ignore[attr-defined]
    send, sent = exchange.send, [0]

    def counting(tensor: Any, *given: Any) -> None:
        sent.append(tensor.nbytes if tensor.is_floating_point() else 0)  # whole numbers tell shapes
        send(tensor, *given)

    exchange.send = counting
    session.step(next(session.batches()))
    return {**found, "sent": sum(sent), "held": held(session)}


def held(session: isotrain.Session) -> list[int]:
    """Bytes that weights, gradients and slots take on this stage after a step."""
    program: Any = session.group.trainer  # type: ignore[attr-defined]
    weights = list(program.trainable.values())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    slots = [s for own in program.optimizer.state.values() for s in own.values() if s.dim()]
    return [
        sum(t.untyped_storage().nbytes() for t in those) for those in (weights, gradients, slots)
    ]


def profiled(session: isotrain.Session, name: str) -> list[dict[str, Any]]:
    """The layers of all stages, timed."""
    session.seek(0)
    batch = next(iter(session.batches()))
    return [asdict(layer) for layer in session.group.profile_layers(batch).layers]


FITTED = {
    "model": sequential,
    "optimizer": {"name": "sgd", "lr": 4.0},
    "clip": None,
    "epochs": 9,
    "early_stopping": {"metric": "validation_loss", "patience": 2},
}


def fitting(folder: Path) -> dict[str, Any]:
    best = {"metric": "validation_loss", "restore": True}
    return {**BASE, **FITTED, "checkpoint": {"keep_best": best, "folder": str(folder)}}


Tasks = Mapping[str, tuple[Mapping[str, Any], Work]]
"""By name: a spec, and what is done in a session of it."""


def work(session: isotrain.Session, tasks: Tasks) -> dict[str, Any]:
    """Does one after the other; a run's work."""
    found = {}
    for name, (spec, task) in tasks.items():
        with next_session(session, name.replace("/", "-"), spec) as session:
            found[name] = task(session, name.partition("/")[2])
    return found


def done(tasks: Tasks, replicas: int, backend: str = "torch-ddp") -> Sequence[dict[str, Any]]:
    first, _ = next(iter(tasks.values()))
    run = try_run(partial(work, tasks=tasks), first, backend, replicas)
    assert run.failure is None, run.failure
    return run.returned


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With checkpoints by case."""
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module")
def staged(folder: Path) -> Sequence[dict[str, Any]]:
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
def alone(folder: Path, staged: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one replica without stages, by case; and how it went on from what stages saved."""
    tasks: dict[str, Any] = {n: ({**BASE, **changes}, followed) for n, changes in CASES.items()}
    dense = {**BASE, **CASES["sequential"]}
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


def test_modules_are_timed_and_hold_and_send_what_the_plan_says(
    staged: Sequence[dict[str, Any]],
) -> None:
    for place in staged:
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
    for stage, place in enumerate(staged):
        own = sum(e["weight_bytes"] for e in place["profile"]["layers"] if e["chunk"] == stage)
        assert place["profile"]["held"] == [own, own, 2 * own], "as the plan says, and no other's"


def test_what_was_sent_is_let_go_when_its_gradients_come(staged: Sequence[dict[str, Any]]) -> None:
    """The first of two stages keeps all four micro-batches with gpipe, and two with 1f1b."""
    assert {name: staged[0][name]["sending"] for name in ("gpipe", "1f1b")} == {
        "gpipe": 4,
        "1f1b": 2,
    }


@pytest.mark.parametrize(
    ("name", "predicted"),
    [("gpipe", 20), ("1f1b", 20), ("interleaved", 11), ("one micro-batch", 50)],
)
def test_a_comparison_tells_how_long_stages_wait_and_what_is_predicted(
    staged: Sequence[dict[str, Any]], name: str, predicted: int
) -> None:
    """Of two stages and four micro-batches, of which each has two chunks on each stage, or one for all."""
    assert_told([stage[name] for stage in staged], 1, predicted)


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
def test_stages_go_on_from_their_checkpoints(staged: Sequence[dict[str, Any]], case: str) -> None:
    """To the bit; also where they had all weights when they saved."""
    for found in (stage[f"saved/{case}"] for stage in staged):
        for part, kind in itertools.product(("again", "joined"), found["whole"]):
            ours, theirs = found[part][kind], found["whole"][kind]
            if kind in ("weights", "slots", "random"):
                assert_same(ours, theirs, f"{part}: {kind}")
            else:
                assert ours == theirs, (part, kind)


def test_one_replica_goes_on_from_checkpoints_of_stages(
    alone: dict[str, Any], staged: Sequence[dict[str, Any]]
) -> None:
    by_one = alone["saved/sequential"]
    for found in (by_one["again"], *(stage["saved/sequential"]["whole"] for stage in staged)):
        assert_as(found, by_one["whole"])


def test_each_stage_writes_what_it_has(folder: Path, staged: Sequence[dict[str, Any]]) -> None:
    """What both have, such as the count of updates, the first alone."""
    files = sorted((folder / "sequential").rglob("state-*.safetensors"))
    written = [set(SafetensorsFile(path).dtypes) for path in files]
    assert len(written) == 2
    assert not written[0] & written[1]
    for stage, names in zip(staged, written, strict=True):
        slots = {n for n in stage["saved/sequential"]["whole"]["slots"] if "/sequential/" in n}
        assert slots <= names
        assert {name.partition("/")[0] for name in names} - {"optimizer"}


def test_stages_keep_the_best_weights_and_end_early(
    alone: dict[str, Any], staged: Sequence[dict[str, Any]]
) -> None:
    expected = alone["fitted"]
    assert expected["best"] < expected["steps"] < 3 * FITTED["epochs"]
    for found in (stage["fitted"] for stage in staged):
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
def replicated(folder: Path, staged: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of two replicas without stages, from the start, and from what stages saved."""
    dense, goes_on = {**BASE, **CASES["sequential"]}, partial(going_on, folder=folder)
    return done({"": (SEVERAL, followed), "saved/sequential": (dense, goes_on)}, 2)[0]


def test_stages_of_several_replicas_train_as_replicas(
    folder: Path, alone: dict[str, Any], replicated: dict[str, Any]
) -> None:
    """On a mesh of two replicas with two stages each; some micro-batches are empty."""
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
    staged = {**dense, **under({"schedule": "gpipe", **options})}
    return staged, partial(saving_and_profiled, folder=folder)


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
    """What it drops is not what torch does; of each step's four micro-batches one is empty: traced once."""
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
    """Stages of one replica, between which passes in both directions meet; as torch without any."""
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


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "objective": ({"loss": None, "objective": data, "metrics": None}, "calls the whole model"),
    "scaled": ({"precision": "float16"}, "float16|Float16"),
    "compile": ({"compile": True}, "not compiled in pipeline runs"),
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


def test_plan_tells_places_and_waiting() -> None:
    plan = isotrain.plan({**BASE, **under({})}, backend="torch-ddp", replicas=2)
    assert plan.device_mesh.sizes == {"data": 2, "stage": 2}
    assert [process.replicas for process in plan.processes] == [(0,), (0,), (1,), (1,)]
    assert plan.collective == "gloo"
    assert any("2 stages, 4 micro-batches" in note and "20%" in note for note in plan.notes)


def test_what_cannot_be_cut_is_refused() -> None:
    run = try_run(followed, {**BASE, "model": shared, **under({})}, "torch-ddp", 1)
    assert run.failure is not None
    assert "twice is called on both sides of a cut" in run.failure
    run.forget()


def tied() -> Any:
    import keras

    inputs = keras.Input((6,))
    first = keras.layers.Dense(7, name="first")
    hidden = keras.layers.Dense(7, name="second")(first(inputs))
    back = keras.layers.Lambda(
        lambda given: keras.ops.matmul(given, keras.ops.transpose(first.kernel)), name="back"
    )
    return keras.Model(inputs, keras.layers.Dense(4, name="head")(back(hidden)))


def test_a_function_that_reads_a_weight_of_another_stage_is_refused() -> None:
    fields = {**BASE, "model": tied, **under({"cut": ["second"]})}
    run = try_run(followed, fields, "torch-ddp", 1)
    assert run.failure is not None
    assert "layer 'back' reads the weight 'first/kernel' of a layer in another stage" in run.failure
    run.forget()


def cut_into(model: Any, *names: str, chunks: int = 2) -> Any:
    """Modules of a native model, cut; the rest of a program is not asked."""
    from types import SimpleNamespace

    from isotrain.adapters.torch.pipeline.modules import PipelineModules

    program: Any = SimpleNamespace(
        model=model,
        with_autocast=lambda function: function,
        call_in_eval_mode=lambda compute, *args: compute(*args),
    )
    return PipelineModules(program, PipelineSplit(chunks, modules=names))


def test_modules_that_are_not_the_model_are_refused() -> None:
    import torch
    from torch import nn

    twice, model = nn.Linear(6, 6), written()
    with pytest.raises(isotrain.UnsupportedError, match="2 is called on both sides of a cut"):
        cut_into(nn.Sequential(twice, nn.Tanh(), twice, nn.Linear(6, 4)))
    with pytest.raises(isotrain.UnsupportedError, match="is a Linear, which calls its modules"):
        cut_into(nn.Linear(6, 4))
    with pytest.raises(isotrain.SpecError, match=r"'block' matches no module.* blocks\.0\.0, "):
        cut_into(model, "first", "block")
    with pytest.raises(isotrain.SpecError, match=r"first\.weight, first\.bias is in none of them"):
        cut_into(model, "bend", "blocks.*", "head")
    found = cut_into(model, "first", "blocks.*", "head")
    with pytest.raises(isotrain.SpecError, match=r"first, blocks\.0, blocks\.1, head, one after"):
        found.check_equivalence(torch.ones(2, 6))
    cut_into(model.eval(), "first", "bend", "blocks.*", "head").check_equivalence(torch.ones(2, 6))
