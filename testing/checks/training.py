"""Checks of sample order, gradient means and initial state, against the model in NumPy."""

from __future__ import annotations

import numpy as np
import psutil

from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.backend.group_protocols import WorkerGroup
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.contracts.backend.replica import Replica, Tensor
from isotrain.core.errors import UnsupportedError
from isotrain.core.parameter_server.layout import ParameterServerLayout
from isotrain.core.plugins.manager import plugin_manager
from isotrain.testing import reference_model
from isotrain.testing.check_context import CheckContext, assert_close, assert_same


def start_is_equal(context: CheckContext) -> None:
    """Before the first step, every process has the same state."""
    first, *others = context.starts
    for rank, other in enumerate(others, start=1):
        assert_same(other, first, f"state of process {rank} before the first step")


def start_is_of_the_seed(context: CheckContext) -> None:
    """The initial weights are those that the seed gives on every framework."""
    for rank, state in enumerate(context.starts):
        for name, first in reference_model.START.items():
            assert_close(state[name].ravel()[:2], first, f"start of {name} on process {rank}")


def order(context: CheckContext) -> None:
    """Each replica gets its contiguous slice of each global batch, in order, in every epoch."""
    replicas = context.group.replicas
    slices = []
    for batch in context.session.batches():
        for micro_batches in batch.slices:
            seen = [context.group.numpy(m.inputs["index"])[: m.count] for m in micro_batches]
            slices.append(np.concatenate(seen))
    expected = [
        np.array_split(rows, replicas)[replica]
        for rows in reference_model.all_batches()
        for replica in context.group.local_replicas
    ]
    assert len(slices) == len(expected), f"{len(slices)} slices, expected {len(expected)}"
    for number, (indices, rows) in enumerate(zip(slices, expected, strict=True)):
        assert indices.tolist() == rows.tolist(), f"slice {number}: {indices}, expected {rows}"


def sizes(context: CheckContext) -> None:
    """With any number of samples and any global batch, none is lost or doubled; weights add up."""
    replicas = context.group.replicas
    for count, size in ((1, 1), (2, 5), (5, 4), (7, 7), (13, 3)):
        rows = []
        for batch in context.batches(count, size):
            for replica, slices in zip(context.group.local_replicas, batch.slices, strict=True):
                (local,) = slices
                assert abs(local.weight * batch.size - local.count * replicas) < 1e-9
                indices = context.group.numpy(local.inputs["index"])[: local.count]
                rows += [(batch.step, replica, int(index)) for index in indices]
        expected = [
            (step, replica, int(index))
            for step, start in enumerate(range(0, count, size))
            for replica, part in enumerate(
                np.array_split(np.arange(start, min(count, start + size)), replicas)
            )
            if replica in context.group.local_replicas
            for index in part
        ]
        assert sorted(rows) == sorted(expected), f"{count} samples in batches of {size}: {rows}"


def training(context: CheckContext) -> None:
    """Every loss, and at the end every weight, is what NumPy computes on whole global batches."""
    trained = context.trained
    oracle, expected = reference_model.Oracle.fresh(), []
    for rows in reference_model.all_batches():
        expected.append(oracle.losses(rows).mean())
        oracle.update(oracle.gradients(rows))
    assert_close(trained.losses, expected, "losses")
    assert_close(trained.weights, oracle.weights, "weights")


def training_metrics(context: CheckContext) -> None:
    """Training metrics are means over the samples, each as it was when it was trained on."""
    metrics = context.trained.metrics
    oracle = reference_model.Oracle.fresh()
    values: dict[str, list[np.ndarray]] = {}
    for rows in reference_model.all_batches():
        for name, per_sample in oracle.metrics(rows).items():
            values.setdefault(name, []).append(per_sample)
        oracle.update(oracle.gradients(rows))
    assert_close(
        metrics, {name: np.concatenate(parts).mean() for name, parts in values.items()}, "metrics"
    )


def moving_statistics(context: CheckContext) -> None:
    """Batch normalisation's moving mean is that of whole global batches, on every process."""
    mean = context.trained.statistics["statistics/moving_mean"]
    assert_close(
        mean, reference_model.moving_mean(list(reference_model.all_batches())), "moving mean"
    )


def replicas_stay_equal(context: CheckContext) -> None:
    """After training, every process has the same state, and every replica computes the same."""
    context.restart()
    for batch in context.session.batches():
        context.session.step(batch)
    states = context.file_exchange.all_gather(context.session.read_state())
    gradients, _ = context.gradients_of_all(context.same_for_all(1))
    for rank, state in enumerate(states):
        assert_same(state, states[0], f"state of process {rank} after training")
    _assert_all_same(gradients)


def _assert_all_same(gradients: list[dict[str, np.ndarray]]) -> None:
    """Asserts that all replicas have the same gradients, any shapes and dtypes, for the same samples."""
    for replica, of_replica in enumerate(gradients):
        what = f"gradients of replica {replica} for the same samples"
        assert_same(of_replica, gradients[0], what)


def exact_mean_of_gradients(context: CheckContext) -> None:
    """The mean over replicas of their gradients is the gradient of the mean over the samples."""
    results = []
    for count in (7, 1):
        context.restart()
        (batch,) = context.batches(count, count)
        gradients, loss = context.gradients_of_all(batch)
        mean = {
            name: sum(of_replica[name] for of_replica in gradients) / context.group.replicas
            for name in gradients[0]
        }
        results.append((count, mean, gradients, loss))
    oracle = reference_model.Oracle.fresh()
    for count, mean, gradients, loss in results:
        rows = np.arange(count)
        assert_close(loss, oracle.losses(rows).mean(), f"loss of {count} samples")
        assert_close(mean, oracle.gradients(rows), f"gradient of {count} samples")
        for replica, part in enumerate(np.array_split(rows, context.group.replicas)):
            counted = np.flatnonzero(gradients[replica]["seen/embeddings"])
            assert counted.tolist() == part.tolist(), f"replica {replica} counted {counted}"


def synchronous_step(context: CheckContext) -> None:
    """Loss and weights are as in NumPy after a step on an even, an uneven and a nearly empty batch."""
    _check_synchronous_steps(context, 6, 7, 1)


def accumulation(context: CheckContext) -> None:
    """Slices in two micro-batches, some of them empty, give the same step."""
    _check_synchronous_steps(context, 7, 1, gradient_accumulation_steps=2)


def _check_synchronous_steps(
    context: CheckContext, *counts: int, gradient_accumulation_steps: int = 1
) -> None:
    results = []
    for count in counts:
        context.restart()
        (batch,) = context.batches(count, count, gradient_accumulation_steps)
        loss = float(context.group.synchronous_step(batch, reference_model.RATE))
        results.append((count, loss, context.session.read_state(("trainable",))))
    for count, loss, weights in results:
        oracle, rows = reference_model.Oracle.fresh(), np.arange(count)
        assert_close(loss, oracle.losses(rows).mean(), f"loss of {count} samples")
        oracle.update(oracle.gradients(rows))
        assert_close(weights, oracle.weights, f"weights after {count} samples")


def steps_leave_no_threads(context: CheckContext) -> None:
    """However many steps are taken, the process has no more threads than after the first ones."""
    context.restart()
    (batch,) = context.batches(7, 7)
    counts = []
    for steps in (10, 20):
        for _ in range(steps):
            context.group.synchronous_step(batch, reference_model.RATE)
        context.group.barrier()
        counts.append(psutil.Process().num_threads())
    early, late = counts
    assert late - early < 10, f"{early} threads after 10 steps, {late} after 30"


def _means(replica: Replica, *gradients: Tensor) -> list[Tensor]:
    """Computation that all-reduces gradients, of the weights' shapes, to their means."""
    return [replica.all_reduce(gradient, "mean") for gradient in gradients]


def gradients_and_apply(context: CheckContext) -> None:
    """`gradients`, an all-reduce and `apply` give the weights of the native synchronised step."""
    batches = context.batches(14, 7)
    context.restart()
    for batch in batches:
        context.group.synchronous_step(batch, reference_model.RATE)
    native = context.session.read_state(("trainable", "optimizer"))
    context.restart()
    for batch in batches:
        gradients, _ = context.group.gradients(batch)
        reduced = context.group.compute(_means, *map(list, zip(*gradients, strict=True)))
        context.group.apply_gradients(reduced, reference_model.RATE)
    assert_close(context.session.read_state(("trainable", "optimizer")), native, "state")


def local_step(context: CheckContext) -> None:
    """Each replica follows its own slice; the loss is that of the global batch."""
    _check_local_steps(context, 7)


def local_step_without_samples(context: CheckContext) -> None:
    """A replica without samples keeps its weights; those with samples do not notice."""
    _check_local_steps(context, 1)


def local_step_accumulated(context: CheckContext) -> None:
    """Slices in two uneven micro-batches, some of them empty, give the same local step."""
    _check_local_steps(context, 6, 7, 1, gradient_accumulation_steps=2)


def _check_local_steps(
    context: CheckContext, *counts: int, gradient_accumulation_steps: int = 1
) -> None:
    results = []
    for count in counts:
        context.restart()
        (batch,) = context.batches(count, count, gradient_accumulation_steps)
        loss = float(context.group.local_step(batch, reference_model.RATE))
        results.append((count, loss, context.session.read_state(("trainable",))))
    replica = context.group.local_replicas[0]
    for count, loss, weights in results:
        expected = reference_model.Oracle.fresh().losses(np.arange(count)).mean()
        assert_close(loss, expected, f"loss of {count} samples")
        what = f"weights of replica {replica} after {count} samples"
        assert_close(weights, _weights_after_local_step(context, replica, count), what)


def average_parameters(context: CheckContext) -> None:
    """After a local step on each replica, all get the mean of the weights."""
    context.restart()
    (batch,) = context.batches(7, 7)
    context.group.local_step(batch, reference_model.RATE)
    context.group.average_parameters()
    weights = context.session.read_state(("trainable",))
    gradients, _ = context.gradients_of_all(context.same_for_all(1))
    local = [
        _weights_after_local_step(context, replica, 7) for replica in range(context.group.replicas)
    ]
    mean = {name: np.mean([w[name] for w in local], axis=0) for name in weights}
    assert_close(weights, mean, "averaged weights")
    _assert_all_same(gradients)


def _weights_after_local_step(
    context: CheckContext, replica: int, count: int
) -> dict[str, np.ndarray]:
    """Weights of one replica by name, float64, after a local step from the start on `count` samples."""
    oracle = reference_model.Oracle.fresh()
    rows = np.array_split(np.arange(count), context.group.replicas)[replica]
    if len(rows):
        oracle.update(oracle.gradients(rows))
    return oracle.weights


def dropout_differs(context: CheckContext) -> None:
    """Each replica draws its own dropout masks, and new ones at every step."""
    context.restart()
    batch = context.same_for_all(1, noise=1.0)
    first, _ = context.gradients_of_all(batch)
    second, _ = context.gradients_of_all(batch)
    masks = [gradients["noisy/kernel"].ravel() for gradients in (*first, *second)]
    for mask in masks:
        assert set(np.unique(mask)) == {0.0, 2.0}, f"not a mask of rate 1/2: {mask}"
    distinct = {mask.tobytes() for mask in masks}
    assert len(distinct) == len(masks), f"{len(distinct)} different masks of {len(masks)}"


def reseeds_dropout(context: CheckContext) -> None:
    """Dropout masks depend on replica and step only, not on which worker draws them or drew before."""
    context.restart()
    batch = context.same_for_all(1, noise=1.0)

    def drawn(replica: int, step: int) -> list[bytes]:
        require(context.group, WorkerGroup).reseed(replica, step)
        gradients, _ = context.gradients_of_all(batch)
        return [of_replica["noisy/kernel"].tobytes() for of_replica in gradients]

    try:
        first, later, other, again = (
            drawn(*replica_and_step) for replica_and_step in ((1, 3), (1, 4), (0, 3), (1, 3))
        )
    except UnsupportedError:
        capabilities = (
            plugin_manager()
            .backend(context.session.plan.backend)
            .capabilities_for(ParameterServerLayout.name)
        )
        assert Capability.PARAMETER_SERVER_STEP not in capabilities.has, (
            "workers of a parameter-server run are asked to"
        )
        return
    if len(context.group.local_replicas) == 1:
        assert len(set(first)) == 1, f"{len(set(first))} masks of one replica and step"
    assert again == first, "the same replica and step, after others: other masks"
    for mask, unlike, same in zip(first, later, other, strict=True):
        assert mask != unlike, "another step: the same mask"
        assert mask != same, "another replica: the same mask"
