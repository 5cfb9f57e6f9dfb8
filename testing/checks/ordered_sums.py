"""Check of sums over the parts of a global batch against a binary tree in NumPy, to the bit."""

from __future__ import annotations

import numpy as np

from isotrain.core.contracts.backend.group_protocols import OrderedSumsGroup
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.data.sampler import part_bounds
from isotrain.core.session.training.ordered_steps import OrderedSteps
from isotrain.testing import reference_model
from isotrain.testing.check_context import CheckContext, assert_close, assert_same


def ordered_sums(context: CheckContext) -> None:
    """Parts have the losses of their samples; gradients and loss are their sums in a tree, to the bit."""
    context.restart()
    group = context.group
    steps = OrderedSteps(group)
    batch = steps.fractions(next(iter(context.session.batches())))
    assert batch.part_counts is not None
    gradients, loss = steps.gradients(batch)
    totals = [np.concatenate([group.numpy(x).ravel() for x in (*each, loss)]) for each in gradients]
    oracle = reference_model.Oracle.fresh()
    parts, losses = {}, {}
    for index, sums in enumerate(require(group, OrderedSumsGroup).part_sums(batch)):
        for replica, slices, tensors in zip(group.local_replicas, batch.slices, sums, strict=True):
            if index < len(slices):
                rows = group.numpy(slices[index].inputs["index"])[: slices[index].count]
                part = f"{part_bounds(batch.part_counts, replica)[0] + index:03}"
                losses[part] = oracle.losses(rows).sum() / batch.size
                parts[part] = np.concatenate(
                    [group.numpy(x).ravel() for x in tensors[: len(gradients[0]) + 1]]
                )
    gathered: dict[str, np.ndarray] = {}
    for each in context.file_exchange.all_gather(parts):
        gathered |= each
    vectors = [gathered[part] for part in sorted(gathered)]
    while len(vectors) > 1:
        vectors = [a + b for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    assert_close({part: each[-1] for part, each in parts.items()}, losses, "losses of parts")
    for replica, total in zip(group.local_replicas, totals, strict=True):
        assert_same(total, vectors[0], f"gradients and loss of replica {replica}")
