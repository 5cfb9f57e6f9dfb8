"""The loss of a synchronised step takes no collective of its own, and is a scalar that any rank may read."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.cases import THREADS

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

SPEC = {
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "optimizer": {"name": "sgd", "lr": 0.125},
    "global_batch_size": 8,
    "epochs": 2,
    "threads": THREADS,
}


def network() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Samples whose last batch leaves one replica with fewer, and one with none."""
    draw = np.random.default_rng(0)
    return draw.random((25, 4)).astype("f4"), draw.integers(3, size=25)


def trained(
    session: isotrain.Session, reads: bool, seen: list[Any] | None = None
) -> tuple[list[float], int]:
    """The losses, read at the end or by rank 0 as they come; and how many all-reduces Python asked for.

    Args:
        session: Of the run.
        reads: Whether rank 0 reads each loss at once.
        seen: Where to keep the batches.
    """
    import torch.distributed as dist

    asked = []
    right = dist.all_reduce

    def counting(*args: Any, **options: Any) -> Any:
        if args[0].numel() < 3:  # three numbers are what processes agree on about once a second
            asked.append(args)
        return right(*args, **options)

    dist.all_reduce = counting
    losses = []
    for batch in session.batches():
        losses.append(session.step(batch))
        if seen is not None:
            seen.append(batch)
        if reads and session.is_main:
            assert np.isfinite(float(losses[-1]))
    dist.all_reduce = right
    return [float(loss) for loss in losses], len(asked)


def launched(folder: Path, replicas: int, **changes: Any) -> Any:
    return isotrain.launch(
        functools.partial(trained, reads=True),
        {**SPEC, "model": {"torch": network}, "data": samples, **changes},
        backend="torch-ddp",
        replicas=replicas,
        output=folder,
        on_event=lambda event: None,
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_accumulation_steps": 2}, {"precision": "bfloat16"}, {"precision": "float64"}],
)
def test_the_loss_needs_no_collective_of_its_own(tmp_path: Path, changes: dict[str, Any]) -> None:
    (alone, _), *_ = launched(tmp_path / "alone", 1, **changes)
    (ours, asked), (theirs, _) = launched(tmp_path / "pair", 2, **changes)
    assert asked == 0
    assert ours == theirs
    precision = {"float64": 1e-12, "bfloat16": 1e-2}.get(changes.get("precision", ""), 1e-5)
    np.testing.assert_allclose(ours, alone, rtol=precision)


SIZES = {
    "56": (8, False, False),
    "63": (9, False, False),
    "66": (9, False, True),
    "75": (9, True, True),
    "280007, more than a bucket": (40001, False, False),
}
"""Numbers of weights, and of what layers: inner width, and whether the first and the last have a bias."""
ALONE = {
    3: {"66", "280007, more than a bucket"},
    4: {"56", "280007, more than a bucket"},
}
"""By replicas, the sizes with which the loss goes by itself: they are multiples of twice the replicas, so
that one number more would move the borders of a ring's segments; or the last bucket is not known before."""


def sized(width: int, first: bool, last: bool) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(4, width, bias=first), nn.ReLU(), nn.Linear(width, 3, bias=last))


def cross_entropy(targets: Any, logits: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(logits, targets)


def as_by_hand(session: isotrain.Session, name: str) -> tuple[list[float], int, bool]:
    """As `trained`; also whether a loop by hand in the same processes ends with the same weights."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        copy.deepcopy(session.group.model), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=SPEC["optimizer"]["lr"])
    batches = []
    losses, asked = trained(session, reads=True, seen=batches)
    for batch in batches:
        ((micro_batch,),) = batch.slices
        optimizer.zero_grad()
        (
            cross_entropy(micro_batch.targets, model(micro_batch.inputs)) * micro_batch.weight
        ).backward()
        optimizer.step()
    pairs = zip(session.group.model.parameters(), model.parameters(), strict=True)
    return losses, asked, all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.kernels
@pytest.mark.parametrize("replicas", [3, 4])
def test_sums_are_those_of_a_loop_by_hand(replicas: int) -> None:
    specs = {
        name: {
            **SPEC,
            "model": {"torch": functools.partial(sized, *layers)},
            "loss": {"torch": cross_entropy},
            "data": samples,
            "ignore": ["ISO301"],  # the trial of the loss reduces too
        }
        for name, layers in SIZES.items()
    }
    found = launched_in_turn(specs, as_by_hand, "torch-ddp", replicas)
    for name, (losses, asked, same) in found[0].items():
        assert same, name
        assert asked == (len(losses) if name in ALONE[replicas] else 0), name
        assert all(list(each[name]) == list(found[0][name]) for each in found), name
