"""State that members of an elastic run hand over: which metrics each of them gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.contracts.membership import Membership
from isotrain.core.session.checkpointing.handover import CarriedState


def carried(replica: int, done: int) -> CarriedState:
    """State of a replica whose sums are 10 times its index, and 1 more with the next step."""
    sums, with_next = ({"metrics/loss": TensorPart(np.full(2, 10.0 * replica + n))} for n in (0, 1))
    weights = {"model": {"w": TensorPart(np.full(3, float(done)))}}
    return CarriedState(replica, done, 0, False, False, {"done": done}, weights, sums, with_next)


@pytest.mark.parametrize("collected", [False, True])
def test_who_is_a_step_behind_gives_the_metrics_with_that_step(
    tmp_path: Path, collected: bool
) -> None:
    """Rank 3 has done step 5; in rank 1 it was broken off after its samples were counted."""
    membership = Membership(
        1, (1, 3, 4), (0, 0, 0), 3, (1, 4), 5, collected, 4, 0, 0, str(tmp_path)
    )
    CarriedState.none().hand_over(membership, 4, lambda: False)  # joins
    for member, done in ((1, 4), (3, 5)):
        location = carried(member, done).hand_over(membership, member, lambda: False)
    checkpoint = CheckpointFolder(location).newest()
    assert checkpoint is not None
    assert checkpoint.step == 5
    assert checkpoint.read("model")["w"].tolist() == [5.0] * 3
    found = {name: checkpoint.read(name) for name in checkpoint.sections() if name != "model"}
    sums = {name: arrays["metrics/loss"].tolist() for name, arrays in found.items()}
    assert sums == ({} if collected else {"replica-1": [11.0] * 2, "replica-3": [30.0] * 2})


def test_the_size_is_that_of_the_files(tmp_path: Path) -> None:
    """A little more: names and descriptions are counted generously, pages that are not full are not."""
    names = [f"block-{index}/attention/kernel" for index in range(100)]
    weights = {name: TensorPart(np.full((64, 65), 0.5)) for name in names}
    sums = {"metrics/loss": TensorPart(np.full(2, 1.0))}
    notes = {"losses": [0.25] * 10_000}
    state = CarriedState(0, 5, 0, False, False, notes, {"state": weights}, sums, {})
    membership = Membership(1, (0,), (0,), 0, (), 5, 0, 4, 0, 0, str(tmp_path))
    state.hand_over(membership, 0, lambda: False)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    told = state.nbytes + state.metrics_nbytes
    assert told - 512 * len(names) < written < told
