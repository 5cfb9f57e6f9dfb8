"""How weights are shared out among replicas, and in which buckets they travel."""

from __future__ import annotations

import pytest

from isotrain.adapters.common.weight_sharding import ShardSpec, fsdp_units, shard_sizes
from isotrain.core.contracts.backend.capabilities import Capabilities, Capability
from isotrain.core.contracts.device_mesh import DATA, SHARD, DeviceMesh
from isotrain.core.contracts.plan import Hosts
from isotrain.core.contracts.state import ModelBytes, StateBytes
from isotrain.core.errors import PlanError
from isotrain.core.sharding.layouts import Hybrid, sharded_group
from isotrain.core.sharding.shard_assignment import assign_shards
from isotrain.strategies.sharded import ShardBucket, Sharded

SIZES = [20, 5, 300, 10, 300, 7, 15, 1]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_each_weight_has_one_owner_and_travels_in_one_bucket(replicas: int) -> None:
    found = assign_shards(SIZES, replicas)
    assert sum(found.shard_sizes) == sum(SIZES)
    buckets = found.buckets(160)
    assert sorted(place for bucket in buckets for place in bucket.weights) == list(
        range(len(SIZES))
    )
    for bucket in buckets:
        places = [place for replica in range(replicas) for place in bucket.weights_of(replica)]
        assert places == list(bucket.weights)
        for replica, size in enumerate(bucket.sizes):
            own = bucket.weights_of(replica)
            assert all(found.owners[place] == replica for place in own)
            assert size == sum(SIZES[place] for place in own)
        assert sum(bucket.sizes) <= 160 or len(bucket.weights) == 1


def test_buckets_go_from_the_last_weight_to_the_first() -> None:
    (last, *_, first) = assign_shards(SIZES, 2).buckets(160)
    assert (sorted(last.weights), sorted(first.weights)) == ([5, 6, 7], [0, 1])


def test_shards_are_as_even_as_the_largest_weights_allow() -> None:
    assert assign_shards(SIZES, 2).shard_sizes == (328, 330)
    assert assign_shards([1000, 1, 1], 3).shard_sizes == (1000, 1, 1)


@pytest.mark.parametrize(("stage", "gradients"), [(1, 658), (2, 330 + 300)])
def test_state_bytes_are_of_the_replica_with_the_largest_shard(stage: int, gradients: int) -> None:
    model = ModelBytes(tuple(SIZES), fixed=50, slots=2)
    strategy = Sharded(stage=stage, bucket_megabytes=160e-6)
    assert strategy.state_bytes(model, 2) == StateBytes(658 + 50, gradients, 2 * 330)
    assert model.replicated.total == 658 + 50 + 658 + 2 * 658


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (1, StateBytes(658 + 50, 658, 2 * 330)),
        (2, StateBytes(658 + 50, 330 + 300, 2 * 330)),
        (3, StateBytes(329 + 300 + 50, 329 + 300, 2 * 329)),
    ],
)
def test_state_of_hybrid_runs_is_divided_by_the_replicas_of_a_host(
    stage: int, expected: StateBytes
) -> None:
    model = ModelBytes(tuple(SIZES), fixed=50, slots=2)
    given = {"stage": stage, "bucket_megabytes": 160e-6, "hybrid": True}
    assert Sharded(**given, host_size=2).state_bytes(model, 6) == expected
    assert Sharded(**given).state_bytes(model, 2) == expected, "on one host"
    alone = Sharded(**given, host_size=1).state_bytes(model, 6)
    assert (alone.weights, alone.slots) == (658 + 50, 2 * 658)


def test_shards_are_inside_hosts() -> None:
    """Processes are numbered host by host, or one of each host in turn."""
    in_turn = Hybrid().device_mesh(6, ((0, 2, 4), (1, 3, 5)))
    after_each_other = Hybrid().device_mesh(6, ((0, 1, 2), (3, 4, 5)))
    for mesh, first in ((in_turn, (0, 2, 4)), (after_each_other, (0, 1, 2))):
        assert (mesh.size(DATA), mesh.size(SHARD)) == (2, 3)
        assert mesh.groups(SHARD)[0] == first
        assert [mesh.coordinates(place)[SHARD] for place in first] == [0, 1, 2]
        assert {mesh.coordinates(place)[DATA] for place in first} == {0}
    assert Hybrid().device_mesh(4, (range(4),)) == DeviceMesh({SHARD: 4}), "as without"
    assert Hybrid(2).device_mesh(4, (range(4),)) == Hybrid().device_mesh(4, ((0, 1), (2, 3)))
    assert Hybrid().device_mesh(2, ((0,), (1,))) == DeviceMesh({DATA: 2, SHARD: 1})


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (((0, 1, 2), (3,)), "2 hosts have 3, 1 replicas"),
        (((0, 3), (1, 2)), r"the hosts have the replicas \(0, 3\), \(1, 2\)"),
    ],
)
def test_hosts_of_different_sizes_are_refused(hosts: Hosts, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Hybrid().device_mesh(4, hosts)


def test_gradients_of_a_shard_are_reduced_between_hosts() -> None:
    (bucket,) = assign_shards([5, 3], 3).buckets(8)
    lot = ShardBucket(bucket, ((0, 2, 4), (1, 3, 5)))
    assert [lot.index_in_host(replica) for replica in range(6)] == [0, 0, 1, 1, 2, 2]
    assert lot.peers == ((0, 1), (2, 3)), "the third of a host updates none of these"


def test_tensors_are_sharded_along_their_longest_axis() -> None:
    spec = ShardSpec((3, 8), 3)
    assert [spec.shard_shape(index) for index in range(3)] == [[3, 3], [3, 3], [3, 2]]
    assert [spec.shard_offset(index) for index in range(3)] == [[0, 0], [0, 3], [0, 6]]
    spec = ShardSpec((7, 2), 3)
    assert [spec.shard_shape(index) for index in range(3)] == [[3, 2], [2, 2], [2, 2]]
    assert [spec.shard_offset(index) for index in range(3)] == [[0, 0], [3, 0], [5, 0]]
    assert shard_sizes([ShardSpec((3, 8), 3), spec]) == [9 + 6, 9 + 4, 6 + 4]


def test_fsdp_units_are_filled_to_their_limit_with_whole_layers() -> None:
    names = ["a/kernel", "a/bias", "b/kernel", "c/kernel", "c/bias", "d/kernel"]
    units = fsdp_units(names, [30, 10, 60, 90, 20, 5], 100, "/")
    assert units == [[0, 1, 2], [3, 4], [5]]


def test_a_sharded_group_claims_no_capability_that_is_not_listed() -> None:
    found = sharded_group(Capabilities(frozenset(Capability)))
    assert {Capability.GRADIENTS, Capability.UPDATE_SHARD} < found.has
    assert not found.has & {Capability.PARAMETER_SERVER_STEP, Capability.PIPELINE_STEP}
    assert found.missing([Capability.PIPELINE_STEP, Capability.LOCAL_STEP]) == [
        "no local-step: each replica updates only its shard of the weights",
        "no pipeline-step: the backend does not declare it",
    ]
    assert sharded_group(Capabilities()).has == {
        Capability.UPDATE_SHARD,
        Capability.REDUCE_SCATTER_GRADIENTS,
    }
