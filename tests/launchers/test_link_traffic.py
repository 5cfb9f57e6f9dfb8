"""Over slow links between hosts travel the bytes that plans predict, by the kernel's counters."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.network import Network
from cluster.two_hosts import TwoHostCluster

from benchmarks import links

MBIT = 100
HEADERS = 0.03
"""Of Ethernet, IP and TCP, acknowledgements, and what the run itself says: a part of what is sent."""


@pytest.fixture(scope="module")
def rows(bed: TwoHostCluster) -> dict[str, links.Row]:
    """Measured traffic, by strategy."""
    bed.network.shape(MBIT)
    try:
        found = links.measured(bed.network, 2, links.STRATEGIES, links.Sizes(steps=8))
    finally:
        bed.network.unshape()
    return {row.strategy: row for row in found}


@pytest.mark.parametrize("strategy", links.STRATEGIES)
def test_traffic_of_a_host_is_as_planned(rows: dict[str, links.Row], strategy: str) -> None:
    row = rows[strategy]
    assert row.predicted is not None
    assert row.predicted < row.sent < (1 + HEADERS) * row.predicted
    assert row.seconds > 0.9 * row.sent * 8 / (MBIT * 1e6)


def test_fewer_bytes_leave_a_host_than_with_data_parallel(rows: dict[str, links.Row]) -> None:
    """Each of four replicas in a ring sends 1.5 times the gradients; of two hosts each sends them once."""
    each, first, rarely = (rows[strategy].sent for strategy in links.STRATEGIES)
    assert each / first == pytest.approx(1.5, rel=HEADERS)
    assert each / rarely == pytest.approx(8, rel=HEADERS)


def test_others_sum_for_the_replica_whose_link_is_slow(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """It sends each gradient once and one of 8 blocks more: one of four equals sends 1.5 times as much."""
    folder = Path(tmp_path_factory.mktemp("slow"))
    with Network(folder, [f"home{number}" for number in range(1, 5)]) as network:
        network.shape(1000)
        network.shape(40, network.hosts[-1:])
        rows = links.measured(network, 1, list(links.IN_PARTS), links.Sizes(steps=4))
    equal, by_speed = (row.sent_by_last for row in rows)
    assert by_speed / equal == pytest.approx(1.125 / 1.5, rel=HEADERS)
