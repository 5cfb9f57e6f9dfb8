"""What the detectors of environments are tested on is what the engines really set."""

from __future__ import annotations

import pytest
from cluster.bed import TwoHostCluster
from cluster.engines import EXTERNAL_LAUNCHERS
from cluster.recording import RECORDED, form, hosts, record, recorded


@pytest.mark.parametrize("name", EXTERNAL_LAUNCHERS)
def test_an_engine_sets_what_was_recorded(bed: TwoHostCluster, name: str) -> None:
    found, before = record(bed, EXTERNAL_LAUNCHERS[name]), recorded(name)
    assert hosts(found) == hosts(before)
    assert form(found) == form(before)


def test_every_recorded_engine_is_started_here() -> None:
    assert {file.stem for file in RECORDED.glob("*.json")} == {*EXTERNAL_LAUNCHERS}
