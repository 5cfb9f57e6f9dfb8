"""The spec's models: what they accept, what they refuse, and in which words."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotrain.adapters.common.outputs import check_loss_table
from isotrain.core.cli.argument_types import name_with_options
from isotrain.core.errors import SpecError
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.run.options import ResumeOptions
from isotrain.core.spec.field_types import Component
from isotrain.core.spec.loading import load_spec
from isotrain.core.spec.schedules import (
    SCHEDULES,
    CallableSchedule,
    CosineSchedule,
    PlateauSchedule,
)
from isotrain.core.spec.sections import (
    OPTIMIZERS,
    Adam,
    Clip,
    Evaluation,
    LoaderOptions,
    Scaling,
    Sgd,
)
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.validation import BRANCH, OTHER_TOOLS_NAMES

REQUIRED_OF_SCHEDULES: dict[str, dict[str, Any]] = {
    "step": {"every_epochs": 3, "factor": 0.1},
    "exponential": {"every_steps": 2, "factor": 0.9},
    "milestones": {"at_epochs": [1, 2]},
    "cosine-restarts": {"first_steps": 4},
}
BASE: dict[str, Any] = {
    "model": "shop.models:Net",
    "data": "shop.data:load",
    "loss": "mse",
    "optimizer": "adam",
    "global_batch_size": 32,
    "epochs": 2,
}


def make(**changes: Any) -> TrainingSpec:
    """A sound spec with some fields changed; a field set to None is left out."""
    fields = {**BASE, **changes}
    return TrainingSpec(**{name: value for name, value in fields.items() if value is not None})


def problems(**changes: Any) -> list[str]:
    """The lines of the error that `changes` cause, without the heading."""
    with pytest.raises(SpecError) as caught:
        make(**changes)
    heading, *lines = str(caught.value).splitlines()
    assert heading.startswith(("1 problem ", f"{len(lines)} problems "))
    return [line.strip() for line in lines]


def test_defaults() -> None:
    spec = make()
    assert spec.name == "run"
    assert spec.optimizer == Adam(lr=1e-3)
    assert spec.schedule.name == "constant"
    assert spec.scaling == Scaling()
    assert spec.metrics == ()
    assert (spec.shuffle, spec.drop_remainder) == (True, False)
    assert (spec.precision, spec.device, spec.strategy.name) == ("float32", "auto", "data-parallel")
    assert (spec.timeouts.silence, spec.timeouts.start, spec.timeouts.progress) == (10, 300, 300)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str) -> None:
    optimizer = make(optimizer={"name": name, "lr": 0.5, "weight_decay": 0.25}).optimizer
    assert (optimizer.name, optimizer.lr) == (name, 0.5)
    assert optimizer.weight_decay == 0.25  # type: ignore[union-attr]


def test_weight_decay_defaults() -> None:
    assert make(optimizer="adamw").optimizer.weight_decay == 4e-3  # type: ignore[union-attr]
    assert make(optimizer="adam").optimizer.weight_decay == 0.0  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(name: str) -> None:
    fields = {"name": name, **REQUIRED_OF_SCHEDULES.get(name, {})}
    schedule = make(schedule=fields).schedule
    assert (schedule.name, schedule.has_warmup) == (name, name == "one-cycle")
    if name == "one-cycle":
        assert problems(schedule={**fields, "warmup_epochs": 2})
    else:
        assert make(schedule={**fields, "warmup_epochs": 2}).schedule.has_warmup


@pytest.mark.parametrize("schedule", [math.exp, {"call": math.exp}, {"name": math.exp}])
def test_a_schedule_of_your_own_in_every_form(schedule: Any) -> None:
    spec = make(schedule=schedule)
    assert isinstance(spec.schedule, CallableSchedule)
    assert spec.to_dict()["schedule"]["call"] == "math:exp"
    assert make(schedule=spec.to_dict()["schedule"]).to_dict() == spec.to_dict()
    assert make(schedule="math:exp").to_dict() == spec.to_dict()
    warm = load_spec(spec, ["schedule.warmup_steps=3"], check_imports=False).schedule
    assert warm.has_warmup


def test_parts_given_as_objects_equal_tables() -> None:
    objects = make(optimizer=Sgd(lr=0.1, momentum=0.9), schedule=CosineSchedule(warmup_steps=5))
    tables = make(
        optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.9},
        schedule={"name": "cosine", "warmup_steps": 5},
    )
    assert objects == tables


def test_components_of_every_form() -> None:
    spec = make(
        loss={"torch": "m:loss", "tensorflow": {"name": "huber", "delta": 2.0}},
        metrics=["accuracy", math.hypot, {"name": "m:top", "k": 5}],
    )
    assert spec.for_framework("loss", "tensorflow") == Component("huber", {"delta": 2.0})
    assert spec.for_framework("loss", "torch").is_reference
    accuracy, hypot, top = spec.metrics
    assert not accuracy.is_reference
    assert (hypot.name, hypot.is_reference, hypot.label) == (math.hypot, True, "math:hypot")
    assert top.options == {"k": 5}


def test_losses_by_output_and_by_framework() -> None:
    mse, mae = Component("mse"), Component("mae")
    assert make(loss="mse").losses("torch") == {None: mse}
    assert make(loss={"torch": "mse", "tensorflow": "mae"}).losses("torch") == {None: mse}
    both = {"a": "mse", "b": {"name": "mae"}}
    weighed = make(loss=both, loss_weights={"b": 2, "a": 0.5})
    assert weighed.losses("torch") == {"a": mse, "b": mae}
    assert make(loss={"torch": both, "tensorflow": "mse"}).losses("torch") == {"a": mse, "b": mae}
    named = make(model={"torch": "m:f", "mlx": "m:f"}, loss={"torch": "mse", "mlx": "mae"})
    assert named.losses("torch") == {None: mse}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"loss": {"torch": "mse", "b": "mae"}},
            "loss: of torch, b, torch are frameworks and the others",
        ),
        ({"loss": {"tensorflow": "mse"}}, "loss: unknown framework 'torch'"),
        ({"loss": {"a": "mse"}, "loss_weights": {"b": 1.0}}, "loss_weights: given for b; .*: a"),
    ],
)
def test_ambiguous_tables_of_losses_are_refused(fields: dict[str, Any], message: str) -> None:
    spec = make(**fields)
    with pytest.raises(SpecError, match=message):
        _ = (check_loss_table(spec, "torch"), spec.losses("torch"))


def test_loss_weights_need_losses() -> None:
    with pytest.raises(SpecError, match=r"loss_weights: .*expected loss as a table"):
        make(loss="mse", loss_weights={"a": 1.0})


def test_metrics_by_output() -> None:
    spec = make(metrics={"a": ["accuracy", {"name": "auc", "num_thresholds": 5}], "b": "mae"})
    assert [(m.name, m.output) for m in spec.metrics] == [
        ("accuracy", "a"),
        ("auc", "a"),
        ("mae", "b"),
    ]
    assert make(metrics=spec.to_dict()["metrics"]).metrics == spec.metrics
    assert spec.replace(seed=3).metrics == spec.metrics


def test_weighted_metrics() -> None:
    spec = make(metrics={"a": [{"name": "mae", "weighted": True}], "b": "mae"})
    assert [metric.shown("mae") for metric in spec.metrics] == ["a_weighted_mae", "b_mae"]
    assert make(metrics=spec.to_dict()["metrics"]).metrics == spec.metrics
    with pytest.raises(SpecError, match=r"metrics\.0\.weighted: got 'yes'; expected true or false"):
        make(metrics=[{"name": "mae", "weighted": "yes"}])


def test_custom_optimizer() -> None:
    spec = make(optimizer={"custom": {"torch": "m:build"}, "lr": 0.1, "args": {"k": 1}})
    assert spec.optimizer.name == "custom"
    assert spec.optimizer.custom == {"torch": "m:build"}  # type: ignore[union-attr]


def test_data_may_be_any_object() -> None:
    arrays = (np.zeros((4, 2), "float32"), np.zeros(4))
    assert make(data=arrays).data is arrays


def test_numpy_scalars_are_numbers() -> None:
    spec = make(
        global_batch_size=np.int64(16),
        shuffle=np.bool_(False),
        optimizer={"name": "sgd", "lr": np.float32(0.5)},
    )
    assert (
        spec.to_dict()
        == make(global_batch_size=16, shuffle=False, optimizer={"name": "sgd", "lr": 0.5}).to_dict()
    )
    assert type(spec.global_batch_size) is int


def test_integers_are_numbers() -> None:
    lr = make(optimizer={"name": "sgd", "lr": 1}).optimizer.lr
    assert (lr, type(lr)) == (1.0, float)


class Built:
    """Looks like a model, and can be called as one."""

    trainable_variables = ()

    def __call__(self) -> None:
        return


ONE_PROBLEM = [
    ({"optimizer": {"name": "sdg", "lr": 0.1}}, "optimizer.name: got 'sdg'; expected one of sgd, "),
    ({"optimizer": {"name": "sdg", "lr": 0.1}}, "did you mean 'sgd'?"),
    ({"optimizer": "Adam"}, "optimizer.name: got 'Adam'; expected one of"),
    ({"optimizer": "adafactor"}, "radam; any other comes in as {custom: ...}"),
    ({"optimizer": "Adam"}, "did you mean 'adam'?"),
    (
        {"gradient_accumulation_steps": {0: 1, 9: 4}},
        "got {0: 1, 9: 4}; expected an integer >= 1",
    ),
    ({"precision": "fp8"}, "expected one of float32, float64, bfloat16, float16"),
    ({"optimizer": {"lr": 0.1}}, "optimizer.name: missing; expected one of sgd, adam"),
    ({"optimizer": 5}, "optimizer: got 5; expected the name of an optimizer"),
    ({"optimizer": "sgd"}, "optimizer.lr: missing; expected a finite number > 0"),
    ({"optimizer": {"name": "sgd", "lr": 0}}, "optimizer.lr: got 0; expected a finite number > 0"),
    ({"optimizer": {"name": "sgd", "lr": "0.1"}}, "optimizer.lr: got '0.1'; expected a finite"),
    ({"optimizer": {"name": "sgd", "lr": math.inf}}, "optimizer.lr: got inf; expected a finite"),
    ({"optimizer": {"name": "sgd", "lr": True}}, "optimizer.lr: got True; expected a finite"),
    (
        {"optimizer": {"name": "sgd", "lr": 1, "momentum": 1}},
        "got 1; expected a finite number >= 0",
    ),
    ({"optimizer": {"name": "sgd", "lr": 1, "nesterov": True}}, "optimizer.momentum: got 0;"),
    ({"optimizer": {"name": "adam", "beta1": 0.9}}, "optimizer.beta1: got 0.9; expected a field"),
    ({"optimizer": {"name": "adam", "beta1": 0.9}}, "did you mean 'beta_1'?"),
    ({"optimizer": {"custom": 3, "lr": 1}}, 'optimizer.custom: got 3; expected "package'),
    (
        {"schedule": "cosin"},
        "schedule.name: got 'cosin'; expected one of constant, step, milestones",
    ),
    ({"schedule": {"name": "step", "factor": 1}}, "schedule.every_epochs or every_steps: missing"),
    ({"schedule": {"warmup_steps": 1, "warmup_epochs": 1}}, "warmup_steps and warmup_epochs: got"),
    (
        {"scaling": {"rule": "linear"}},
        "scaling.base_batch_size: missing; expected the global batch",
    ),
    ({"scaling": "linear"}, "scaling.base_batch_size: missing"),
    ({"scaling": {"rule": "liner"}}, "expected one of none, linear, sqrt; did you mean 'linear'?"),
    ({"clip": {}}, "clip.value or norm or global_norm: missing; expected exactly one"),
    ({"clip": {"value": 1, "norm": 2}}, "clip.value and norm: got {'value': 1, 'norm': 2}"),
    ({"loss": None}, "loss or objective: missing; expected exactly one of them"),
    ({"objective": "m:f"}, "loss and objective: got {'loss': 'mse', 'objective': 'm:f'}"),
    ({"global_batch_size": None}, "global_batch_size or local_batch_size: missing"),
    ({"local_batch_size": 4}, "global_batch_size and local_batch_size: got"),
    (
        {"global_batch_size": None, "local_batch_size": 4, "min_replicas": 2},
        "min_replicas: got 2; expected global_batch_size with min_replicas",
    ),
    ({"steps": 4}, "epochs and steps: got {'epochs': 2, 'steps': 4}; expected only one of them"),
    ({"model": None}, 'model: missing; expected "package.module:name"'),
    ({"data": None}, 'data: missing; expected "package.module:name"'),
    ({"optimizer": None}, "optimizer: missing; expected a name, such as adam"),
    ({"model": "net.build"}, "model: got 'net.build'; expected \"package.module:name\""),
    ({"model": {"torch": "m:f", "tensorflow": 5}}, "model.tensorflow: got 5; expected"),
    ({"recompute": 3}, "recompute: got 3; expected a pattern of names, or a list of patterns"),
    ({"model": {}}, "model: got {}; expected a table {framework: ...}"),
    ({"model": Built()}, "expected a function that builds the model"),
    ({"model": {"torch": Built()}}, "model.torch: got <"),
    ({"model_args": [1]}, "model_args: got [1]; expected a table"),
    ({"data": {"x": [1, 2]}}, "data: got {'x': [1, 2]}; expected"),
    ({"loss": {"nme": "mse", "delta": 1}}, "loss.delta: got 1; expected a name"),
    ({"loss": np.zeros(2)}, "loss: got <numpy.ndarray float64 2>; expected a name"),
    ({"loss": ""}, "loss: got ''; expected a name"),
    ({"metrics": "accuracy"}, "metrics: got 'accuracy'; expected a list"),
    ({"metrics": ["a", {"k": 1}]}, "metrics.1.name: missing; expected a name"),
    ({"name": "a/b"}, "name: got 'a/b'; expected 1 to 100 letters"),
    ({"name": ".."}, "name: got '..'; expected"),
    ({"name": "run\n"}, "name: got 'run\\n'; expected"),
    ({"epochs": "3"}, "epochs: got '3'; expected an integer >= 1"),
    ({"epochs": 2.0}, "epochs: got 2.0; expected an integer >= 1"),
    ({"seed": 2**32}, "seed: got 4294967296; expected an integer >= 0 and < 4294967296"),
    ({"seed": -1}, "seed: got -1; expected"),
    ({"shuffle": "yes"}, "shuffle: got 'yes'; expected true or false"),
    ({"precision": "floot32"}, "precision: got 'floot32'; expected one of float32, float64"),
    ({"precision": "floot32"}, "did you mean 'float32'?"),
    ({"loss_scale": {"initial": 2.0}}, "precision: got 'float32'; expected precision float16"),
    ({"compile": True, "recompute": "a"}, "recompute: got 'a'; expected no recompute with compile"),
    ({"evaluation": 3}, "evaluation: got 3; expected a table"),
    ({"timeouts": {"start": 0}}, "timeouts.start: got 0; expected a finite number > 0"),
    ({"backend_options": {"x": 2}}, "backend_options.x: got 2; expected a table"),
    ({"strategy": {"nam": "x"}}, "strategy.nam: got 'x'; expected a field"),
    (
        {"precison": "float32"},
        "precison: got 'float32'; expected a field that exists; did you mean",
    ),
    (
        {"batch_size": 8},
        "batch_size: got 8; expected a field that exists; did you mean 'global_batch_size'",
    ),
    ({"device": "cuda"}, "device: got 'cuda'; expected one of auto, cpu, gpu; did you mean 'gpu'?"),
    ({"precision": "bf16"}, "did you mean 'bfloat16'?"),
    ({"optimizer": {"name": "sgd", "lr": 1, "learning_rate": 1}}, "did you mean 'lr'?"),
    (
        {"optimizer": {"name": "sgd", "lr": 1, "batch_size": 1}},
        "expected one of the fields lr, weight_decay",
    ),
    ({"zzzzz": 1}, "zzzzz: got 1; expected one of the fields name, model, "),
]


@pytest.mark.parametrize(("changes", "part"), ONE_PROBLEM)
def test_one_problem(changes: dict[str, Any], part: str) -> None:
    lines = problems(**changes)
    assert len([line for line in lines if part in line]) == 1, lines
    assert BRANCH not in "".join(lines)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("schedule", {"schedule": "plateau"}),
        ("schedule", {"schedule": PlateauSchedule(metric="validation_accuracy")}),
        ("early_stopping", {"early_stopping": "validation_loss"}),
        ("checkpoint.keep_best", {"checkpoint": {"keep_best": {"metric": "validation_loss"}}}),
        ("updates.a.schedule", {"updates": {"a": {"schedule": {"name": "plateau"}}}}),
    ],
)
def test_validation_metrics_need_evaluations(field: str, fields: dict[str, Any]) -> None:
    for never in ({"every_epochs": 0, "at_start": True}, Evaluation(every_epochs=0)):
        (problem,) = problems(**fields, evaluation=never)
        assert problem.startswith("evaluation: ")
        assert f"{field} looks at a metric of validation" in problem
    make(**fields, evaluation={"every_epochs": 0, "every_steps": 5})
    make(**fields, evaluation={})
    trained = {"schedule": {"name": "plateau", "metric": "accuracy"}}
    make(**trained, evaluation={"every_epochs": 0})


def test_names_of_other_tools_lead_to_names_that_exist() -> None:
    fields = {*TrainingSpec.model_fields, *Adam.model_fields}
    choices = {"gpu", "float16", "bfloat16", "float32", "float64", *SCHEDULES}
    choices |= {*get_type_hints(ResumeOptions), *plugin_manager().strategies.names()}
    tables = {"clip": Clip, "evaluation": Evaluation, "loader": LoaderOptions}
    fields |= {f"{name}.{each}" for name, table in tables.items() for each in table.model_fields}
    assert set(OTHER_TOOLS_NAMES.values()) <= fields | choices
    assert not set(OTHER_TOOLS_NAMES) & (fields | choices)
    (problem,) = problems(num_workers=2)
    assert "did you mean 'loader.workers'?" in problem


def test_all_problems_at_once() -> None:
    lines = problems(
        optimizer={"name": "sgd", "lr": -1, "momentm": 0.9},
        schedule={"name": "step", "warmup_steps": 1, "warmup_epochs": 2},
        epochs="3",
        steps=4,
        precison="float32",
        clip={"valu": 1},
        metrics=[3, 4],
    )
    paths = {line.partition(": ")[0] for line in lines}
    assert paths == {
        "optimizer.lr",
        "optimizer.momentm",
        "schedule.warmup_steps and warmup_epochs",
        "schedule.every_epochs or every_steps",
        "schedule.factor",
        "epochs",
        "epochs and steps",
        "precison",
        "clip.valu",
        "clip.value or norm or global_norm",
        "metrics.0",
        "metrics.1",
    }
    assert len(lines) == len(paths)


def test_parts_report_spec_errors_too() -> None:
    with pytest.raises(SpecError, match="lr: got -1; expected a finite number > 0"):
        Sgd(lr=-1)


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make().epochs = 3  # type: ignore[misc]


def test_resolve_global_batch() -> None:
    assert make().resolve_global_batch_size(3) == 32
    assert make(global_batch_size=None, local_batch_size=5).resolve_global_batch_size(3) == 15


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_scaling_factor(rule: str, factor: float) -> None:
    assert Scaling(rule=rule, base_batch_size=64).factor(256) == factor  # type: ignore[arg-type]


def test_a_spec_under_another_strategy() -> None:
    spec = make(strategy={"name": "local-sgd", "options": {"every": 4}})
    assert spec.with_strategy("local-sgd") is spec
    assert spec.with_strategy("gossip").strategy.options == {}
    other = {"name": "local-sgd", "options": {"every": 8, "graph": "ring", "of": [1, 2]}}
    changed = spec.with_strategy(other)
    assert changed.strategy.options == other["options"]
    assert changed.strategy.label == "local-sgd,every=8,graph=ring,of=[1, 2]"
    assert name_with_options(changed.strategy.label) == other
    with pytest.raises(SpecError, match="nam: got 'gossip'; expected a field"):
        spec.with_strategy({"nam": "gossip"})


def test_loss_scaling_only_under_float16() -> None:
    assert make().loss_scaling is None
    defaults = make(precision="float16").loss_scaling
    assert defaults is not None
    assert (defaults.initial, defaults.growth_steps) == (2.0**15, 2000)
    given_scale = make(precision="float16", loss_scale={"initial": 8}).loss_scaling
    assert given_scale is not None
    assert given_scale.initial == 8.0


def test_recomputed_layers() -> None:
    """Patterns select the outermost layer; a pattern without a layer is an error."""
    names = ["stem", "block_1", "block_1/dense", "block_10", "block_1b/dense", "head"]
    for pattern, expected in {
        "*": ["stem", "block_1", "block_10", "block_1b/dense", "head"],
        "block_1*": ["block_1", "block_10", "block_1b/dense"],
        "*/dense": ["block_1/dense", "block_1b/dense"],
    }.items():
        assert make(recompute=pattern).recomputed(names, "/") == expected
    both = make(recompute=["head", "stem"])
    assert both.recomputed(names, "/") == ["stem", "head"]
    assert make(recompute=None).recomputed(names, "/") == []
    with pytest.raises(
        SpecError, match=r"'tail' fits none of the model's layers, .* block_10, .* head"
    ):
        make(recompute=["stem", "tail"]).recomputed(names, "/")


def test_per_replica_names_are_of_non_trainable_state() -> None:
    others = ["cell/hidden", "norm/moving_mean", "norm/moving_variance"]
    for patterns, expected in {
        ("*hidden",): others[:1],
        ("norm.*", "cell/hidden"): others,
        (): [],
    }.items():
        assert make(per_replica=patterns).per_replica_names(["kernel"], others) == expected
    assert make(per_replica=None).per_replica == ()
    with pytest.raises(
        SpecError, match=r"'\*memory' fits none of .* cell/hidden, norm/moving_mean"
    ):
        make(per_replica="*memory").per_replica_names(["kernel"], others)
    with pytest.raises(SpecError, match=r"'\*' fits trainable weights, .*: kernel\. Name non-"):
        make(per_replica="*").per_replica_names(["kernel"], others)


def test_for_framework_lists_the_frameworks() -> None:
    spec = make(model={"torch": "m:f"})
    assert spec.for_framework("model", "torch") == "m:f"
    assert make().for_framework("model", "anything") == "shop.models:Net"
    with pytest.raises(SpecError, match=r"model: unknown framework 'tensorflow'.*torch"):
        spec.for_framework("model", "tensorflow")


def test_replace() -> None:
    spec = make(metrics=["accuracy", {"name": "top", "k": 2}])
    changed = spec.replace(epochs=None, steps=7)
    assert (changed.epochs, changed.steps, changed.metrics) == (None, 7, spec.metrics)
    assert spec.replace() == spec
    with pytest.raises(SpecError, match="epochs and steps"):
        spec.replace(steps=7)


def test_survives_cloudpickle_with_callables_inside() -> None:
    offset = 3
    spec = make(model=lambda width: width + offset, metrics=[{"name": lambda a, b: a - b, "k": 1}])
    copy = cloudpickle.loads(cloudpickle.dumps(spec))
    assert copy.model(4) == 7
    assert copy.metrics[0].name(5, 3) == 2
    assert copy.optimizer == spec.optimizer


def test_caller_tables_are_not_shared() -> None:
    args = {"width": 3}
    spec = make(model_args=args)
    args["width"] = 4
    assert spec.model_args == {"width": 3}


def test_every_field_is_described() -> None:
    from isotrain.core.spec import training_spec as module
    from isotrain.core.spec.validation import SpecModel

    parts = [part for part in vars(module).values() if isinstance(part, type)]
    parts = [part for part in parts if issubclass(part, SpecModel) and part is not SpecModel]
    assert TrainingSpec in parts
    lacking = [
        f"{part.__name__}.{name}"
        for part in parts
        for name, field in part.model_fields.items()
        if not field.description and (name != "name" or part is TrainingSpec)
    ]
    assert lacking == []


TEXT = st.text(st.characters(exclude_characters=BRANCH))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(TrainingSpec.model_fields)), ANYTHING, max_size=6))
def test_whatever_is_given_the_only_error_is_a_spec_error(changes: dict[str, Any]) -> None:
    refused = ""
    try:
        spec = TrainingSpec(**{**BASE, **changes})
    except SpecError as error:
        refused = str(error)
    else:
        assert spec.replace() == spec
    assert BRANCH not in refused


@pytest.mark.parametrize(
    ("metric", "larger_is_better"),
    [
        ("validation_loss", False),
        ("rmse", False),
        ("mean_squared_error_1", False),
        ("top_k_categorical_accuracy", True),
        ("validation_auc_2", True),
        ("one_hot_mean_io_u", True),
    ],
)
def test_a_metrics_name_decides_which_value_is_better(metric: str, larger_is_better: bool) -> None:
    spec = make(early_stopping=metric)
    assert spec.early_stopping is not None
    assert spec.early_stopping.larger_is_better == larger_is_better


@pytest.mark.parametrize("metric", ["jaccard_distance", "accuracy_gap", "inaccuracy", "gloss"])
def test_other_metrics_need_the_mode(metric: str) -> None:
    with pytest.raises(SpecError, match=f"whether a larger '{metric}' is better is not known"):
        make(early_stopping=metric)
    spec = make(early_stopping={"metric": metric, "mode": "max"})
    assert spec.early_stopping is not None
    assert spec.early_stopping.larger_is_better


def test_slashes_and_dots_are_alike_in_patterns_of_weights() -> None:
    for pattern in ("backbone/*", "backbone.*", "*/0/weight", "*.0.weight"):
        spec = make(initial_weights={"freeze": pattern})
        assert spec.is_frozen("backbone.0.weight"), pattern
        assert spec.is_frozen("backbone/0/weight"), pattern
        assert not spec.is_frozen("backbone_0.weight"), pattern


def test_updates_take_what_they_lack_from_the_spec() -> None:
    updates = {
        "critic": {"objective": "math:cos", "weights": "d/*", "clip": {"norm": 1.0}, "every": 5},
        "generator": {"optimizer": {"name": "sgd", "lr": 0.5}, "from_epoch": 2},
    }
    spec = make(updates=updates)
    critic, generator = spec.for_update("critic"), spec.for_update("generator")
    assert critic.loss is None
    assert critic.optimizer == spec.optimizer
    assert critic.clip is not None
    assert generator.loss == spec.loss
    assert generator.optimizer == Sgd(lr=0.5)
    assert list(spec.update_specs) == ["critic", "generator"]
    assert list(make().update_specs) == [""]
    assert spec.updates is not None
    assert [s for s in range(12) if spec.updates["critic"].is_due(s, 0)] == [4, 9]
    assert [e for e in range(4) if spec.updates["generator"].is_due(0, e)] == [2, 3]
    names = ["d/kernel", "d/bias", "g/kernel"]
    assert spec.weights_by_update(names) == {"critic": names[:2], "generator": names}


@pytest.mark.parametrize(
    ("updates", "problem"),
    [
        ({"a b": {}}, "letters, digits and _ as the name"),
        ({"a": {"objective": "math:cos", "loss": "mse"}}, "only one of them"),
        ({"a": {"evry": 2}}, "did you mean 'every'"),
    ],
)
def test_updates_are_validated(updates: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        make(updates=updates)


def test_each_update_needs_an_objective_and_an_optimizer() -> None:
    fields = {"updates": {"a": {"weights": "a/*"}}, "loss": None, "optimizer": None}
    with pytest.raises(
        SpecError, match=r"updates\.a\.objective: missing(.|\n)*updates\.a\.optimizer"
    ):
        make(**fields)


@pytest.mark.parametrize("name", ["sequential", "shuffled"])
def test_an_order_by_name_sets_shuffle(name: str) -> None:
    spec = make(order=name)
    assert spec.shuffle is (name == "shuffled")
    again = TrainingSpec(**spec.to_dict())
    assert (again.order, again.shuffle) == (spec.order, spec.shuffle)
    with pytest.raises(SpecError, match=r"shuffle: got .*; expected .*leave shuffle out"):
        make(order=name, shuffle=not spec.shuffle)


def test_orders_take_columns_and_callables() -> None:
    weighted = make(order={"name": "weighted", "weights": "math:hypot"}).order
    assert weighted.options["weights"] is math.hypot
    balanced = make(order={"name": "balanced"}).order
    assert balanced.options == {"by": "targets", "samples": None}
    called = make(order="math:hypot").order
    assert (called.name, called.options) == ("call", {"call": math.hypot})


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("lengths", r"order.name: got 'lengths'; expected one of sequential, shuffled, weighted"),
        ({"name": "weighted"}, r"order.weights: missing"),
        ({"name": "repeated", "times": 0}, r"order.times: got 0; expected an integer >= 1"),
        (
            {"name": "by-length", "lengths": "x", "buckets": [9, 4]},
            r"order.buckets: got \[9, 4\]; expected lengths in ascending order",
        ),
        ({"name": "by-length", "lengths": "x", "buckets": 4}, r"order.buckets: got 4"),
    ],
)
def test_faulty_orders_are_named(order: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make(order=order)
