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
    """Parts have the losses of their samples; gradients and loss are their sums in a tree, to the bit.

    All replicas have the same bits of the part that each computes besides its own ones.
    """
    context.restart()
    group = context.group
    steps = OrderedSteps(group)
    batch = steps.fractions(next(iter(context.session.batches())))
    assert batch.part_counts is not None
    gradients, loss = steps.gradients(batch)
    totals = [np.concatenate([group.numpy(x).ravel() for x in (*each, loss)]) for each in gradients]
    oracle = reference_model.Oracle.fresh()
    parts: dict[str, np.ndarray] = {}
    verified: dict[str, np.ndarray] = {}
    losses = {}
    for index, sums in enumerate(require(group, OrderedSumsGroup).part_sums(batch)):
        for replica, slices, tensors in zip(group.local_replicas, batch.slices, sums, strict=True):
            if index >= len(slices):
                continue
            rows = group.numpy(slices[index].inputs["index"])[: slices[index].count]
            first, end = part_bounds(batch.part_counts, replica)
            part = f"{first + index:03}" if first + index < end else f"verified {replica:03}"
            losses[part] = oracle.losses(rows).sum() / batch.size
            (parts if first + index < end else verified)[part] = np.concatenate(
                [group.numpy(x).ravel() for x in tensors[: len(gradients[0]) + 1]]
            )
    gathered: dict[str, np.ndarray] = {}
    for each in context.file_exchange.all_gather(parts | verified):
        gathered |= each
    repeated = [gathered.pop(name) for name in sorted(gathered) if name.startswith("verified")]
    for replica, computed in enumerate(repeated):
        assert_same(computed, repeated[0], f"the part that all compute, on replica {replica}")
    is_repeated = [np.array_equal(part, repeated[0]) for part in gathered.values()]
    assert any(is_repeated), (
        "expected the part that all compute to have the bits of one of the parts"
    )
    vectors = [gathered[part] for part in sorted(gathered)]
    while len(vectors) > 1:
        vectors = [a + b for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    assert_close(
        {part: each[-1] for part, each in (parts | verified).items()}, losses, "losses of parts"
    )
    for replica, total in zip(group.local_replicas, totals, strict=True):
        assert_same(total, vectors[0], f"gradients and loss of replica {replica}")
