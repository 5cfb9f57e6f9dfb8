"""Variables and traced functions of TensorFlow in the context where large ones have no values."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated
from integration.session_specs import spec

import isotrain

LARGE = (512, 600)


def errors_of_reads(session: isotrain.Session) -> dict[str, Any]:
    """What reading each of several values gives: a number, or whether the error is one of missing values."""
    import tensorflow as tf

    from isotrain.adapters.tensorflow.base.without_values import (
        AbstractFunction,
        WithoutValues,
        is_missing_value,
        lacks_value,
    )

    calls: list[int] = []

    def noted(function: Any) -> AbstractFunction:
        return AbstractFunction(function, lambda graph: calls.append(1))

    found: dict[str, Any] = {}
    with WithoutValues():
        initial = tf.ones(LARGE)
        is_kept, variable = weakref.ref(initial), tf.Variable(initial)
        del initial
        found["kept"] = variable.shape == LARGE and is_kept() is not None
        large = tf.Variable(lambda: tf.ones(LARGE))
        computed = tf.Variable(lambda: 2 * np.asarray(tf.ones(LARGE)))
        found["computed by NumPy"] = float(computed[-1, -1]), lacks_value(computed)
        part = tf.Variable(lambda: large[:2, 0] + 1.0)
        small, counter, untouched = tf.Variable([1.0, 2.0]), tf.Variable(5), tf.Variable(7)

        def add() -> tf.Tensor:
            counter.assign_add(1)
            small.assign(large[0, :2] + small)
            return tf.reduce_sum(large) + tf.cast(untouched, tf.float32)

        twice = noted(lambda value: 2 * value)
        found["small function"] = float(twice(tf.constant(3.0)))
        found["before"] = int(counter), small.numpy().tolist()
        total = noted(add)()
        found["shape"] = total.shape.as_list(), total.dtype.name
        results = {
            "large": lambda: large.numpy(),
            "large, in a function": lambda: tf.function(lambda: large + 1.0)(),
            "part": lambda: float(tf.reduce_sum(part)),
            "assigned": lambda: int(counter),
            "assigned to in part": lambda: np.asarray(small),
            "result": lambda: float(total),
            "result, as an array": lambda: np.asarray(total),
            "compared": lambda: total == total,
            "twice": lambda: 2 * total,
            "less": lambda: 1 - total,
            "negative": lambda: -total,
            "largest": lambda: max(total, 0.0),
            "as text": lambda: f"{total:.3f}",
            "of a result": lambda: float(twice(total)),
            "of a small one": lambda: float(noted(lambda: tf.reduce_sum(small))()),
            "large tensor": lambda: float(noted(lambda: tf.reduce_sum(tf.ones(LARGE)))()),
        }
        for name, read in results.items():
            try:
                found[name] = read()
            except Exception as error:
                found[name] = is_missing_value(error)
        found["untouched"] = int(untouched)
        found["calls"] = len(calls)
    found["afterwards"] = tf.Variable(lambda: tf.ones(LARGE)).shape.as_list()
    return found


def compared_with_a_result(session: isotrain.Session) -> dict[str, bool]:
    """Whether a result without values counts as equal to each of several values."""
    import tensorflow as tf

    from isotrain.adapters.tensorflow.base.without_values import AbstractTensor
    from isotrain.adapters.tensorflow.pipeline.modules import are_equal_tensors

    values = {
        "result": AbstractTensor(tf.TensorShape([2, 3]), tf.float32),
        "tensor": tf.zeros([2, 3]),
        "other shape": tf.zeros([3, 2]),
        "array": np.zeros((2, 3)),
    }
    result, unknown = (AbstractTensor(tf.TensorShape(x), tf.float32) for x in ([2, 3], None))
    pairs = {name: (result, each) for name, each in values.items()} | {"nothing": (unknown, None)}
    forth = {name: are_equal_tensors(*pair) for name, pair in pairs.items()}
    back = {name: are_equal_tensors(*pair[::-1]) for name, pair in pairs.items()}
    assert forth == back
    return forth


@pytest.mark.slow
def test_a_result_without_values_is_equal_to_tensors_of_its_shape_alone(tmp_path: Path) -> None:
    found = run_isolated(compared_with_a_result, spec(), "tf-mirrored", tmp_path / "run")
    assert {name for name, is_equal in found.items() if is_equal} == {"result", "tensor"}
    assert len(found) == 5


@pytest.mark.slow
def test_what_lacks_values_cannot_be_read(tmp_path: Path) -> None:
    found = run_isolated(errors_of_reads, spec(), "tf-mirrored", tmp_path / "run")
    assert found.pop("small function") == 6
    assert found.pop("before") == [5, [1, 2]]
    assert not found.pop("kept"), "its memory is needed as long as it is made"
    assert found.pop("shape") == [[], "float32"]
    assert found.pop("untouched") == 7
    assert found.pop("computed by NumPy") == [2, False]
    assert found.pop("calls") == 5
    assert found.pop("afterwards") == [*LARGE]
    assert found == dict.fromkeys(found, True)
    assert len(found) == 16
