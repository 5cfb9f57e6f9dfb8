"""Every named loss and metric gives what plain Keras gives on all samples, however they are split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.common.spec_components import snake_case
from isotrain.adapters.keras import builtin_names as keras_names

SAMPLES, CLASSES = 12, 3
CUTS = ((0, 5), (5, 12))
OPTIONS: dict[str, dict[str, Any]] = {
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0, 1]},
    "MeanIoU": {"num_classes": CLASSES},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 1]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
}
CLASSES_AND_SCORES = {
    "CategoricalGeneralizedCrossEntropy",
    *("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"),
    "SparseTopKCategoricalAccuracy",
}
CLASSES_AND_CLASSES = {"IoU", "MeanIoU"}
FLAT = ("mse", "mean_absolute_error", "log_cosh_error", "r2_score", "auc")
"""Metrics that are tried with one number per sample, too."""


def samples(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Targets and predictions of the kind that a loss or metric of that name takes."""
    random = np.random.default_rng(3)
    scores = random.random((SAMPLES, CLASSES)) + 0.125
    scores /= scores.sum(1, keepdims=True)
    labels = np.arange(SAMPLES) % CLASSES
    if name in CLASSES_AND_SCORES:
        return labels, scores
    if name in CLASSES_AND_CLASSES:
        return labels, np.arange(SAMPLES) // 2 % CLASSES
    if name == "Circle":
        return labels, scores / np.linalg.norm(scores, axis=1, keepdims=True)
    return np.eye(CLASSES)[labels], scores


def spec(**fields: Any) -> dict[str, Any]:
    return {
        "model": dense,
        "data": lambda: (np.ones((4, 3)), np.ones((4, 1))),
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.5},
        "precision": "float64",
        "global_batch_size": 4,
        "epochs": 1,
        "threads": 1,
        **fields,
    }


def dense() -> Any:
    import keras

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def by_name(session: isotrain.Session) -> dict[str, Any]:
    """What isotrain and plain Keras give for every name, and the names that Keras has."""
    import keras

    from isotrain.adapters.keras import losses as keras_losses
    from isotrain.adapters.keras import metrics as keras_metrics

    place = session.group.to_device

    def options(field: str, name: str) -> Any:
        return session.spec.replace(**{field: name})

    def metric(given: Any, name: str, shaped: Any = lambda values: values) -> dict[str, float]:
        """Over slices whose metrics are added up, as replicas do."""
        targets, predictions = samples(name)
        parts = []
        for start, stop in CUTS:
            (made,) = keras_metrics.build_metrics(options("metrics", [given]), "torch")
            cut = (place(shaped(each[start:stop])) for each in (targets, predictions))
            keras_metrics.update_metrics([made], *cut)
            parts.append(made)
        for one, other in zip(parts[0].variables, parts[1].variables, strict=True):
            one.assign(one.value + other.value)
        return keras_metrics.named_results("value", parts[0].result())

    def plain_metric(cls: str, shaped: Any = lambda values: values) -> dict[str, float]:
        made = getattr(keras.metrics, cls)(**OPTIONS.get(cls, {}))
        made.update_state(*(place(shaped(each)) for each in samples(cls)))
        return keras_metrics.named_results("value", made.result())

    def loss(name: str) -> float:
        """The mean over slices by their samples."""
        made = keras_metrics.build_losses(options("loss", snake_case(name)), "torch")[None]
        targets, predictions = samples(name)
        total = 0.0
        for start, stop in CUTS:
            value = made(place(targets[start:stop]), place(predictions[start:stop]))
            total += float(value) * (stop - start)
        return total / SAMPLES

    def plain_loss(cls: str) -> float:
        return float(getattr(keras.losses, cls)()(*(place(each) for each in samples(cls))))

    def refusal(call: Any, *arguments: Any) -> str:
        with pytest.raises(isotrain.SpecError) as refused:
            call(*arguments)
        return str(refused.value)

    def of_classes(field: str, name: str, count: int = SAMPLES) -> str:
        """What is said of classes where scores for each are expected."""
        given = samples("SparseCategoricalAccuracy")
        labels, scores = (place(each[:count]) for each in given)
        if field == "metrics":
            made = keras_metrics.build_metrics(options("metrics", [name]), "torch")
            return refusal(keras_metrics.update_metrics, made, labels, scores)
        spec = options("loss", name)
        losses = keras_losses.build_output_losses(spec, "torch")
        parts = keras_losses.loss_terms(losses, spec, OutputSelector())
        return refusal(parts, labels, scores)

    class Mistaken(keras.losses.Loss):
        """A person's own, with a mistake in it."""

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return int("a person's mistake")

    def mistake() -> str:
        """What is said of it."""
        mistaken = {None: keras_losses.PerOutputLoss(Mistaken(), None)}
        parts = keras_losses.loss_terms(mistaken, session.spec, OutputSelector())
        with pytest.raises(ValueError, match="mistake") as raised:
            parts(*map(place, samples("MeanSquaredError")))
        return str(raised.value)

    def column(values: np.ndarray) -> np.ndarray:
        return values[:, :1]

    def flat(values: np.ndarray) -> np.ndarray:
        return values[:, 0]

    def names(module: Any, base: type) -> list[str]:
        classes = (c for c in vars(module).values() if isinstance(c, type) and issubclass(c, base))
        return sorted(c.__name__ for c in classes if c is not base)

    metrics = {
        name: (
            metric({"name": snake_case(name), **OPTIONS.get(name, {})}, name),
            plain_metric(name),
        )
        for name in keras_names.METRICS
        if name != "Accuracy"  # as in compile, it goes by the shapes
    }
    for name in FLAT:
        cls = keras_names.class_name(name, "metrics")
        metrics[f"{name} of one number"] = (metric(name, cls, flat), plain_metric(cls, column))
    return {
        "metrics": metrics,
        "losses": {n: (loss(n), plain_loss(n)) for n in keras_names.LOSSES if n in MEANS},
        "no numbers": [
            refusal(keras_metrics.float64_results, "mine", each) for each in ("good", {"b": None})
        ],
        "f1_score": of_classes("metrics", "f1_score"),
        "categorical_crossentropy": of_classes("loss", "categorical_crossentropy"),
        "as many samples as classes": [
            of_classes(field, name, CLASSES) for field in ("loss", "metrics") for name in BROADCAST
        ],
        "categorical_accuracy": of_classes("metrics", "categorical_accuracy"),
        "mistake": mistake(),
        "loss names": names(keras.losses, keras.losses.Loss),
        "metric names": names(keras.metrics, keras.metrics.Metric),
    }


BROADCAST = ("mean_squared_error", "kl_divergence", "categorical_hinge")
"""They take classes in place of scores where there are as many samples as classes."""
MEANS = set(keras_names.LOSSES) - {"CTC", "Circle", "Dice", "Tversky"}
"""Losses that are means over samples; those of these names join the samples of a batch."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    returned: dict[str, Any] = isotrain.launch(
        by_name,
        spec(),
        backend="torch-ddp",
        output=tmp_path_factory.mktemp("names") / "run",
        on_event=lambda event: None,
    )[0]
    return returned


@pytest.mark.slow
def test_metrics_are_those_of_keras(found: dict[str, Any]) -> None:
    for name, (ours, keras) in found["metrics"].items():
        assert ours == pytest.approx(keras, rel=1e-6), name


@pytest.mark.slow
def test_a_metric_with_several_values_has_a_name_for_each(found: dict[str, Any]) -> None:
    ours, _ = found["metrics"]["F1Score"]
    assert list(ours) == ["value/0", "value/1", "value/2"]


@pytest.mark.slow
def test_a_metric_without_a_number_is_refused_by_name(found: dict[str, Any]) -> None:
    text, nothing = found["no numbers"]
    assert "metrics: the result of 'mine' is 'str'; expected a number" in text
    assert "metrics: the result of 'mine/b' is 'NoneType'; expected a number" in nothing


@pytest.mark.slow
@pytest.mark.parametrize("name", ["f1_score", "categorical_crossentropy", "categorical_accuracy"])
def test_labels_in_place_of_scores_are_refused_by_name(name: str, found: dict[str, Any]) -> None:
    shapes = f"targets of shape [{SAMPLES}] and predictions of shape [{SAMPLES}, {CLASSES}]"
    assert f"{name!r} cannot be computed of {shapes}" in found[name]


@pytest.mark.slow
def test_shapes_that_only_broadcast_are_refused(found: dict[str, Any]) -> None:
    shapes = f"targets of shape [{CLASSES}] and predictions of shape [{CLASSES}, {CLASSES}]"
    for text in found["as many samples as classes"]:
        assert f"cannot be computed of {shapes}. They would only agree by broadcasting" in text


def test_an_error_in_a_custom_loss_is_shown_unchanged(found: dict[str, Any]) -> None:
    assert found["mistake"] == 'invalid literal for int() with base 10: "a person\'s mistake"'


def test_losses_are_those_of_keras(found: dict[str, Any]) -> None:
    for name, (ours, keras) in found["losses"].items():
        assert ours == pytest.approx(keras, rel=1e-12), name


def test_the_names_are_those_of_keras(found: dict[str, Any]) -> None:
    assert found["loss names"] == sorted(keras_names.LOSSES)
    no_measures = ["Mean", "MeanMetricWrapper", "Sum"]
    assert found["metric names"] == sorted([*keras_names.METRICS, *no_measures])


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored", "horovod-tf"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": "mean_square_error"}, "'mean_square_error'. Did you mean 'mean_squared_error'"),
        ({"metrics": ["acuracy"]}, "unknown Keras metrics name 'acuracy'. Did you mean 'accuracy'"),
        ({"metrics": ["mean"]}, "unknown Keras metrics name 'mean'"),
    ],
)
def test_an_unknown_name_is_refused_by_the_plan(
    backend: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(isotrain.SpecError, match=words.replace(".", r"\.")):
        isotrain.plan(spec(**fields), backend=backend)


@pytest.mark.parametrize("name", ["mse", "MSE", "mae", "bce", "kld", "mape", "msle"])
def test_abbreviations_of_keras_are_names(name: str) -> None:
    isotrain.plan(spec(loss=name, metrics=["acc", name]), backend="torch-ddp")


def sparse_data() -> isotrain.DataSet:
    inputs = np.random.default_rng(0).normal(size=(8, 3))
    targets = np.eye(CLASSES)[np.arange(8) % CLASSES]
    return isotrain.DataSet((inputs, targets), (inputs[:1], targets[:1]))


def softmax() -> Any:
    import keras

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activation="softmax")])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker"])
def test_a_replica_without_samples_builds_late_metrics(tmp_path: Path, backend: str) -> None:
    """The evaluation has one sample, so the second replica has none, and F1 creates its variables late."""
    fields = spec(
        model=softmax, data=sparse_data, loss="categorical_crossentropy", metrics=["f1_score"]
    )
    results = [
        isotrain.run(
            fields,
            backend=backend,
            replicas=replicas,
            output=tmp_path / str(replicas),
            on_event=lambda event: None,
        )
        for replicas in (1, 2)
    ]
    assert len(results[0].metrics) == 2 * CLASSES + 1
    assert results[0].metrics == pytest.approx(results[1].metrics)
    assert "validation_f1_score/0" in results[0].history.epochs[0]
