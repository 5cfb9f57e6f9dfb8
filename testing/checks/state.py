"""Checks of named state, evaluation, predictions, and gradients that are observed beside a run."""

from __future__ import annotations

import contextlib

import numpy as np

from isotrain.core.contracts.backend.group_protocols import GradientKeepingGroup
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.state import MODEL_STATE
from isotrain.core.data.batch import Batch
from isotrain.core.errors import IsotrainError
from isotrain.testing import reference_model
from isotrain.testing.check_context import CheckContext, assert_close, assert_same


def state_round_trip(context: CheckContext) -> None:
    """All state, optimizer state included, can be restored bit for bit, and training continues alike.

    The step itself need not repeat to the bit: the order of a sum over 3 replicas may depend on timing.
    """
    batches = context.batches(14, 7)
    context.restart()
    context.group.synchronous_step(batches[0], reference_model.RATE)
    kept = context.session.read_state()
    described = context.group.describe_state()
    assert list(described) == list(kept), "describe_state and read_state name other state"
    for name, array in kept.items():
        info = described[name]
        assert (info.shape, info.dtype) == (array.shape, array.dtype.name), f"{name} is not {info}"
        assert info.nbytes == array.nbytes, f"{name} takes {array.nbytes} bytes and not {info}"
    context.group.synchronous_step(batches[1], reference_model.RATE)
    after = context.session.read_state(("trainable", "optimizer"))
    context.session.write_state(kept)
    restored = context.session.read_state()
    context.group.synchronous_step(batches[1], reference_model.RATE)
    again = context.session.read_state(("trainable", "optimizer"))
    assert any(name.startswith("optimizer/") for name in kept), "no optimizer state"
    assert_same(restored, kept, "state read after it was written")
    assert_close(again, after, "state after the step was taken again")


def state_kinds(context: CheckContext) -> None:
    """The kinds of state are disjoint and complete, and the names are those of the model."""
    state = context.session.read_state()
    kinds = {kind: context.session.read_state((kind,)) for kind in MODEL_STATE}
    assert set(kinds["trainable"]) == set(reference_model.starting_state()), sorted(
        kinds["trainable"]
    )
    assert "statistics/moving_mean" in kinds["non-trainable"], sorted(kinds["non-trainable"])
    assert all(name.startswith("optimizer/") for name in kinds["optimizer"])
    assert sum(map(len, kinds.values())) == len(state), "a name is of two kinds, or of none"


def state_is_a_copy(context: CheckContext) -> None:
    """State that was read does not change when training continues."""
    context.restart()
    state = context.session.read_state()
    kept = {name: value.copy() for name, value in state.items()}
    (batch,) = context.batches(7, 7)
    context.group.synchronous_step(batch, reference_model.RATE)
    assert_same(state, kept, "state that was read before the step")


def unknown_state_is_refused(context: CheckContext) -> None:
    """A name that the model does not have, or another shape, is an error that says so."""
    wrong = {
        "hiden/bias": np.zeros(5),
        "optimizer/no such slot": np.zeros(5),
        "hidden/bias": np.zeros(6),
    }
    messages = {name: _refusal(context, name, value) for name, value in wrong.items()}
    for name, text in messages.items():
        assert text, f"{name} of shape {wrong[name].shape} was accepted"
        assert name.removeprefix("optimizer/") in text, f"does not name {name}: {text}"


def _refusal(context: CheckContext, name: str, value: np.ndarray) -> str:
    """Text of the error on writing an array of any shape; empty when it was accepted."""
    try:
        context.session.write_state({name: value})
    except IsotrainError as error:
        return str(error)
    return ""


def evaluation(context: CheckContext) -> None:
    """Loss and metrics over any number of samples are exact means, whatever the number of replicas."""
    context.restart()
    counts = (22, 14, 1)
    by_count = [context.session.evaluate(reference_model.samples(count)) for count in counts]
    oracle = reference_model.Oracle.fresh()
    for count, results in zip(counts, by_count, strict=True):
        rows = np.arange(count)
        values = {"loss": oracle.losses(rows), **oracle.metrics(rows)}
        expected = {name: per_sample.mean() for name, per_sample in values.items()}
        assert_close(results, expected, f"evaluation of {count} samples")


def predictions(context: CheckContext) -> None:
    """Predictions are those of evaluation mode, for every sample, in order, with any replicas."""
    context.restart()
    counts = (22, 14, 1)
    by_count = [
        context.session.predict(reference_model.samples(count, noise=1.0)) for count in counts
    ]
    for count, outputs in zip(counts, by_count, strict=True):
        expected = reference_model.Oracle.fresh().outputs(np.arange(count))
        assert_close(outputs, expected, f"predictions for {count} samples")


def evaluation_changes_nothing(context: CheckContext) -> None:
    """Evaluation changes no weights, moving statistics, optimizer state or training metrics."""
    context.restart()
    context.session.metrics()
    (batch,) = context.batches(7, 7)
    context.group.synchronous_step(batch, reference_model.RATE)
    before = context.session.read_state()
    context.session.evaluate()
    after = context.session.read_state()
    metrics = context.session.metrics()
    assert_same(after, before, "state after evaluation")
    per_sample = reference_model.Oracle.fresh().metrics(np.arange(7))
    expected = {name: values.mean() for name, values in per_sample.items()}
    assert_close(metrics, expected, "training metrics after evaluation")


def gradients_preserve_state(context: CheckContext) -> None:
    """Gradients computed beside a step, within `preserving_training_state`, change no bit of the run.

    The same holds where the body of the context manager fails.
    """
    batches = context.batches(14, 7)
    ends = []
    for observes in (False, True):
        context.restart()
        for batch in batches:
            # only the first: metrics that counted both batches twice would have the same mean
            if observes and batch is batches[0]:
                _observe(context.group, batch)
                with contextlib.suppress(InterruptedError):
                    _observe(context.group, batch, InterruptedError())
            context.group.synchronous_step(batch, reference_model.RATE)
        ends.append((context.session.read_state(), context.session.metrics()))
    assert_same(ends[1][0], ends[0][0], "state")
    assert ends[1][1] == ends[0][1], f"metrics {ends[1][1]}, expected {ends[0][1]}"


def _observe(group: ReplicaGroup, batch: Batch, error: Exception | None = None) -> None:
    """Computes gradients without a trace; raises `error`, if any, within the context manager."""
    with group.preserving_training_state():
        group.gradients(batch)
        if error is not None:
            raise error


def kept_gradients(context: CheckContext) -> None:
    """A group that keeps gradients gives the mean over all samples, and trains the same bit for bit."""
    group = context.group
    if not isinstance(group, GradientKeepingGroup):
        return
    batches = context.batches(14, 7)
    ends, kept = [], []
    for keeps in (False, True):
        if keeps and not group.keep_gradients():
            return
        context.restart()
        for batch in batches:
            context.group.synchronous_step(batch, reference_model.RATE)
            kept += group.kept_gradients() if keeps else []
        ends.append(context.session.read_state())
    assert_same(ends[1], ends[0], "state")
    oracle, names = reference_model.Oracle.fresh(), context.trainable_names()
    local = len(context.group.local_replicas)
    for step, rows in enumerate(np.arange(14).reshape(2, 7)):
        gradients = oracle.gradients(rows)
        for of_replica in kept[step * local : (step + 1) * local]:
            by_name = dict(zip(names, map(context.group.numpy, of_replica), strict=True))
            assert_close(by_name, gradients, f"gradients of step {step}")
        oracle.update(gradients)
