"""Messages name replicas by their processes."""

from __future__ import annotations

from isotrain.core.contracts.process import ProcessInfo, named_replicas


def test_a_replica_with_a_process_of_its_own_is_named_by_the_rank() -> None:
    processes = [ProcessInfo(rank, f"node{rank}", replicas=(rank,)) for rank in range(3)]
    assert named_replicas(processes, {2, 0}) == "rank 0 on node0, rank 2 on node2"


def test_replicas_in_one_process_are_told_apart() -> None:
    processes = [
        ProcessInfo(0, "node1", replicas=(0, 1, 2)),
        ProcessInfo(1, "node2", replicas=(3,)),
    ]
    assert named_replicas(processes, [1]) == "replica 1 of rank 0 on node1"
    expected = "replicas 0, 2 of rank 0 on node1, rank 1 on node2"
    assert named_replicas(processes, [0, 2, 3]) == expected
