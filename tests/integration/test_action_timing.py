"""What the steps of every backend are made of, as `ActionTimingGroup` reports it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance.backends import BACKENDS, param
from integration import session_specs

import isotrain
from isotrain.plugin import ActionTimingGroup
from isotrain.testing.consecutive_sessions import launched_in_turn

FEATURES = ("tf-mirrored", "horovod-torch", "horovod-tf")
BEFORE_UPDATE = ["forward", "backward", "exposed exchange"]

pytestmark = [pytest.mark.usefixtures("reference"), pytest.mark.slow]


def steps(session: isotrain.Session, name: str) -> dict[str, Any]:
    """The actions of each step, timed from the fourth on in the sessions that are named so."""
    group = session.group
    assert isinstance(group, ActionTimingGroup)
    spans: list[Any] = []
    for step, batch in enumerate(session.batches()):
        if name == "timed" and step == 3:
            group.set_action_timing(True)
        session.step(batch)
        spans.append([(each.name, each.begin, each.end) for each in group.last_actions()])
    return {"spans": spans, "weights": session.read_state()}


def actions_of_timed_steps(replicas: int, backend: str, **fields: Any) -> list[Any]:
    """Names of actions of each step from the fourth on; the weights are those of a run that is not timed."""
    specs = dict.fromkeys(("timed", "plain"), session_specs.spec(**fields))
    timed, plain = launched_in_turn(specs, steps, backend, replicas)[0].values()
    for name, value in plain["weights"].items():
        np.testing.assert_array_equal(timed["weights"][name], value)
    assert not any(plain["spans"])
    assert not any(timed["spans"][:3])
    for actions in timed["spans"][3:]:
        ends = [end for _, _, end in actions]
        begins = [begin for _, begin, _ in actions]
        assert begins[1:] == ends[:-1], "each begins where the one before ended"
        assert all(begin <= end for _, begin, end in actions)
    return [[name for name, _, _ in actions] for actions in timed["spans"][3:]]


@pytest.mark.parametrize(
    "backend", [param(each, features=each in FEATURES) for each in (*BACKENDS, "reference")]
)
def test_steps_of_two_replicas(backend: str) -> None:
    for names in actions_of_timed_steps(2, backend):
        assert names in (BEFORE_UPDATE, [*BEFORE_UPDATE, "update"])


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker"])
def test_one_replica_exchanges_nothing(backend: str) -> None:
    for names in actions_of_timed_steps(1, backend):
        assert [name for name in names if name != "update"] == BEFORE_UPDATE[:2]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("torch-ddp", [*BEFORE_UPDATE[:2], *BEFORE_UPDATE]),
        ("tf-multiworker", ["forward and backward", "exposed exchange"]),
    ],
)
def test_accumulated_gradients(backend: str, expected: list[str]) -> None:
    for names in actions_of_timed_steps(2, backend, gradient_accumulation_steps=2):
        assert [name for name in names if name != "update"] == expected
