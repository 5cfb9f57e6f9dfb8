"""Named losses and metrics in torch's functions and in Keras', in float64, in a process that has both."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import torch

from isotrain.adapters.keras import builtin_names as keras_names
from isotrain.adapters.keras import metrics as keras_metrics
from isotrain.adapters.keras import model as keras_model
from isotrain.adapters.torch.loss.per_output import build_loss
from isotrain.adapters.torch.metrics import registry
from isotrain.adapters.torch.replica.replica import TorchFunctions
from isotrain.core.spec.loading import load_spec

Arrays = tuple[np.ndarray, np.ndarray]
SMOOTH = {"label_smoothing": 0.25}
LOGITS = {"from_logits": True}
LOSSES: list[tuple[str, str, dict[str, Any]]] = [
    *((kind, "mean_squared_error", {}) for kind in ("numbers", "columns", "flat", "images")),
    *((kind, "mse", {}) for kind in ("numbers",)),
    ("numbers", "MeanAbsoluteError", {}),
    ("numbers", "MAE", {"reduction": "sum"}),
    ("numbers", "mse", {"reduction": "none"}),
    ("positive", "msle", {"reduction": "mean"}),
    ("whole", "mse", {"dtype": "float32"}),
    ("positive", "mean_absolute_percentage_error", {}),
    ("positive", "msle", {}),
    ("numbers", "huber", {}),
    ("numbers", "huber", {"delta": 0.25}),
    ("numbers", "log_cosh", {}),
    ("numbers", "cosine_similarity", {}),
    ("images", "cosine_similarity", {"axis": 1}),
    ("yes_or_no", "hinge", {}),
    ("numbers", "hinge", {}),
    ("yes_or_no", "squared_hinge", {}),
    ("one_hot", "categorical_hinge", {}),
    ("one_hot", "kl_divergence", {}),
    ("shares", "KLDivergence", {}),
    ("positive", "poisson", {}),
    ("yes_or_no", "binary_crossentropy", {}),
    ("yes_or_no", "binary_crossentropy", SMOOTH),
    ("yes_or_no", "binary_crossentropy", {"axis": 0}),
    ("scored_yes", "binary_crossentropy", LOGITS),
    ("scored_yes", "binary_crossentropy", {**LOGITS, **SMOOTH}),
    ("yes_column", "binary_crossentropy", {}),
    ("yes_or_no", "binary_focal_crossentropy", {}),
    (
        "yes_or_no",
        "binary_focal_crossentropy",
        {"gamma": 3.0, "alpha": 0.5, "apply_class_balancing": True, **SMOOTH},
    ),
    ("scored_yes", "binary_focal_crossentropy", LOGITS),
    ("images", "binary_focal_crossentropy", {"axis": 1}),
    ("images", "categorical_crossentropy", {"axis": 1}),
    ("images", "categorical_focal_crossentropy", {"axis": 1}),
    ("one_hot", "categorical_crossentropy", {}),
    ("one_hot", "categorical_crossentropy", SMOOTH),
    ("scored_one_hot", "categorical_crossentropy", {**LOGITS, **SMOOTH}),
    ("one_hot", "categorical_focal_crossentropy", {}),
    ("one_hot", "categorical_focal_crossentropy", {"alpha": [0.1, 0.2, 0.3, 0.4], "gamma": 1.0}),
    ("scored_one_hot", "categorical_focal_crossentropy", {**LOGITS, **SMOOTH}),
    ("classes", "sparse_categorical_crossentropy", {}),
    ("scored_classes", "sparse_categorical_crossentropy", LOGITS),
    ("scored_classes", "sparse_categorical_crossentropy", {**LOGITS, "reduction": "sum"}),
    ("class_column", "sparse_categorical_crossentropy", LOGITS),
    ("scored_classes", "sparse_categorical_crossentropy", {**LOGITS, "ignore_class": 2}),
    ("letters", "sparse_categorical_crossentropy", LOGITS),
    ("letters", "sparse_categorical_crossentropy", {**LOGITS, "ignore_class": 1}),
    ("class_maps", "sparse_categorical_crossentropy", {**LOGITS, "axis": 1}),
    ("classes", "categorical_generalized_cross_entropy", {}),
    ("classes", "categorical_generalized_cross_entropy", {"q": 0.75}),
    ("texts", "ctc", {}),
    ("yes_or_no", "dice", {}),
    ("images", "dice", {"axis": [1, 2]}),
    ("yes_or_no", "tversky", {}),
    ("yes_or_no", "tversky", {"alpha": 0.25, "beta": 0.75, "axis": -1}),
    ("embedded", "circle", {}),
    ("embedded", "circle", {"gamma": 16.0, "margin": 0.25, "remove_diagonal": False}),
]
METRICS: list[tuple[str, str, dict[str, Any]]] = [
    *((kind, "accuracy", {}) for kind in ("yes_column", "one_hot", "classes", "class_column")),
    ("whole", "Accuracy", {}),
    ("yes_or_no", "binary_accuracy", {"threshold": 0.25}),
    ("one_hot", "categorical_accuracy", {}),
    ("letters", "sparse_categorical_accuracy", {}),
    ("one_hot", "top_k_categorical_accuracy", {"k": 2}),
    ("letters", "sparse_top_k_categorical_accuracy", {"k": 2}),
    ("numbers", "root_mean_squared_error", {}),
    ("numbers", "mse", {}),
    ("numbers", "mean_absolute_error", {}),
    ("positive", "mean_absolute_percentage_error", {}),
    ("positive", "mean_squared_logarithmic_error", {}),
    ("numbers", "log_cosh_error", {}),
    ("numbers", "cosine_similarity", {"axis": 1}),
    ("numbers", "pearson_correlation", {}),
    ("numbers", "concordance_correlation", {}),
    ("yes_or_no", "hinge", {}),
    ("yes_or_no", "squared_hinge", {}),
    ("one_hot", "categorical_hinge", {}),
    ("shares", "kl_divergence", {}),
    ("positive", "poisson", {}),
    ("yes_or_no", "binary_crossentropy", SMOOTH),
    ("one_hot", "categorical_crossentropy", SMOOTH),
    ("letters", "sparse_categorical_crossentropy", LOGITS),
    ("letters", "sparse_categorical_crossentropy", {**LOGITS, "ignore_class": 1}),
    *(("yes_or_no", f"{which}_positives", {}) for which in ("true", "false")),
    *(("yes_or_no", f"{which}_negatives", {}) for which in ("true", "false")),
    ("yes_or_no", "true_positives", {"thresholds": [0.25, 0.75]}),
    ("flat", "cosine_similarity", {}),
    ("yes_or_no", "precision", {}),
    ("yes_column", "recall", {}),
    ("one_hot", "precision", {"top_k": 2}),
    ("one_hot", "recall", {"class_id": 1}),
    ("yes_or_no", "sensitivity_at_specificity", {"specificity": 0.5}),
    ("yes_or_no", "specificity_at_sensitivity", {"sensitivity": 0.5, "num_thresholds": 50}),
    ("yes_or_no", "precision_at_recall", {"recall": 0.75}),
    ("yes_or_no", "recall_at_precision", {"precision": 0.25, "num_thresholds": 1}),
]
METRICS += [
    ("yes_column", "auc", {}),
    ("yes_or_no", "auc", {"curve": "PR", "num_thresholds": 50}),
    ("yes_or_no", "auc", {"curve": "PR", "summation_method": "majoring"}),
    ("yes_or_no", "auc", {"summation_method": "minoring", "thresholds": [0.75, 0.25, 0.3]}),
    ("scored_yes", "auc", LOGITS),
    ("yes_or_no", "auc", {"curve": "prgain"}),
    ("yes_or_no", "auc", {"multi_label": True}),
    ("scored_yes", "auc", {"multi_label": True, "curve": "PR", "num_labels": 5, **LOGITS}),
    ("yes_or_no", "auc", {"multi_label": True, "label_weights": [1.0, 2.0, 0.5, 0.0, 3.0]}),
    ("yes_or_no", "auc", {"label_weights": [1.0, 2.0, 0.5, 0.0, 3.0]}),
    ("one_hot", "f1_score", {}),
    ("one_hot", "f1_score", {"average": "micro", "threshold": 0.25}),
    ("one_hot", "f1_score", {"average": "weighted"}),
    ("one_hot", "f_beta_score", {"average": "macro", "beta": 2.0}),
    ("yes_or_no", "binary_io_u", {}),
    ("yes_or_no", "binary_io_u", {"target_class_ids": [1], "threshold": 0.25}),
    ("letters_read", "io_u", {"num_classes": 4, "target_class_ids": [1]}),
    ("letters_read", "mean_io_u", {"num_classes": 5, "ignore_class": 2}),
    ("letters", "mean_io_u", {"num_classes": 4, "sparse_y_pred": False}),
    ("one_hot", "one_hot_io_u", {"num_classes": 4, "target_class_ids": [1]}),
    ("one_hot", "one_hot_mean_io_u", {"num_classes": 4}),
    ("numbers", "r2_score", {}),
    ("numbers", "r2_score", {"class_aggregation": None}),
    ("numbers", "r2_score", {"class_aggregation": "variance_weighted_average"}),
    ("flat", "r2_score", {"num_regressors": 3}),
]


def softmax(scores: np.ndarray) -> np.ndarray:
    exponents = np.exp(scores)
    return exponents / exponents.sum(-1, keepdims=True)


def arrays(seed: int) -> dict[str, Arrays]:
    """Targets and predictions of each kind."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape)

    yes = draw.integers(2, size=(12, 5)).astype("f8")
    classes = draw.integers(4, size=12)
    letters = draw.integers(4, size=(6, 3))
    hot = np.eye(4)[classes]
    units = normal(12, 5)
    return {
        "numbers": (normal(12, 5), normal(12, 5)),
        "columns": (normal(12), normal(12, 1)),
        "flat": (normal(12), normal(12)),
        "images": (draw.random((3, 4, 2)), draw.random((3, 4, 2))),
        "positive": (draw.random((12, 5)) + 0.1, draw.random((12, 5)) + 0.1),
        "yes_or_no": (yes, draw.random((12, 5))),
        "yes_column": (yes[:, 0], draw.random((12, 1))),
        "scored_yes": (yes, normal(12, 5)),
        "one_hot": (hot, softmax(normal(12, 4))),
        "shares": (softmax(normal(12, 4)), softmax(normal(12, 4))),
        "scored_one_hot": (hot, normal(12, 4)),
        "classes": (classes, softmax(normal(12, 4))),
        "scored_classes": (classes, normal(12, 4)),
        "class_column": (classes[:, None], normal(12, 4)),
        "letters": (letters, normal(6, 3, 4)),
        "letters_read": (letters, draw.integers(4, size=(6, 3))),
        "class_maps": (letters, normal(6, 4, 3)),
        "whole": (classes, draw.integers(4, size=12).astype("f8")),
        "texts": (-np.sort(-draw.integers(0, 4, size=(4, 3))), normal(4, 8, 5)),  # 0 only pads
        "embedded": (classes, units / np.linalg.norm(units, axis=-1, keepdims=True)),
    }


def spec_with(**fields: Any) -> Any:
    given = {
        "model": dict,
        "data": dict,
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.5},
        "global_batch_size": 1,
        "steps": 1,
    }
    return load_spec({**given, "precision": "float64", **fields})


def with_gradient(
    loss: Any, targets: np.ndarray, predictions: np.ndarray, *weights: Any
) -> list[Any]:
    leaf = torch.tensor(predictions, requires_grad=True)
    value = loss(torch.tensor(targets), leaf, *weights).mean()
    value.backward()
    return [float(value.detach()), leaf.grad.flatten().tolist()]


def losses() -> Iterator[list[Any]]:
    """Losses of samples that count alike, and of samples with weights."""
    for kind, name, options in LOSSES:
        spec = spec_with(loss={"name": name, **options})
        ours, theirs = (
            build_loss(spec.loss).mean,
            keras_model.build_losses(spec, "torch")[None],
        )
        targets, predictions = arrays(0)[kind]
        label = f"{name} {options} {kind}"
        yield [label, *(with_gradient(each, targets, predictions) for each in (ours, theirs))]
        apart = spec_with(loss={"name": name, **options, "reduction": "none"})
        apart_theirs = keras_model.build_losses(apart, "torch")[None]
        shape = apart_theirs(*map(torch.tensor, (targets, predictions))).shape
        if shape[:1] == (len(targets),):
            weights = torch.arange(shape.numel()).reshape(shape) % 3 / 2.0
            pair = (ours, theirs)
            given = (targets, predictions, weights)
            yield [f"{label} weighted", *(with_gradient(each, *given) for each in pair)]


def metrics() -> Iterator[list[Any]]:
    """Metrics of samples that count alike, and of samples with weights; overlaps take whole labels."""
    for kind, name, options in METRICS:
        for weighted in (False, True):
            spec = spec_with(metrics=[{"name": name, **options}])
            (ours,) = registry.build_metrics(spec, torch.device("cpu"), None)
            (theirs,) = keras_metrics.build_metrics(spec, "torch")
            for seed in range(2):
                targets, predictions = map(torch.tensor, arrays(seed)[kind])
                if weighted:
                    weights = sample_weights(kind, name, targets)
                    ours.update_weighted(targets, predictions, weights)
                    keras_metrics.update_metric(theirs, targets, predictions, weights)
                else:
                    ours.update(targets, predictions, len(targets))
                    keras_metrics.update_metric(theirs, targets, predictions)
            wanted = keras_metrics.named_results(theirs.name, theirs.result())
            label = f"{name} {options} {kind}{' weighted' * weighted}"
            yield [label, ours.named_results(), wanted]


def poisoned(kind: str) -> Iterator[Arrays]:
    """Targets and predictions of a kind with a value in them that is not finite, or outside of 0 to 1."""
    for side, value in itertools.product((0, 1), (np.nan, np.inf, -np.inf, 7.0, -7.0)):
        pair = arrays(0)[kind]
        if pair[side].dtype.kind == "f":
            pair[side].flat[0] = value
            yield pair


def refusals() -> list[str]:
    """Losses and metrics that raise for such numbers, with their errors."""
    found = []
    for kind, name, options in LOSSES:
        spec = spec_with(loss={"name": name, **options})
        sides = build_loss(spec.loss).mean, keras_model.build_losses(spec, "torch")[None]
        for loss, pair in itertools.product(sides, poisoned(kind)):
            found += refusal(f"{name} {options}", functools.partial(with_gradient, loss, *pair))
    for kind, name, options in METRICS:
        spec = spec_with(metrics=[{"name": name, **options}])
        (ours,) = registry.build_metrics(spec, torch.device("cpu"), None)
        (theirs,) = keras_metrics.build_metrics(spec, "torch")
        for pair in poisoned(kind):
            targets, predictions = map(torch.tensor, pair)
            updates = (
                functools.partial(ours.update, targets, predictions, len(targets)),
                functools.partial(keras_metrics.update_metric, theirs, targets, predictions),
            )
            for update in updates:
                found += refusal(f"{name} {options}", update)
    return found


def refusal(label: str, call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [f"{label}: {type(error).__name__}: {error}"]
    return []


def sample_weights(kind: str, name: str, targets: torch.Tensor) -> torch.Tensor:
    """Weights, one for each sample, or for each position where Keras takes no others."""
    weights = torch.arange(len(targets)) % 3 / (1.0 if name.endswith("io_u") else 2.0)
    in_places = kind.startswith("letters") or name == "binary_io_u"
    return weights[:, None].expand_as(targets) if in_places else weights


def native_metrics() -> Iterator[Any]:
    """Metrics that need no Keras."""
    for _, name, options in METRICS:
        spec = spec_with(metrics=[{"name": name, **options}])
        yield from registry.build_metrics(spec, torch.device("cpu"), None)


def functions() -> dict[str, bool]:
    """Whether what strategies compute with gives what Keras' functions of these names do."""
    draw = torch.Generator().manual_seed(0)
    matrix, vector = torch.randn(4, 3, generator=draw), torch.randn(12, generator=draw)
    cases: dict[str, tuple[Any, ...]] = {
        "abs": (vector,),
        "cast": (vector, "bfloat16"),
        "concatenate": ([vector, vector[:3]],),
        "maximum": (vector, vector.flip(0)),
        "qr": (matrix,),
        "reshape": (vector, (3, -1)),
        "scatter": (torch.tensor([[3], [0], [3]], dtype=torch.int32), vector[:3], (5,)),
        "split": (vector, [2, 7]),
        "take": (vector, torch.tensor([3, 0, 11], dtype=torch.int32)),
        "top_k": (vector, 4),
        "transpose": (matrix,),
        "zeros": ((2, 3), "float64"),
        "zeros_like": (matrix,),
    }
    ours = TorchFunctions(torch.device("cpu"))
    return {
        name: _same(getattr(ours, name)(*args), getattr(keras.ops, name)(*args))
        for name, args in cases.items()
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return len(one) == len(other) and all(map(_same, one, other))


def numbers() -> dict[str, Any]:
    """Values of both sides by name, and the names that exist."""
    keras_model.configure_precision("float64")
    return {
        "functions": functions(),
        "losses": list(losses()),
        "metrics": list(metrics()),
        "refusals": refusals(),
        "loss names": sorted(keras_names.LOSSES),
        "losses tried": sorted({keras_names.class_name(name, "loss") for _, name, _ in LOSSES}),
        "native metrics": [type(metric).__name__ for metric in native_metrics()],
        "metric names": sorted(keras_names.METRICS),
        "metrics tried": sorted(
            {keras_names.class_name(name, "metrics") for _, name, _ in METRICS}
        ),
    }
