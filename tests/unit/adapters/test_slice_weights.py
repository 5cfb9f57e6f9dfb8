"""What the slices of one replica add to the loss and to its gradients, where losses do not count all alike.

The replica has two slices, of 3 samples and of 1, in a global batch of 16 over two replicas; the other
replica has the rest. A loss has two rows: the means, and what they count by.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.isolated import run_isolated
from integration.session_specs import spec

import isotrain
from isotrain.adapters.torch.comm.base import SingleReplicaCommunicator
from isotrain.adapters.torch.replica import loss_weighting as of_torch
from isotrain.plugin import Slice

WEIGHTS = np.array([3 * 2 / 16, 1 * 2 / 16])
MEANS = np.array([[2.0, 5.0], [4.0, 7.0]])
COUNTED = np.array([4.0, 1.0])
OTHER = np.array([15.0, 1.5])
"""The other replica's sums: what its targets count by, and the weights of its slices."""
GLOBAL = WEIGHTS[:, None] * [1, 0] + COUNTED[:, None] * (2 / (COUNTED.sum() + OTHER[0])) * [0, 1]
"""By what each mean counts in this replica's share; the mean over both replicas is that of the batch."""
LOCAL = np.stack([WEIGHTS / WEIGHTS.sum(), COUNTED / COUNTED.sum()], axis=1)
"""By what each mean counts in this replica's own mean."""


FRAMEWORKS = ["torch", pytest.param("tensorflow", marks=pytest.mark.slow)]


def torch_shares(local: bool) -> tuple[list[float], np.ndarray]:
    class Two(SingleReplicaCommunicator):
        def all_reduce(self, value, op):  # type: ignore[no-untyped-def]
            assert op == "sum"
            return value + torch.tensor(OTHER)

    class Counting:
        may_ignore_padding = False

        def loss_denominators(self, inputs, targets):  # type: ignore[no-untyped-def]
            return torch.tensor([float(targets)])

    slices = [Slice(None, c, n, w) for c, n, w in zip(COUNTED, (3, 1), WEIGHTS, strict=True)]
    slice_weights = of_torch.SliceWeights(slices, Counting(), Two(), local)  # type: ignore[arg-type]
    reported, gradients = [], []
    for index, means in enumerate(MEANS):
        loss = torch.tensor(np.array([means, [0.0, COUNTED[index]]]), requires_grad=True)
        part, share = slice_weights.of(index, loss)
        part.backward()
        assert loss.grad is not None
        gradients.append(loss.grad[0].numpy())
        reported.append(float(share))
    return reported, np.array(gradients)


def tensorflow_shares(local: bool) -> tuple[list[float], np.ndarray]:
    import tensorflow as tf

    from isotrain.adapters.tensorflow.trainer import loss_weighting as of_tensorflow

    slice_weights = of_tensorflow.SliceWeights(
        tf.constant(WEIGHTS),
        lambda: [tf.constant([each]) for each in COUNTED],
        lambda sums: sums + tf.constant(OTHER),
        local,
    )
    reported, gradients = [], []
    for index, means in enumerate(MEANS):
        loss = tf.constant([means, [0.0, COUNTED[index]]], tf.float64)
        with tf.GradientTape() as tape:
            tape.watch(loss)
            part, share = slice_weights.of(index, loss)
        gradients.append(tape.gradient(part, loss)[0].numpy())
        reported.append(float(share))
    return reported, np.array(gradients)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("local", [False, True])
def test_means_are_weighted_by_their_denominators(framework, local, request):
    if framework == "torch":
        reported, gradients = torch_shares(local)
    else:
        reported, gradients = request.getfixturevalue("of_tensorflow")["shares"][local]
    np.testing.assert_allclose(reported, (GLOBAL * MEANS).sum(1), rtol=1e-15)
    np.testing.assert_allclose(gradients, LOCAL if local else GLOBAL, rtol=1e-15)


def rows_of_placeholders() -> list[np.ndarray]:
    import tensorflow as tf

    from isotrain.adapters.tensorflow.trainer.loss import evaluated_rows

    placeholder, none = tf.constant([[2.0, 5.0], [0.0, 4.0]]), tf.constant(0.0, tf.float64)
    return [
        evaluated_rows(placeholder, none, 2).numpy(),
        evaluated_rows(tf.constant(np.nan), none, 2).numpy(),
        evaluated_rows(placeholder, tf.constant(3.0, tf.float64), 2).numpy(),
    ]


@pytest.mark.slow
def test_a_placeholder_adds_nothing_to_an_evaluation(of_tensorflow):
    nothing, neither, rows = of_tensorflow["placeholders"]
    assert not nothing.any()
    assert not neither.any()
    assert rows.tolist() == [[6.0, 20.0], [3.0, 4.0]]


def torch_parts(local: bool) -> tuple[list[float], list[float]]:
    slices = [Slice(None, None, n, w) for n, w in zip((3, 1), WEIGHTS, strict=True)]
    trainer: Any = SimpleNamespace(may_ignore_padding=False)
    weights = of_torch.SliceWeights(slices, trainer, SingleReplicaCommunicator(), local)
    parts = [weights.of(index, torch.tensor(MEANS[index, 0])) for index in range(2)]
    return [float(part) for part, _ in parts], [float(share) for _, share in parts]


def tensorflow_parts(local: bool) -> tuple[list[float], list[float]]:
    import tensorflow as tf

    from isotrain.adapters.tensorflow.trainer import loss_weighting as of_tensorflow

    weights = of_tensorflow.SliceWeights(tf.constant(WEIGHTS), list, tf.identity, local)
    parts = [weights.of(index, tf.constant(MEANS[index, 0])) for index in range(2)]
    return [float(part) for part, _ in parts], [float(share) for _, share in parts]


def computed_by_tensorflow(session: isotrain.Session) -> dict[str, Any]:
    each: list[tuple[str, Callable[[bool], Any]]]
    each = [("shares", tensorflow_shares), ("parts", tensorflow_parts)]
    values = {name: [compute(local) for local in (False, True)] for name, compute in each}
    return {**values, "placeholders": rows_of_placeholders()}


@pytest.fixture(scope="module")
def of_tensorflow(tmp_path_factory):
    """Values that TensorFlow computes; the test process does not import it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    return run_isolated(computed_by_tensorflow, spec(), "tf-mirrored", folder)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("local", [False, True])
def test_scalar_losses_are_weighted_by_samples(framework, local, request):
    """A local step follows the replica's own mean, and reports its share of the global one."""
    if framework == "torch":
        parts, shares = torch_parts(local)
    else:
        parts, shares = request.getfixturevalue("of_tensorflow")["parts"][local]
    np.testing.assert_allclose(shares, WEIGHTS * MEANS[:, 0], rtol=1e-15)
    np.testing.assert_allclose(parts, (LOCAL[:, 0] if local else WEIGHTS) * MEANS[:, 0], rtol=1e-15)


PADDING = np.array([0.5, 0.25])
"""Fraction of each slice's targets that is padding."""


@pytest.mark.parametrize("local", [False, True])
def test_padding_leaves_the_mean_of_the_other_targets(local):
    """The other replica has no padding."""

    class Two(SingleReplicaCommunicator):
        def all_reduce(self, value, op):  # type: ignore[no-untyped-def]
            assert op == "mean"
            return value / 2

    trainer: Any = SimpleNamespace(may_ignore_padding=True, padding_fraction=torch.tensor)
    slices = [Slice(None, p, n, w) for p, n, w in zip(PADDING, (3, 1), WEIGHTS, strict=True)]
    weights = of_torch.SliceWeights(slices, trainer, Two(), local)
    losses = torch.tensor(np.stack([MEANS[:, 0], PADDING], axis=1))
    parts = [float(weights.of(index, losses[index])[0]) for index in range(2)]
    kept = (WEIGHTS * (1 - PADDING)).sum() if local else 1 - (WEIGHTS * PADDING).sum() / 2
    np.testing.assert_allclose(parts, MEANS[:, 0] * WEIGHTS / kept, rtol=1e-14)


def test_an_evaluation_is_divided_by_the_targets_without_padding():
    evaluation = of_torch.EvaluationLoss(1, torch.device("cpu"))
    evaluation.add(torch.tensor([2.0, 0.5]), 3)
    evaluation.add(torch.tensor([4.0, 0.25]), 1)
    assert evaluation.pop_mean(torch.clone) == (2 * 3 + 4) / (4 - 3 * 0.5 - 0.25)
