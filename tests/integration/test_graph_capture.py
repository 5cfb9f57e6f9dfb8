"""A portable model on torch that is replayed from a captured graph trains as Keras alone, or says why not."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated
from integration import captured_models as models

import isotrain

pytestmark = pytest.mark.features

BASE: dict[str, Any] = {
    "model": models.dense,
    "data": models.data,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "metrics": ["accuracy"],
    "optimizer": {"custom": models.momentum, "lr": 0.0625},
    "global_batch_size": models.BATCH,
    "epochs": 6,
    "threads": 1,
}
MEASURED = [
    "accuracy",
    {"name": "sparse_top_k_categorical_accuracy", "k": 2, "weighted": True},
    {"name": "sparse_categorical_crossentropy", "from_logits": True},
    models.surprise,
]
OF_WORDS = {"data_args": {"kind": "words"}}
FULL = {"length": 2 * models.BATCH, "evaluated": models.BATCH}
"""All batches have one size: for cases in which another one is recorded like that of `dense`."""
OBJECTIVE = {"objective": models.squares, "loss": None, "metrics": []}
RECORDED: dict[str, dict[str, Any]] = {
    "dense": {},
    "float64": {"precision": "float64", "data_args": FULL},
    "bfloat16": {"precision": "bfloat16", "data_args": FULL},
    "float16": {"precision": "float16", "data_args": FULL},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 3},
    "clipped": {"clip": {"global_norm": 0.125}, "data_args": FULL},
    "dropout": {"model": models.dropout},
    "seeded dropout": {"model": models.dropout, "model_args": {"seed": 7}, "data_args": FULL},
    "noise": {"model": models.noise},
    "penalised": {"model": models.penalised},
    "image": {"model": models.image, "data_args": {"kind": "image"}, "precision": "float64"},
    "residual": {
        "model": models.residual,
        "data_args": {"kind": "image", **FULL},
        "precision": "float64",
    },
    "words": {"model": models.words, **OF_WORDS},
    "attention": {"model": models.attention, "data_args": {"kind": "words", **FULL}},
    "pair": {"model": models.pair, "data_args": {"kind": "pair"}},
    "by shape": {"model": models.by_shape},
    "without gradients": {"model": models.with_a_pass_without_gradients},
    "objective": OBJECTIVE,
    "own loss": {"loss": models.own_loss, "metrics": [], "data_args": FULL},
    "measured": {"metrics": MEASURED, "class_weight": {1: 3.0, 2: 0.5}},
    "outputs": {
        "model": models.of_two,
        "data_args": {"kind": "two"},
        "loss": {"left": models.called_loss, "right": "mean_squared_error"},
        "loss_weights": {"left": 0.5, "right": 2.0},
        "metrics": {"left": ["mean_absolute_error"]},
    },
}
EPOCHS = f"{Path(__file__).with_name('double_update_metrics.py')}:Counting"
OVERLAP = {"name": "mean_io_u", "num_classes": 4, "sparse_y_pred": False}
LEFT: dict[str, tuple[Any, str]] = {
    "by calls": (
        models.COUNTING,
        f"{models.__name__}.Counting>: a call changes an attribute: Counting: calls",
    ),
    "by values": (OVERLAP, "mean_io_u: Python depends on the value of a tensor"),
    "by epochs": (
        EPOCHS,
        "counting: an attribute changes between steps: counting (Counting): epochs",
    ),
}
"""Metrics that Keras computes while the others are recorded, and why."""
REFUSED: dict[str, tuple[Any, str]] = {
    "by value": (models.by_value, "in the layer Own, Python depends on the value of a tensor"),
    "by count": (models.by_count, "a call changes an attribute: own (Own): calls"),
    "by NumPy": (models.by_numpy, "random numbers from Python's or NumPy's"),
    "through NumPy": (
        models.through_numpy,
        "in the layer Own, Python depends on the value of a tensor",
    ),
    "own gradient": (models.with_own_gradient, "the gradients differ from those of a step"),
    "hooked": (models.hooked, "a hook is registered"),
}

BY_VARIABLE = {
    "global": "a call changes a variable: by_variable.<locals>.call: TOTALS{calls}",
    "class": "a call changes a variable: Counted: total",
    "closure": "a call changes a variable: by_variable.<locals>.count: calls",
    "generator": "a call changes a variable: own (Own): draws",
    "iterator": "a call may advance an iterator: own (Own): turns",
}
"""State that is in no attribute, or in none that can be compared; and why steps are not replayed."""


def nothing(session: isotrain.Session) -> None:
    """What most do between steps."""


def end_epochs(session: isotrain.Session) -> None:
    """Lets metrics start anew, more often than a model may change."""
    if session.steps_done % 2:
        session.metrics()


def set_attribute(session: isotrain.Session) -> None:
    """Changes a layer in the middle of the run, in a way that can be seen."""
    if session.steps_done == 8:
        session.group.model.layers[1].scale = 3.0  # type: ignore[attr-defined]


def set_setting(session: isotrain.Session, step: int) -> None:
    """Changes what a layer does in a way that nobody sees."""
    models.SETTINGS["scale"] = 3.0 if session.steps_done >= step else 1.0


def in_layer(change: Callable[[Any], None]) -> Callable[[isotrain.Session], None]:
    """Changes what a layer holds in the middle of the run."""

    def between(session: isotrain.Session) -> None:
        if session.steps_done == 8:
            change(session.group.model.layers[1])  # type: ignore[attr-defined]

    return between


def anneal(session: isotrain.Session) -> None:
    """Changes an attribute of the loss in the middle of the run."""
    models.ANNEALED.weight = 3.0 if session.steps_done >= 8 else 1.0


def annealed(capture: bool) -> dict[str, Any]:
    """Trains with a loss that somebody changes during the run."""
    models.ANNEALED.weight = 1.0
    return train({"loss": models.ANNEALED, "metrics": [], "capture": capture}, anneal)


HELD: dict[str, Callable[[Any], None]] = {
    "dict": lambda layer: layer.options.update({"scale": 3.0}),
    "list": lambda layer: layer.options["more"].__setitem__(0, 3.0),
    "tensor": lambda layer: layer.held.fill_(2.0),
    "array": lambda layer: layer.array.fill(3.0),
}
"""Changes in place of what a layer's attributes hold: each makes it compute three times as much."""

CHANGED: dict[str, tuple[Any, list[str]]] = {
    "attribute": (set_attribute, []),
    "stale at once": (
        functools.partial(set_setting, step=2),
        ["the loss differs from that of a step by Keras"],
    ),
    "stale later": (
        functools.partial(set_setting, step=9),
        ["differs from that of a step by Keras, seen at use 16 of the captured graph"],
    ),
}
"""What changes a model while it is trained, and what is said of it."""


def train(changes: dict[str, Any], between: Any = nothing, evaluations: int = 3) -> dict[str, Any]:
    """Trains and evaluates; losses, state and metrics, and why steps were not replayed.

    The first evaluation meets its batches, the second records them, and the third replays.
    """
    given = {**BASE, **changes}
    fields = {name: value for name, value in given.items() if value is not None}
    models.CALLS.clear()
    models.COUNTING.calls = 0
    models.SETTINGS["scale"] = 1.0
    with (
        warnings.catch_warnings(record=True) as warned,
        isotrain.open_session(fields, backend="torch-ddp", replicas=1) as session,
    ):
        warnings.simplefilter("always")
        evaluated = [session.evaluate() for _ in range(min(evaluations, 1))]
        losses = []
        for batch in session.batches():
            between(session)
            losses.append(float(session.step(batch)))
        evaluated += [session.evaluate() for _ in range(evaluations - 1)]
        program: Any = session.group.trainer  # type: ignore[attr-defined]
        phases = (program.training, program.evaluation)
        records = [len(getattr(each, "graphs", ())) for each in phases]
        kept = getattr(program.training, "graphs", {}).values()
        nodes = [node for each in kept for node in each.traced_graph.graph.graph.nodes]
        return {
            "losses": losses,
            "metrics": session.metrics(),
            "evaluated": evaluated,
            "state": session.read_state(),
            "warned": [str(each.message) for each in warned if "replayed" in str(each.message)],
            "records": records,
            "exact": [each.is_exact for each in kept],
            "measured": sorted(
                {getattr(each.traced_graph.predictions, "metric_indices", ()) for each in kept}
            ),
            "calls": len(models.CALLS),
            "operations": [str(node.target).removeprefix("aten.") for node in nodes],
        }


_ADAM = {"name": "adam", "lr": 2.0**-6, "beta_1": 0.875, "beta_2": 0.96875, "epsilon": 2.0**-13}
_RMSPROP = {"name": "rmsprop", "lr": 2.0**-6, "rho": 0.875, "epsilon": 2.0**-10}
UPDATED: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.125}},
    "momentum": {"optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.875}},
    "nesterov": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "sgd-decay": {"optimizer": {"name": "sgd", "lr": 0.125, "weight_decay": 0.0625}},
    "adam": {"optimizer": _ADAM},
    "adam-decay": {"optimizer": {**_ADAM, "weight_decay": 0.125}},
    "amsgrad": {"optimizer": {**_ADAM, "amsgrad": True, "lr": 0.25}},
    "adamw": {"optimizer": {**_ADAM, "name": "adamw", "weight_decay": 0.0625}},
    "rmsprop": {"optimizer": _RMSPROP},
    "rmsprop-centered": {"optimizer": {**_RMSPROP, "momentum": 0.5, "centered": True}},
    "adagrad": {"optimizer": {"name": "adagrad", "lr": 0.125}},
    "lamb": {"optimizer": {**_ADAM, "name": "lamb"}},
    "muon": {"optimizer": {**_ADAM, "name": "muon", "weight_decay": 0.125}},
    "nadam": {"optimizer": {**_ADAM, "name": "nadam"}},
    "radam": {"optimizer": {**_ADAM, "name": "radam", "beta_2": 0.875}},
    "clip-value": {"clip": {"value": 0.0625}, "optimizer": _ADAM},
    "clip-norm": {"clip": {"norm": 0.125}, "optimizer": _ADAM},
    "clip-global-norm": {"clip": {"global_norm": 0.125}, "optimizer": _ADAM},
    "cosine": {"schedule": {"name": "cosine", "warmup_steps": 2}, "optimizer": _ADAM},
    "image": {"model": models.image, "data_args": {"kind": "image"}, "optimizer": _ADAM},
    "constrained": {"model": models.constrained, "optimizer": _ADAM},
}
"""Specs whose update is not Keras' own code; of what is trained, only steps of one size."""


def train_all(session: isotrain.Session) -> dict[str, Any]:
    """Trains every case, with and without a capture."""
    session.close()
    cases = {**RECORDED, **{name: {"model": model} for name, (model, _) in REFUSED.items()}}
    found = {
        name: [train({**changes, "capture": record}) for record in (True, False)]
        for name, changes in cases.items()
    }
    for kind in BY_VARIABLE:
        found[f"by {kind}"] = [
            train({"model": models.by_variable, "model_args": {"kind": kind}, "capture": record})
            for record in (True, False)
        ]
    left = [metric for metric, _ in LEFT.values()]
    metrics = {"metrics": ["accuracy", *left, "sparse_categorical_crossentropy"]}
    ways = ({**metrics, "capture": record} for record in (True, False))
    found["left"] = [train(way, end_epochs) for way in ways]
    for name, changes in UPDATED.items():
        wide = {"precision": "float64", "drop_remainder": True, **changes}
        found[f"update {name}"] = [
            train({**wide, "capture": record}, evaluations=0) for record in (True, False)
        ]
    rare = {"data_args": {"kind": "rare"}, "global_batch_size": 2, "epochs": 1, "shuffle": False}
    for way in models.LEAVES:
        found[f"rare {way}"] = train({**rare, "model": models.rarely, "model_args": {"way": way}})
    found["rare"] = train({**rare, "model": models.rarely, "capture": False})
    holding = {"model": models.holding, "data_args": FULL}
    for name, change in HELD.items():
        found[f"held {name}"] = train(holding, in_layer(change))
    found["held"] = train({**holding, "capture": False}, in_layer(HELD["dict"]))
    found["annealed"] = [annealed(capture=record) for record in (True, False)]
    measured = {"epochs": None, "steps": 20, "global_batch_size": 4, "metrics": [models.by_setting]}
    stale = functools.partial(set_setting, step=9)
    highest = {**measured, "metrics": [models.highest(), models.huge]}
    found["highest"] = [train({**highest, "capture": r}) for r in (True, False)]
    found["stale metric"] = [train({**measured, "capture": r}, stale) for r in (True, False)]
    scaled = {"model": models.scaled, "epochs": None, "steps": 40, "global_batch_size": 4}
    for name, (between, _) in CHANGED.items():
        found[name] = [train({**scaled, "capture": r}, between) for r in (True, False)]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all trainings, in one process."""
    return dict(run_isolated(train_all, BASE, "torch-ddp", tmp_path_factory.mktemp("runs") / "run"))


NEAR = {"float64": 1e-12, "float32": 1e-4}
"""Of the largest number of a tensor, after six epochs; other precisions round more roughly."""


def assert_near(one: dict[str, Any], other: dict[str, Any], bound: float) -> None:
    """Losses and states agree up to what other operations round otherwise."""
    np.testing.assert_allclose(one["losses"], other["losses"], rtol=bound)
    assert one["state"].keys() == other["state"].keys()
    for name, value in other["state"].items():
        scale = max(2.0**-7, float(np.abs(value).max()))
        assert np.abs(one["state"][name] - value).max() <= bound * scale, name
    for ours, theirs in zip(one["evaluated"], other["evaluated"], strict=True):
        assert list(ours) == list(theirs)
        np.testing.assert_allclose([*ours.values()], [*theirs.values()], rtol=bound)
    assert list(one["metrics"]) == list(other["metrics"])
    found = [[*each["metrics"].values()] for each in (one, other)]
    np.testing.assert_allclose(*found, rtol=bound)


@pytest.mark.kernels
@pytest.mark.parametrize("name", RECORDED)
def test_a_capture_computes_what_keras_does(found: dict[str, Any], name: str) -> None:
    """Most cases include the smaller last batch, in training and evaluation; random numbers are the same.

    What is replayed proves equal to the bit before faster operations take its place: see `_check`.
    """
    replayed, eager = found[name]
    assert not replayed["warned"]
    assert min(replayed["records"]) >= 1
    assert eager["records"] == [0, 0]
    assert_near(replayed, eager, NEAR.get(RECORDED[name].get("precision", "float32"), 3e-2))


@pytest.mark.parametrize("name", RECORDED)
def test_metrics_are_captured(found: dict[str, Any], name: str) -> None:
    count = len(RECORDED[name].get("metrics", BASE["metrics"])) + 2 * (name == "outputs")
    places = tuple(range(count))
    assert [*map(tuple, found[name][0]["measured"])] == [places]


def test_unsupported_metrics_are_left_out_of_the_capture(found: dict[str, Any]) -> None:
    """Only these metrics are left out, at capture or later; everything else is replayed."""
    replayed, eager = found["left"]
    assert [*map(tuple, replayed["measured"])] == [(0, len(LEFT) + 1)]
    assert min(replayed["records"]) >= 1
    assert_near(replayed, eager, NEAR["float32"])


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("phase", ["training", "evaluation"])
def test_a_note_says_why_a_metric_is_left_out(found: dict[str, Any], phase: str, name: str) -> None:
    told = f"metrics of {phase} steps are not replayed, but computed by Keras: "
    warned = found["left"][0]["warned"]
    parts = [part for text in warned if text.startswith(told) for part in text.split("; ")]
    assert [part.removeprefix(told).lstrip("<") for part in parts].count(LEFT[name][1]) == 1


def test_the_loss_of_each_output_is_computed_once(found: dict[str, Any]) -> None:
    """It is computed once beside the metrics: in each of two captures, and by Keras."""
    replayed, eager = found["outputs"]
    assert replayed["operations"].count("log1p.default") == 2
    assert eager["calls"] == len(eager["losses"]) + 2 * len(eager["evaluated"])


def test_a_metric_without_sums_is_left_to_keras(found: dict[str, Any]) -> None:
    replayed, eager = found["highest"]
    told = sorted(text.partition(" steps are not replayed, but ") for text in replayed["warned"])
    assert [phase for phase, *_ in told] == ["metrics of evaluation", "metrics of training"]
    why = "computed by Keras: highest: it differs from that of a step by Keras"
    assert all(text == why for *_, text in told)
    assert [*map(tuple, replayed["measured"])] == [(1,)]
    assert_near(replayed, eager, NEAR["float32"])


def test_a_stale_metric_is_left_to_keras(found: dict[str, Any]) -> None:
    """A comparison finds it; the steps themselves are still replayed."""
    replayed, eager = found["stale metric"]
    (told,) = [text for text in replayed["warned"] if "training" in text]
    assert told.startswith("metrics of training steps are not replayed")
    assert "seen at use 16 of the captured graph; at use 1 they agreed" in told
    assert min(replayed["records"]) >= 1
    assert_near({**replayed, "metrics": {}}, {**eager, "metrics": {}}, NEAR["float32"])


PLACED = {
    "image": (["batch_norm.default"], ["rsqrt_.default", "square.default"]),
    "residual": (
        ["batch_norm.default", "mm.default"],
        ["rsqrt_.default", "square.default", "pad.default"],
    ),
    "dense": (["addmm.default"], ["matmul.default"]),
    "attention": (["addmm.default"], ["einsum.default", "matmul.default"]),
}
"""Operations that take the place of Keras', and those whose place they take."""


@pytest.mark.parametrize("name", PLACED)
def test_faster_operations_replace_those_of_keras(found: dict[str, Any], name: str) -> None:
    """Convolutions and products that pad and add their bias, and one normalisation, are replaced.

    Images keep their memory layout, and small ones are multiplied by their kernels.
    """
    assert set(found[name][0]["exact"]) == {False}
    used, replaced = PLACED[name]
    assert set(used) <= set(found[name][0]["operations"])
    assert not set(replaced) & set(found[name][0]["operations"])


def test_growing_rounding_is_no_wrong_capture() -> None:
    """Inputs are rounded in another way; deep networks may lose as many digits as these do."""
    import torch

    from isotrain.adapters.torch.graph.verify import Outcome

    def outcome(loss: float) -> Outcome:
        return Outcome(torch.tensor(loss), [], [], [], [])

    expected, rounded = outcome(1.0), outcome(1.001)
    assert expected.difference(outcome(1.002), exact=False) is not None
    assert expected.difference(outcome(1.002), exact=False, rounded=rounded) is None
    assert expected.difference(outcome(1.05), exact=False, rounded=rounded) is not None


@pytest.mark.parametrize("name", REFUSED)
def test_untraceable_models_are_computed_by_keras(found: dict[str, Any], name: str) -> None:
    """The result is the same, and one note says why."""
    replayed, eager = found[name]
    phases = [text.partition(" ")[0] for text in replayed["warned"]]
    assert sorted(phases) in (["evaluation", "training"], ["training"])
    assert all(REFUSED[name][1] in text for text in replayed["warned"]), replayed["warned"]
    if name != "by NumPy":  # whose numbers differ from run to run
        assert_near(replayed, eager, NEAR["float32"])


@pytest.mark.parametrize("kind", BY_VARIABLE)
def test_state_in_variables_is_left_to_keras(found: dict[str, Any], kind: str) -> None:
    """The trial of a capture changes nothing: the numbers are those without it, to the bit."""
    replayed, eager = found[f"by {kind}"]
    assert all(BY_VARIABLE[kind] in text for text in replayed["warned"]), replayed["warned"]
    assert {text.partition(" ")[0] for text in replayed["warned"]} == {"training", "evaluation"}
    assert replayed["losses"] == eager["losses"]
    assert replayed["evaluated"] == eager["evaluated"]


@pytest.mark.parametrize("way", models.LEAVES)
def test_data_dependent_branches_are_taken(found: dict[str, Any], way: str) -> None:
    """Values that leave torch are noticed where they leave."""
    replayed = found[f"rare {way}"]
    told = "the output shape of" if way in ("nonzero", "mask") else REFUSED["by value"][1]
    assert told in replayed["warned"][0], replayed["warned"]
    assert_near(replayed, found["rare"], NEAR["float32"])


@pytest.mark.parametrize("name", HELD)
def test_in_place_changes_of_a_layers_state_are_seen(found: dict[str, Any], name: str) -> None:
    """Containers, tensors and arrays are captured anew from the next step on."""
    assert not found[f"held {name}"]["warned"]
    assert min(found[f"held {name}"]["records"]) >= 1
    assert_near(found[f"held {name}"], found["held"], NEAR["float32"])


def test_a_changed_attribute_of_the_loss_is_seen(found: dict[str, Any]) -> None:
    """A capture depends on more than layers."""
    replayed, eager = found["annealed"]
    assert not replayed["warned"]
    assert min(replayed["records"]) >= 1
    assert_near(replayed, eager, NEAR["float32"])


def test_a_changed_attribute_is_captured_anew(found: dict[str, Any]) -> None:
    """The very next step has the new value."""
    replayed, eager = found["attribute"]
    assert not replayed["warned"]
    assert_near(replayed, eager, NEAR["float32"])
    assert replayed["losses"] != found["stale later"][1]["losses"]


@pytest.mark.parametrize("name", ["stale at once", "stale later"])
def test_a_stale_capture_is_found(found: dict[str, Any], name: str) -> None:
    """A comparison with a step of Keras finds it, at its first use or a later one."""
    replayed, eager = found[name]
    told = [text for text in replayed["warned"] if text.startswith("training")]
    assert len(told) == 1
    assert CHANGED[name][1][0] in told[0]
    until = 40 if name == "stale at once" else 9
    np.testing.assert_allclose(replayed["losses"][:until], eager["losses"][:until], rtol=1e-4)


@pytest.mark.kernels
@pytest.mark.parametrize("name", UPDATED)
def test_updates_are_those_of_keras(found: dict[str, Any], name: str) -> None:
    """Weights and slots agree in float64 to 1e-12, and so does the optimizer's count of updates."""
    ours, keras = (each["state"] for each in found[f"update {name}"])
    assert ours.keys() == keras.keys()
    for key, value in keras.items():
        scale = max(2.0**-7, float(np.abs(value).max()))  # some are nothing but rounding
        assert np.abs(ours[key] - value).max() <= 1e-12 * scale, key
    count = next(value for key, value in ours.items() if key.endswith("iteration"))
    assert int(count) == len(found[f"update {name}"][0]["losses"])


def test_plan_and_check_say_what_is_not_captured() -> None:
    """They say it before training, for training and evaluation each."""
    spec = {**BASE, "model": models.by_value}
    notes = isotrain.measured_plan(spec, backend="torch-ddp", replicas=1).notes
    found = isotrain.check(spec, backends=["torch-ddp"], replicas=[1])
    details = [finding.case for finding in found if finding.code == "ISO503"]
    for told in (notes, details):
        phases = [text.partition(" ")[0] for text in told]
        assert phases == ["training", "evaluation"]
        assert all(REFUSED["by value"][1] in text for text in told)
    assert not isotrain.measured_plan(BASE, backend="torch-ddp", replicas=1).notes


def test_plan_says_which_metrics_are_not_captured() -> None:
    """Of the steps it says only that they are captured."""
    fields = {**BASE, "metrics": ["accuracy", OVERLAP]}
    notes = isotrain.measured_plan(fields, backend="torch-ddp", replicas=1).notes
    told = "steps are not replayed, but computed by Keras: mean_io_u: Python depends on the value"
    assert [note.partition(f" {told}")[0] for note in notes] == [
        "metrics of training",
        "metrics of evaluation",
    ]


def test_plan_says_that_random_layers_are_not_compiled() -> None:
    fields = {**BASE, "model": models.dropout, "compile": True}
    notes = isotrain.measured_plan(fields, backend="torch-ddp", replicas=1).notes
    told = "training steps are not compiled, but replayed as they are"
    assert [told in note for note in notes].count(True) == 1, notes


def refusal_of_a_failed_replay(session: isotrain.Session) -> BaseException | None:
    """What the error that Keras raises in place of a failed replay was raised while handling."""

    class Failing:
        def __call__(self, inputs: Any, targets: Any) -> Any:
            raise RuntimeError("the graph")

    def refusing(inputs: Any, targets: Any) -> Any:
        raise isotrain.SpecError("by Keras")

    batches = session.batches()
    for _ in range(4):
        session.step(next(batches))
    cache = session.group.trainer.training  # type: ignore[attr-defined]
    (captured,) = cache.graphs.values()
    captured.traced_graph, cache._compute = Failing(), refusing
    with pytest.raises(isotrain.SpecError, match="by Keras") as refused:
        session.step(next(batches))
    return refused.value.__context__


def test_an_error_in_place_of_a_failed_replay_has_no_other_before_it(tmp_path: Path) -> None:
    spec = {**BASE, "data_args": FULL}
    assert run_isolated(refusal_of_a_failed_replay, spec, "torch-ddp", tmp_path / "run") is None
