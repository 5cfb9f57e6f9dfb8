"""Losses and metrics whose targets are classes: they refuse, or count as wrong, what is no class.

Left to themselves, Keras and the frameworks leave it out, read memory beside their tensors, or raise.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras.src import backend
from keras.src.losses import losses as losses_module

from isotrain.adapters.common import class_targets
from isotrain.adapters.common.class_targets import RequireAll
from isotrain.adapters.common.private_api import PrivateApiProbe, require
from isotrain.adapters.keras.private.misc import patched_attribute


def refuse_wrong_classes(require_all: RequireAll) -> None:
    """Patches Keras' losses of class targets, and `keras.ops.ctc_loss`, to refuse what is no class.

    Args:
        require_all: Check of the framework.
    """
    backend.nn.ctc_loss = _checked_ctc(inspect.unwrap(backend.nn.ctc_loss), require_all)
    name = "categorical_generalized_cross_entropy"
    native = inspect.unwrap(getattr(losses_module, name))
    setattr(losses_module, name, _checked_generalized(native, require_all))


def _checked_ctc(native: Callable[..., Any], require_all: RequireAll) -> Callable[..., Any]:
    ops = keras.ops

    @functools.wraps(native)
    def ctc_loss(
        target: Any, output: Any, target_length: Any, output_length: Any, mask_index: int = 0
    ) -> Any:
        target, output, target_length, output_length = map(
            ops.convert_to_tensor, (target, output, target_length, output_length)
        )
        labels, counts = ops.cast(target, "int64"), ops.cast(target_length, "int64")
        steps = ops.cast(output_length, "int64")
        width, (_, most, classes) = ops.shape(target)[1], ops.shape(output)
        is_label = ops.arange(width, dtype="int64")[None, :] < counts[:, None]
        is_class = (labels >= 0) & (labels < classes) & (labels != mask_index)
        valid = is_class | ~is_label
        fitting = (counts >= 0) & (counts <= width), (steps >= 0) & (steps <= most)
        again = (labels[:, 1:] == labels[:, :-1]) & is_label[:, 1:]
        needed = counts + ops.sum(ops.cast(again, "int64"), -1)
        known = classes if isinstance(classes, int) else None
        require_all(fitting[0], counts, class_targets.CTC_TARGET_LENGTHS)
        require_all(fitting[1], steps, class_targets.CTC_STEPS)
        require_all(valid, labels, class_targets.ctc_labels(known, mask_index))
        require_all(needed <= steps, needed, class_targets.CTC_FIT)
        loss = native(target, output, target_length, output_length, mask_index)
        is_valid = ops.all(valid, -1) & fitting[0] & fitting[1] & (needed <= steps)
        return _or_nan(is_valid, loss)

    return ctc_loss


def _checked_generalized(native: Callable[..., Any], require_all: RequireAll) -> Callable[..., Any]:
    ops = keras.ops

    @functools.wraps(native)
    def categorical_generalized_cross_entropy(y_true: Any, y_pred: Any, q: float) -> Any:
        classes = ops.shape(y_pred)[-1]
        labels = ops.cast(y_true, "int64")
        is_class = (labels >= 0) & (labels < classes)
        known = classes if isinstance(classes, int) else None
        expected = class_targets.expectation("loss", native.__name__, known)
        require_all(is_class, labels, expected)
        loss = native(y_true, y_pred, q)
        return _or_nan(ops.reshape(is_class, ops.shape(loss)), loss)

    return categorical_generalized_cross_entropy


def _or_nan(is_valid: Any, loss: Any) -> Any:
    """The loss; on TensorFlow NaN where it is invalid, as XLA leaves out checks."""
    if backend.backend() != "tensorflow":
        return loss
    return keras.ops.where(is_valid, loss, keras.ops.full_like(loss, float("nan")))


def set_class_loss(loss: Callable[..., Any]) -> None:
    """Patches Keras' cross-entropy of classes.

    Args:
        loss: Function of classes, predictions, `from_logits` and `axis` that refuses what is no class.
    """
    native = inspect.unwrap(backend.nn.sparse_categorical_crossentropy)

    @functools.wraps(native)
    def sparse_categorical_crossentropy(
        target: Any, output: Any, from_logits: bool = False, axis: int = -1
    ) -> Any:
        target = keras.ops.convert_to_tensor(target, "int64")
        output = keras.ops.convert_to_tensor(output)
        expected = list(output.shape)
        classes = [expected.pop(axis)] if expected else []
        shapes = [expected, [*expected[:axis], 1, *expected[axis:]]]
        if axis in (-1, len(output.shape) - 1):
            shapes = [expected, [*expected, 1]]
        if len(output.shape) < 2 or not classes or list(target.shape) not in shapes:
            return native(target, output, from_logits, axis)
        return loss(target, output, from_logits, axis)

    backend.nn.sparse_categorical_crossentropy = sparse_categorical_crossentropy


def top_k_of_all_targets() -> contextlib.AbstractContextManager[None]:
    """Context in which top-k metrics count what is no class as wrong, and take any float dtype.

    TensorFlow's kernel takes float32 only, and torch's reads memory beside the predictions.
    """
    native = backend.math.in_top_k

    def in_top_k(targets: Any, predictions: Any, k: int) -> Any:
        targets = keras.ops.cast(targets, "int64")
        predictions = keras.ops.convert_to_tensor(predictions)
        is_class = (targets >= 0) & (targets < keras.ops.shape(predictions)[-1])
        targets = keras.ops.where(is_class, targets, keras.ops.zeros_like(targets))
        is_float32 = keras.backend.standardize_dtype(predictions.dtype) == "float32"
        if is_float32 or backend.backend() != "tensorflow":
            return keras.ops.logical_and(is_class, native(targets, predictions, k))
        target_scores = keras.ops.take_along_axis(predictions, targets[:, None], axis=-1)
        higher = keras.ops.sum(keras.ops.cast(predictions > target_scores, "int32"), axis=-1)
        return is_class & keras.ops.isfinite(target_scores[:, 0]) & (higher < k)

    return patched_attribute(backend.math, "in_top_k", in_top_k)


def _probe_top_k() -> None:
    targets, predictions = keras.ops.convert_to_tensor([1, 0, 3, -1]), [[0.5, 0.25, 0.125]] * 4
    for dtype in ("float16", "float32", "float64"):
        metric = keras.metrics.SparseTopKCategoricalAccuracy(k=1)
        with top_k_of_all_targets():
            metric.update_state(targets, keras.ops.convert_to_tensor(predictions, dtype))
        require(float(metric.result()) == 0.25, f"the highest of predictions of {dtype}")


def _probe_class_losses() -> None:
    seen: list[Any] = []
    letters, scores = keras.ops.convert_to_tensor([[1, 0]]), keras.ops.full((1, 2, 3), 1 / 3)
    patched = (
        patched_attribute(backend.nn, "ctc_loss", backend.nn.ctc_loss),
        patched_attribute(
            losses_module,
            "categorical_generalized_cross_entropy",
            losses_module.categorical_generalized_cross_entropy,
        ),
    )
    with patched[0], patched[1]:
        refuse_wrong_classes(lambda valid, values, text: seen.append(text))
        keras.losses.CTC()(letters, scores)
        require(len(seen) == 4, "CTC computes by backend.nn.ctc_loss")
        keras.losses.CategoricalGeneralizedCrossEntropy()(letters[0], scores[0])
        require(len(seen) == 5, "categorical_generalized_cross_entropy of losses.losses")


def _probe_class_loss() -> None:
    previous = backend.nn.sparse_categorical_crossentropy
    with patched_attribute(backend.nn, "sparse_categorical_crossentropy", previous):
        set_class_loss(lambda classes, scores, from_logits, axis: scores[:, 0])
        classes, scores = keras.ops.convert_to_tensor([0, 1]), keras.ops.full((2, 3), 0.5)
        value = keras.losses.SparseCategoricalCrossentropy()(classes, scores)
    require(float(value) == 0.5, "the loss of classes is sparse_categorical_crossentropy")


PROBES = (
    PrivateApiProbe("backend.math.in_top_k", _probe_top_k),
    PrivateApiProbe("backend.nn.ctc_loss and losses.losses", _probe_class_losses),
    PrivateApiProbe("backend.nn.sparse_categorical_crossentropy", _probe_class_loss),
)
