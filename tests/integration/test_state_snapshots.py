"""Checkpoints that follow each other are copied to the same memory, and hold what each was saved for."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated
from integration import native_resume_models, portable_resume_models

import isotrain
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.contracts.state import MODEL_STATE

_PAUSE = 0.5


def save_thrice(session: isotrain.Session, *, folder: Path) -> None:
    saved = []
    for batch, _ in zip(session.batches(), range(3), strict=False):
        session.step(batch)
        session.save(folder)
        saved.append(session.read_state())
    kept = {"of a layer that is gone": np.zeros(1)}
    first = session.group.copy_state(MODEL_STATE, kept)()
    assert kept.keys() == first.keys()
    session.step(next(session.batches()))
    again = session.group.copy_state(MODEL_STATE, kept)()
    assert all(np.shares_memory(again[name], array) for name, array in first.items())
    expected = session.read_state()
    assert all(np.array_equal(again[name], array) for name, array in expected.items())
    session.step(next(session.batches()))
    expected = session.read_state()
    assert all(np.array_equal(v, expected[n]) for n, v in while_stepping(session, kept).items())
    for checkpoint, state in zip(CheckpointFolder(folder).complete(), saved, strict=True):
        found = checkpoint.read("state")
        assert all(np.array_equal(found[name], array) for name, array in state.items())


def while_stepping(session: isotrain.Session, kept: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A copy that is finished in the middle of the next step, if that waits; else after it."""
    trainable = session.group.describe_state(["trainable"])
    before = {name: kept[name].copy() for name in trainable}
    begun = session.group.copy_state(MODEL_STATE, kept)
    assert all(np.array_equal(kept[name], before[name]) for name in trainable), "not yet copied"
    with ThreadPoolExecutor(1) as thread:
        copied = thread.submit(lambda: time.sleep(_PAUSE) or begun())
        session.step(next(session.batches()))
        return copied.result()


def begun_copy(hold: Any, weight: Any) -> Callable[[], list[float]]:
    """Gives the values of a weight, once it is copied."""
    own = weight.detach()
    finish = hold.hold_for({"weight": own}, lambda: {"weight": own.numpy().copy()})
    return lambda: finish()["weight"].tolist()  # type: ignore[no-any-return]


def hold_of_a_weight(change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """After a first copy, and a forward pass that has changed the weight so."""
    import torch

    from isotrain.adapters.torch.base.snapshot_guard import SnapshotGuard

    hold, weight = SnapshotGuard(), torch.nn.Parameter(torch.ones(3))
    first = begun_copy(hold, weight)
    change(weight)
    assert first() == [1, 1, 1]
    hold.wait_after_forward()
    return hold, weight


def copies_of_what_passes_change(session: isotrain.Session) -> None:
    """Neither a change that torch does not count nor one that comes later makes a copy of no step."""
    import torch

    hold, weight = hold_of_a_weight(lambda weight: weight.data.clamp_(max=0.5))
    copy = begun_copy(hold, weight)
    weight.data.zero_()
    assert copy() == [0.5, 0.5, 0.5]
    hold, weight = hold_of_a_weight(lambda weight: weight.sum())
    held, copy = weight.data, begun_copy(hold, weight)
    weight.data = torch.zeros(3)  # as the check of a record does for a while
    assert copy() == [1, 1, 1]
    weight.data = held
    copy = begun_copy(hold, weight)
    torch.nn.init.zeros_(weight)
    with pytest.raises(isotrain.IsotrainError, match="forward pass changed its own weights"):
        copy()
    copy = begun_copy(hold, weight)
    torch.nn.init.ones_(weight)
    assert copy() == [0, 0, 0]


@pytest.mark.slow
def test_a_snapshot_is_of_the_step_after_which_it_began(tmp_path: Path) -> None:
    spec = native_resume_models.spec()
    run_isolated(copies_of_what_passes_change, spec, "torch-ddp", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("spec", [native_resume_models.spec, portable_resume_models.spec])
def test_each_checkpoint_has_the_state_of_its_own_step(
    spec: Callable[..., Any], tmp_path: Path
) -> None:
    work = functools.partial(save_thrice, folder=tmp_path / "saved")
    run_isolated(work, spec(), "torch-ddp", tmp_path / "run")
