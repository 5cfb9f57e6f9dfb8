"""Checks of what a group offers for diagnosis: looking on must change nothing."""

from __future__ import annotations

import contextlib

import numpy as np

from isotrain.core.contracts.group import ReplicaGroup
from isotrain.core.data.batch import Batch
from isotrain.testing import probe
from isotrain.testing.bench import Bench, assert_close, assert_same


def undisturbed_gradients(bench: Bench) -> None:
    """Gradients computed beside a step, within `undisturbed`, change no bit of the run.

    So they do where its body fails.
    """
    batches = bench.batches(14, 7)
    ends = []
    for looks_on in (False, True):
        bench.restart()
        for batch in batches:
            if looks_on and batch is batches[0]:  # both counted twice have the same mean
                _look_on(bench.group, batch)
                with contextlib.suppress(InterruptedError):
                    _look_on(bench.group, batch, InterruptedError())
            bench.group.synchronised_step(batch, probe.RATE)
        ends.append((bench.session.read_state(), bench.session.metrics()))
    assert_same(ends[1][0], ends[0][0], "state")
    assert ends[1][1] == ends[0][1], f"metrics {ends[1][1]}, expected {ends[0][1]}"


def _look_on(group: ReplicaGroup, batch: Batch, error: Exception | None = None) -> None:
    """Computes gradients of which nothing remains."""
    with group.undisturbed():
        group.gradients(batch)
        if error is not None:
            raise error


def kept_gradients(bench: Bench) -> None:
    """A group that keeps gradients gives the mean over all samples, and trains the same bit for bit."""
    batches = bench.batches(14, 7)
    ends, kept = [], []
    for keeps in (False, True):
        if keeps and not bench.group.keep_gradients():
            return
        bench.restart()
        for batch in batches:
            bench.group.synchronised_step(batch, probe.RATE)
            kept += bench.group.kept_gradients() if keeps else []
        ends.append(bench.session.read_state())
    assert_same(ends[1], ends[0], "state")
    oracle, names = probe.Oracle.fresh(), bench.trainable_names()
    local = len(bench.group.local_replicas)
    for step, rows in enumerate(np.arange(14).reshape(2, 7)):
        gradients = oracle.gradients(rows)
        for own in kept[step * local : (step + 1) * local]:
            found = dict(zip(names, map(bench.group.numpy, own), strict=True))
            assert_close(found, gradients, f"gradients of step {step}")
        oracle.update(gradients)
