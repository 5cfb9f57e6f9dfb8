"""What the steps of every backend are made of, as `ActionTimingGroup` reports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.session_specs import launch

import isotrain
from isotrain.plugin import ActionTimingGroup

BACKENDS = ["torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf"]
BEFORE_UPDATE = ["forward", "backward", "exposed exchange"]

pytestmark = pytest.mark.usefixtures("reference")


def timed(session: isotrain.Session, *, measured: bool) -> dict[str, Any]:
    group = session.group
    assert isinstance(group, ActionTimingGroup)
    spans: list[Any] = []
    for step, batch in enumerate(session.batches()):
        if measured and step == 3:
            group.set_action_timing(True)
        session.step(batch)
        spans.append([(each.name, each.begin, each.end) for each in group.last_actions()])
    return {"spans": spans, "weights": session.read_state()}


def both(folder: Path, replicas: int, backend: str, **fields: Any) -> list[Any]:
    """Actions of each step, where they are timed from step 3 on, and the weights are as without."""
    timed_run, plain = (
        launch(timed_job(measured), folder / str(measured), replicas, backend, **fields)
        for measured in (True, False)
    )
    for name, value in plain["weights"].items():
        np.testing.assert_array_equal(timed_run["weights"][name], value)
    assert not any(plain["spans"])
    assert not any(timed_run["spans"][:3])
    for actions in timed_run["spans"][3:]:
        ends = [end for _, _, end in actions]
        begins = [begin for _, begin, _ in actions]
        assert begins[1:] == ends[:-1], "each begins where the one before ended"
        assert all(begin <= end for _, begin, end in actions)
    return [[name for name, _, _ in actions] for actions in timed_run["spans"][3:]]


def timed_job(measured: bool) -> Any:
    import functools

    return functools.partial(timed, measured=measured)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_steps_of_two_replicas(tmp_path: Path, backend: str) -> None:
    for names in both(tmp_path, 2, backend):
        assert names in (BEFORE_UPDATE, [*BEFORE_UPDATE, "update"])


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker"])
def test_one_replica_exchanges_nothing(tmp_path: Path, backend: str) -> None:
    for names in both(tmp_path, 1, backend):
        assert [name for name in names if name != "update"] == BEFORE_UPDATE[:2]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("torch-ddp", [*BEFORE_UPDATE[:2], *BEFORE_UPDATE]),
        ("tf-multiworker", ["forward and backward", "exposed exchange"]),
    ],
)
def test_accumulated_gradients(tmp_path: Path, backend: str, expected: list[str]) -> None:
    for names in both(tmp_path, 2, backend, gradient_accumulation_steps=2):
        assert [name for name in names if name != "update"] == expected
