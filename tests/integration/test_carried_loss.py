"""The loss of a synchronised step takes no collective of its own, and is a scalar that any rank may read."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain

pytestmark = pytest.mark.slow

SPEC = {
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "optimizer": {"name": "sgd", "lr": 0.125},
    "global_batch": 8,
    "epochs": 2,
    "threads": 1,
}


def network() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def samples() -> tuple[np.ndarray, np.ndarray]:
    """So many that the last batch leaves a replica with fewer, and one with none."""
    draw = np.random.default_rng(0)
    return draw.random((25, 4)).astype("f4"), draw.integers(3, size=25)


def trained(session: isotrain.Session, reads: bool) -> tuple[list[float], int]:
    """The losses, read at the end or by rank 0 as they come; and how many all-reduces Python asked for."""
    import torch.distributed as dist

    asked = []
    right = dist.all_reduce

    def counting(*args: Any, **options: Any) -> Any:
        asked.append(args)
        return right(*args, **options)

    dist.all_reduce = counting
    losses = []
    for batch in session.batches():
        losses.append(session.step(batch))
        if reads and session.is_main:
            assert np.isfinite(float(losses[-1]))
    dist.all_reduce = right
    return [float(loss) for loss in losses], len(asked)


def launched(folder: Path, replicas: int, reads: bool = False, **changes: Any) -> Any:
    return isotrain.launch(
        functools.partial(trained, reads=reads),
        {**SPEC, "model": {"torch": network}, "data": samples, **changes},
        backend="torch-ddp",
        replicas=replicas,
        run_directory=folder,
        on_event=lambda event: None,
    )


@pytest.mark.parametrize(
    "changes", [{}, {"accumulate": 2}, {"precision": "bfloat16"}, {"precision": "float64"}]
)
def test_no_collective_for_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    (alone, _), *_ = launched(tmp_path / "alone", 1, **changes)
    (ours, asked), (theirs, _) = launched(tmp_path / "pair", 2, **changes)
    assert asked == 0
    assert ours == theirs
    precision = {"float64": 1e-12, "bfloat16": 1e-2}.get(changes.get("precision", ""), 1e-5)
    np.testing.assert_allclose(ours, alone, rtol=precision)


def test_four_replicas_have_none_for_it_either(tmp_path: Path) -> None:
    (alone, _), *_ = launched(tmp_path / "alone", 1)
    found = launched(tmp_path / "four", 4, reads=True)
    assert [asked for _, asked in found] == [0] * 4
    assert all(losses == found[0][0] for losses, _ in found)
    np.testing.assert_allclose(found[0][0], alone, rtol=1e-5)
