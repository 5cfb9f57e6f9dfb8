"""Checks of gradient capture for diagnosis: observing must not change the run."""

from __future__ import annotations

import contextlib

import numpy as np

from isotrain.core.contracts.group_protocols import GradientKeepingGroup
from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.data.batch import Batch
from isotrain.testing import reference_model
from isotrain.testing.check_context import CheckContext, assert_close, assert_same


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
