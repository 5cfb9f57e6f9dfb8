"""Members of an elastic run: what the launcher tells a process, and what a process keeps for rank 0."""

from __future__ import annotations

import json
import mmap
import os
import threading
from dataclasses import replace

import pytest

from isotrain.core.contracts.device_mesh import DATA, DeviceMesh
from isotrain.core.contracts.events import EpochEnded, ProcessEvent, Scalars, Steps
from isotrain.core.contracts.membership import Membership, newcomer_context
from isotrain.core.contracts.process import ProcessContext, ProcessInfo, from_variables
from isotrain.core.contracts.reporter import (
    PAGE_BYTES,
    Reporter,
    acknowledge,
    publish_membership,
    read_status,
    request_checkpoint,
    request_regroup,
    void_group,
)
from isotrain.core.errors import EndedError, IsotrainError

FIELDS = {
    "source": 3,
    "behind": (2,),
    "done": 5,
    "metrics_collected": True,
    "reported": 4,
    "epochs": 1,
    "scalars": 3,
    "folder": "/f",
}


def membership(*members: int, generation: int = 1) -> Membership:
    ports = (7, *(10 + member for member in members[1:]))
    return Membership(generation=generation, members=members, ports=ports, **FIELDS)  # type: ignore[arg-type]


def test_a_membership_survives_the_page_beside_the_status() -> None:
    descriptor = os.memfd_create("page")
    os.truncate(descriptor, PAGE_BYTES)
    page, reporter = mmap.mmap(descriptor, PAGE_BYTES), Reporter(page=descriptor)
    reporter.step = 4
    reporter.enter("step")
    assert not reporter.is_void(0)
    void_group(page, 0)
    assert reporter.is_void(0)
    assert not reporter.is_void(1)
    for generation in (1, 2):
        expected = membership(0, 2, 3, generation=generation)
        publish_membership(page, generation, expected.to_bytes())
        text = reporter.wait_for_membership(generation - 1)
        assert Membership.from_bytes(text) == expected
        assert reporter.is_void(generation - 1)
        assert not reporter.is_void(generation)
        void_group(page, generation)
        assert reporter.is_void(generation)
        assert reporter.wait_for_membership(generation - 1) == text
    request_checkpoint(page, and_end=False)
    assert reporter.checkpoint_request.save
    assert read_status(page)[::2] == (4, "step")
    with pytest.raises(IsotrainError, match="too many processes"):
        publish_membership(page, 3, membership(*range(50_000)).to_bytes())


def test_a_membership_of_ten_thousand_processes_fits_on_the_page() -> None:
    descriptor = os.memfd_create("page")
    os.truncate(descriptor, PAGE_BYTES)
    page, reporter = mmap.mmap(descriptor, PAGE_BYTES), Reporter(page=descriptor)
    count = 10_000
    ports = tuple(range(50_000, 50_000 + count))
    fields = FIELDS | {"behind": tuple(range(1, count)), "folder": "/dev/shm/isotrain-elastic-x"}
    expected = Membership(1, tuple(range(count)), ports, **fields)  # type: ignore[arg-type]
    publish_membership(page, 1, expected.to_bytes())
    assert Membership.from_bytes(reporter.wait_for_membership(0)) == expected
    assert not reporter.checkpoint_request.end


def test_a_process_that_is_to_end_waits_for_no_members() -> None:
    reporter = Reporter()
    reporter.end_soon()
    with pytest.raises(EndedError, match="requested to end"):
        reporter.wait_for_membership(0)


def test_members_are_ranked_anew() -> None:
    processes = tuple(ProcessInfo(rank, local_rank=rank, replicas=(rank,)) for rank in range(4))
    addresses = tuple(("127.0.0.1", 10 + rank) for rank in range(4))
    first = ProcessContext(3, 4, "run", processes, addresses, device_mesh=DeviceMesh({DATA: 4}))
    context = membership(1, 3).context(first)
    assert (context.rank, context.replicas, context.world_size, context.local_rank) == (1, 2, 2, 1)
    assert context.local_replicas == (1,)
    assert context.rendezvous == ("127.0.0.1", 7)
    assert context.address == ("127.0.0.1", 13)
    assert context.device_mesh == DeviceMesh({DATA: 2})
    assert context.join_seconds is not None


def test_a_process_that_joins_is_ranked_after_the_others() -> None:
    processes = tuple(ProcessInfo(rank, "a", rank, (rank,)) for rank in range(4))
    addresses = tuple(("10.0.0.1", 10 + rank) for rank in range(4))
    start = ProcessContext(1, 4, "run", processes, addresses)
    first = newcomer_context(start, 5, "c", ("10.0.0.3", 15))
    assert from_variables(first.to_variables()) == first
    assert (first.local_process, first.address) == (ProcessInfo(5, "c", 0, (0,)), ("10.0.0.3", 15))
    joined = ((4, "b", "10.0.0.2"), (5, "c", "10.0.0.3"))
    group = replace(membership(1, 3, 4, 5), joined=joined)
    for context in (group.context(first), replace(group.context(start), rank=3)):
        assert (context.rank, context.replicas, context.world_size) == (3, 4, 4)
        assert context.local_replicas == (3,)
        assert [process.host for process in context.processes] == ["a", "a", "b", "c"]
        expected = [("10.0.0.1", 7), ("10.0.0.1", 13), ("10.0.0.2", 14), ("10.0.0.3", 15)]
        assert [*context.addresses] == expected
        assert not context.joins
    assert Membership.from_bytes(group.to_bytes()) == group


def test_members_on_other_hosts_keep_their_addresses() -> None:
    """Rank 0 meets the others at another port of its host; local ranks count anew."""
    hosts = ("a", "a", "b", "b", "b")
    processes = tuple(
        ProcessInfo(rank, host, hosts[:rank].count(host), (rank,))
        for rank, host in enumerate(hosts)
    )
    addresses = tuple((f"10.0.0.{'ab'.index(host) + 1}", 10) for host in hosts)
    first = ProcessContext(4, 5, "run", processes, addresses, device_mesh=DeviceMesh({DATA: 5}))
    context = membership(0, 2, 4).context(first)
    assert (context.rank, context.local_rank, context.local_world_size) == (2, 1, 2)
    assert [process.host for process in context.processes] == ["a", "b", "b"]
    assert context.addresses == (("10.0.0.1", 7), ("10.0.0.2", 12), ("10.0.0.2", 14))


def test_a_request_to_regroup_ends_with_the_next_membership() -> None:
    descriptor = os.memfd_create("page")
    os.truncate(descriptor, PAGE_BYTES)
    page, reporter = mmap.mmap(descriptor, PAGE_BYTES), Reporter(page=descriptor)
    assert not reporter.is_regroup_requested
    request_regroup(page)
    assert reporter.is_regroup_requested
    assert not reporter.is_void(0)
    assert not reporter.is_stop_requested
    publish_membership(page, 1, membership(0, 2).to_bytes())
    reporter.wait_for_membership(0)
    assert not reporter.is_regroup_requested


def sent(rank: int, steps: int, epochs: int, scalars: int) -> tuple[int, list[dict[str, object]]]:
    """What a process that is rank 0 now sends of what it has kept as another rank."""
    reading, writing = os.pipe()
    reporter = Reporter(rank, writing)
    kept: list[ProcessEvent] = [
        Steps(first=0, losses=[0.0, 0.1], learning_rates=[1.0, 1.0]),
        EpochEnded(metrics={}, epoch=0, done=2, loss=0.05),
        Scalars(steps=[1, 2], values=[{"a": 1.0}, {"a": 2.0}]),
        Steps(first=2, losses=[0.2, 0.3, 0.4], learning_rates=[1.0, 0.5, 0.25]),
        Scalars(steps=[3], values=[{"a": 3.0}]),
        EpochEnded(metrics={}, epoch=1, done=4, loss=0.25),
    ]
    for event in kept:
        reporter.report(event)
    reporter.rank = 0
    count = reporter.send_kept(steps, epochs, scalars)
    assert reporter.send_kept(steps, epochs, scalars) == steps  # once
    reporter.flush()
    reporter.close()
    lines = os.read(reading, 1 << 16).splitlines()
    events = [json.loads(line) for line in lines]
    return count, [event for event in events if event["event"] != "heartbeat"]


def test_a_new_rank_0_sends_what_the_old_one_has_not() -> None:
    count, events = sent(rank=1, steps=3, epochs=1, scalars=2)
    assert count == 5
    assert [event["event"] for event in events] == ["scalars", "steps", "scalars", "epoch"]
    assert events[0]["values"] == [{"a": 2.0}]
    assert events[1]["first"] == 3
    assert events[1]["losses"] == [0.3, 0.4]
    assert events[1]["learning_rates"] == [0.5, 0.25]
    assert events[2]["values"] == [{"a": 3.0}]
    assert events[3]["epoch"] == 1


def test_what_is_kept_of_steps_that_are_taken_again_is_dropped() -> None:
    """Also where the launcher had received more of them than are kept now."""
    descriptor = os.memfd_create("page")
    os.ftruncate(descriptor, PAGE_BYTES)
    reading, writing = os.pipe()
    reporter = Reporter(1, writing, descriptor)
    for step in range(10):
        reporter.report(Steps(first=step, losses=[0.5], learning_rates=[1.0]))
        reporter.report(EpochEnded(metrics={}, epoch=step, done=step + 1, loss=0.5))
    reporter.report(Steps(first=10, losses=[0.5, 0.5], learning_rates=[1.0, 1.0]))
    reporter.report(Scalars(steps=[5, 6], values=[{"a": 1.0}, {"a": 2.0}]))
    acknowledge(mmap.mmap(descriptor, PAGE_BYTES), 8)
    reporter.drop_kept(6)
    for step in (6, 7):
        reporter.report(Steps(first=step, losses=[0.25], learning_rates=[1.0]))
    reporter.rank = 0
    assert reporter.send_kept(5, 4, 0) == 8
    reporter.flush()
    reporter.close()
    events = [json.loads(line) for line in os.read(reading, 1 << 16).splitlines()]
    steps = {e["first"]: e["losses"] for e in events if e["event"] == "steps"}
    assert steps == {5: [0.5], 6: [0.25], 7: [0.25]}
    assert [e["epoch"] for e in events if e["event"] == "epoch"] == [4, 5]
    assert [e["steps"] for e in events if e["event"] == "scalars"] == [[5]]


def test_only_what_the_launcher_has_received_is_dropped() -> None:
    """However much that is: history needs every step and every end of an epoch."""
    descriptor = os.memfd_create("page")
    os.ftruncate(descriptor, PAGE_BYTES)
    page = mmap.mmap(descriptor, PAGE_BYTES)
    reading, writing = os.pipe()
    reporter = Reporter(1, writing, descriptor)
    for step in range(3000):
        reporter.report(Steps(first=step, losses=[0.5], learning_rates=[1.0]))
        reporter.report(Scalars(steps=[step], values=[{"a": 1.0}]))
        reporter.report(EpochEnded(metrics={}, epoch=step, done=step + 1, loss=0.5))
        if step == 1999:
            acknowledge(page, 1500)  # rank 0 had not yet sent what follows
    reporter.rank = 0
    received: list[bytes] = []

    def read() -> None:
        with os.fdopen(reading, "rb") as lines:
            received.extend(lines)

    reader = threading.Thread(target=read)
    reader.start()
    assert reporter.send_kept(1501, 1500, 1499) == 3000
    reporter.flush()
    reporter.close()
    os.close(writing)
    reader.join()
    events = [json.loads(line) for line in received]
    firsts = {
        kind: [each[name] for each in events if each["event"] == kind]
        for kind, name in (("steps", "first"), ("epoch", "epoch"), ("scalars", "steps"))
    }
    assert firsts["steps"] == [*range(1501, 3000)]
    assert firsts["epoch"] == [*range(1500, 3000)]
    assert firsts["scalars"] == [[step] for step in range(1499, 3000)]


def test_rank_0_keeps_nothing() -> None:
    count, events = sent(rank=0, steps=0, epochs=0, scalars=0)
    assert count == 0
    kinds = [event["event"] for event in events]
    assert kinds == ["steps", "epoch", "scalars", "steps", "scalars", "epoch"]
