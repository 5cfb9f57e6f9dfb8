"""What the detectors of environments are tested on is what the launchers really set."""

from __future__ import annotations

import pytest
from cluster.external_launchers import EXTERNAL_LAUNCHERS
from cluster.record_environments import RECORDED, form, hosts, record, recorded
from cluster.two_hosts import TwoHostCluster


@pytest.mark.parametrize("name", EXTERNAL_LAUNCHERS)
def test_a_launcher_sets_the_recorded_variables(bed: TwoHostCluster, name: str) -> None:
    found, before = record(bed, EXTERNAL_LAUNCHERS[name]), recorded(name)
    assert hosts(found) == hosts(before)
    assert form(found) == form(before)


def test_every_recorded_launcher_is_started_here() -> None:
    assert {file.stem for file in RECORDED.glob("*.json")} == {*EXTERNAL_LAUNCHERS}
