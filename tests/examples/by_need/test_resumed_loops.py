"""Loops with state of their own go on where they were, once the spec has checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.by_need.harness import WEIGHTS, load
from helpers.waiting import wait_until

import isotrain
from isotrain.core.checkpoints.folder import CheckpointFolder

pytestmark = pytest.mark.examples


def loop(session: isotrain.Session, name: str, last: int | None = None) -> dict[str, np.ndarray]:
    """Weights after the loop of an example, which may fail before its step `last`."""
    build = type(session).batch

    def batch(self: isotrain.Session, *arrays: Any) -> Any:
        if self.steps_done == last:
            checkpoints = CheckpointFolder(str(self.run_directory / "checkpoints"))
            wait_until(checkpoints.newest, 60, "no checkpoint was saved")
            raise InterruptedError
        return build(self, *arrays)

    type(session).batch = batch  # type: ignore[method-assign]
    load(name).train(session)
    return session.read_state(WEIGHTS)


@pytest.mark.parametrize(
    ("name", "every", "last"),
    [
        ("moco", 3, 4),
        ("truncated_backpropagation", 2, 3),
        ("active_learning", 3, 5),
        ("active_learning", 4, 6),
        ("ppo", 3, 5),
    ],
)
def test_an_interrupted_loop_ends_with_the_same_bits(
    name: str, every: int, last: int, tmp_path: Path
) -> None:
    checkpoint = {"every_steps": every}
    spec = load(name).spec.replace(precision="float64", threads=1, checkpoint=checkpoint)
    launch = functools.partial(
        isotrain.launch, spec=spec, backend="torch-ddp", replicas=2, on_event=lambda event: None
    )
    work = functools.partial(loop, name=name)
    whole, *_ = launch(work, output=tmp_path / "whole")
    with pytest.raises(isotrain.RunFailedError, match="InterruptedError"):
        launch(functools.partial(work, last=last), output=tmp_path / "part")
    resumed, *_ = launch(work, output=tmp_path / "rest", resume=tmp_path / "part")
    for weight, array in whole.items():
        np.testing.assert_array_equal(resumed[weight], array, err_msg=weight)
