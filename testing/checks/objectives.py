"""Checks of a loop's batches, steps of objectives, groups, updates and state of replicas, against NumPy."""

from __future__ import annotations

import numpy as np

from isotrain.core.data.sampler import slice_bounds
from isotrain.core.errors import DataError
from isotrain.testing import reference_model
from isotrain.testing.check_context import CheckContext, assert_close


def own_batches(context: CheckContext) -> None:
    """Arrays of a loop, uneven over the processes or of one alone, give the step of all their rows."""
    session, results = context.session, []
    processes = len(session.plan.processes)
    for counts in ([rank + 1 for rank in range(processes)], [*[0] * (processes - 1), 3]):
        context.restart()
        start = sum(counts[: session.rank])
        rows = slice(start, start + counts[session.rank])
        inputs, targets = reference_model.samples()
        local_inputs = {name: array[rows] for name, array in inputs.items()}
        try:
            batch = session.batch(local_inputs, targets[rows])
            size = batch.size
        except DataError:
            size = 0
        sizes = [
            int(each["size"]) for each in context.file_exchange.all_gather({"size": np.array(size)})
        ]
        assert set(sizes) == {sum(counts)}, f"{sizes} rows on the processes, expected {sum(counts)}"
        loss = float(session.step(batch))
        results.append((sum(counts), loss, session.read_state(("trainable",))))
    for count, loss, weights in results:
        oracle, all_rows = reference_model.Oracle.fresh(), np.arange(count)
        assert_close(loss, oracle.losses(all_rows).mean(), f"loss of {count} rows")
        oracle.update(oracle.gradients(all_rows))
        assert_close(weights, oracle.weights, f"weights after {count} rows")


def objective_step(context: CheckContext) -> None:
    """Gathers, sums, means and values of `step` give an objective the loss and gradients of one replica."""
    results = []
    for count, spread in ((7, 0.5), (7, 2.0), (1, 0.25)):
        context.restart()
        (batch,) = context.batches(count, count)
        loss = float(context.session.step(batch, values={"spread": spread}))
        results.append((count, spread, loss, context.session.read_state(("trainable",))))
    for count, spread, loss, weights in results:
        oracle, rows = reference_model.Oracle.fresh(), np.arange(count)
        what = f"{count} samples with the value {spread}"
        expected = oracle.losses(rows).mean() + 3 * spread * oracle.spread(rows)
        assert_close(loss, expected, f"loss of {what}")
        oracle.update(oracle.gradients(rows, spread=3 * spread))
        assert_close(weights, oracle.weights, f"weights after {what}")


def optimizer_groups(context: CheckContext) -> None:
    """Groups of weights have rates and momenta of their own."""
    context.restart()
    for batch in context.batches(14, 7):
        context.session.step(batch)
    weights = context.session.read_state(("trainable",))
    oracle = reference_model.Oracle.fresh()
    for rows in np.split(np.arange(14), 2):
        for name, gradient in oracle.gradients(rows).items():
            factor = 0.5 if name.endswith("bias") else 1.0
            momentum = 0.25 if name == "head/kernel" else reference_model.MOMENTUM
            oracle.update({name: gradient}, reference_model.RATE * factor, momentum)
    assert_close(weights, oracle.weights, "weights")


def per_replica_state(context: CheckContext) -> None:
    """State that `per_replica` names is each replica's own: that of its slice, never averaged."""
    context.restart()
    (batch,) = context.batches(7, 7)
    context.session.step(batch)
    name, group = "statistics/moving_mean", context.group
    local = {
        str(replica): group.read_state(("carry",), replica=replica).get(
            f"carry/{name}", np.zeros(0)
        )
        for replica in group.local_replicas
    }
    gathered = {
        int(replica): mean
        for means in context.file_exchange.all_gather(local)
        for replica, mean in means.items()
    }
    features = reference_model.samples(7)[0]["features"]
    momentum = reference_model.STATISTICS_MOMENTUM
    for replica, mean in gathered.items():
        assert mean.size, f"replica {replica} has no carry/{name}"
        begin, end = slice_bounds(7, group.replicas, replica)
        expected = momentum * context.starts[0][name] + (1 - momentum) * features[begin:end].mean(0)
        assert_close(mean, expected, f"{name} of replica {replica}")


def named_updates(context: CheckContext) -> None:
    """Each update changes its own weights alone, when it is due, after those before it."""
    context.restart()
    losses = [float(context.session.step(batch)) for batch in context.batches(14, 7)]
    weights = context.session.read_state(("trainable",))
    oracle, expected = reference_model.Oracle.fresh(), []
    for step, rows in enumerate(np.split(np.arange(14), 2)):
        loss = 0.0
        for layers in reference_model.UPDATES[: step + 1]:
            loss += oracle.losses(rows).mean()
            gradients = oracle.gradients(rows).items()
            oracle.update({n: each for n, each in gradients if n.partition("/")[0] in layers})
        expected.append(loss)
    assert_close(losses, expected, "losses")
    assert_close(weights, oracle.weights, "weights")
