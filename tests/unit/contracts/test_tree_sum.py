"""Sums over the parts of a batch have the same bits for any number of replicas."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from isotrain.core.contracts.backend import tree_sum
from isotrain.core.contracts.backend.replica import Replica
from isotrain.core.contracts.backend.tree_sum import (
    LARGE,
    SumTree,
    exchanged_bytes,
    subtrees_of_replicas,
    sum_over_replicas,
)
from isotrain.core.data.sampler import equal_part_counts, part_bounds
from isotrain.testing.reference.tensor_ops import NumpyTensorOps

PARTS = 8


class ThreadedReplica(Replica):
    """One of several replicas that are threads, and communicate by a list."""

    ops = NumpyTensorOps()

    def __init__(self, index: int, sent: list[Any], barrier: threading.Barrier) -> None:
        self.index, self.replicas = index, len(sent)
        self._sent, self._barrier = sent, barrier
        self.sent_bytes = 0

    def read(self, parts: Sequence[Any]) -> Any:
        raise NotImplementedError

    def write(self, parts: Sequence[Any], vector: Any) -> None:
        raise NotImplementedError

    def send_receive(self, tensor: Any, destinations: Sequence[int]) -> Any:
        if destinations[self.index] != self.index:
            self.sent_bytes += tensor.nbytes
        return super().send_receive(tensor, destinations)

    def all_gather(self, tensor: Any) -> Any:
        self._sent[self.index] = tensor
        self._barrier.wait()
        rows = np.stack(self._sent)
        self._barrier.wait()
        return rows


def parts_of(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    generator = np.random.default_rng(len(shape))
    return (generator.standard_normal((PARTS, *shape)) * 1e3).astype(dtype)


def summed(
    tensors: Sequence[np.ndarray],
    counts: tuple[int, ...],
    sent_bytes: list[int] | None = None,
    clients: tuple[int, ...] = (),
) -> list[list[np.ndarray]]:
    """Sums of tensors `[parts, ...]` over all parts, as each replica gets them.

    Args:
        tensors: What is summed.
        counts: Number of parts of each replica.
        sent_bytes: List to which is added what each replica sends to others, without all-gathers.
        clients: Replicas that sum no segment.
    """
    replicas = len(counts)
    sent: list[Any] = [None] * replicas
    barrier = threading.Barrier(replicas)

    def run(index: int) -> list[np.ndarray]:
        tree = SumTree()
        for part in range(*part_bounds(counts, index)):
            tree.add(part, 1, [tensor[part] for tensor in tensors])
        rows = [sums for _, _, sums in tree.subtrees]
        replica = ThreadedReplica(index, sent, barrier)
        try:
            total = sum_over_replicas(replica, *rows, static=(counts, clients))
        except BaseException:
            barrier.abort()  # the others would wait
            raise
        if sent_bytes is not None:
            sent_bytes.append(replica.sent_bytes)
        return total

    with ThreadPoolExecutor(replicas) as threads:
        return list(threads.map(run, range(replicas)))


@pytest.mark.parametrize(
    "counts",
    [
        *(equal_part_counts(PARTS, replicas) for replicas in range(1, PARTS + 1)),
        *((1, 7), (6, 2), (5, 2, 1), (1, 5, 1, 1)),
    ],
)
def test_sums_have_the_bits_of_one_tree(counts: tuple[int, ...]) -> None:
    """Of two dtypes; of few elements, which are all-gathered, and of many, which are not."""
    tensors = [
        parts_of((3, 2), "float32"),
        parts_of((), "float64"),
        parts_of((67, 97), "float32"),
        parts_of((9001,), "float64"),
    ]
    for results in summed(tensors, counts):
        for parts, total in zip(tensors, results, strict=True):
            a, b, c, d, e, f, g, h = parts
            expected = ((a + b) + (c + d)) + ((e + f) + (g + h))
            assert total.dtype == parts.dtype
            np.testing.assert_array_equal(total, expected)
            assert parts.ndim < 2 or not np.array_equal(total, np.add.reduce(parts))


@pytest.mark.parametrize("replicas", range(2, 8))
def test_blocks_of_any_size_have_the_bits_of_one_tree(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors that end within a block, beside empty ones."""
    tensors = [parts_of((length,), "float32") for length in (0, 4711, 1, 2345)]
    counts = equal_part_counts(PARTS, replicas)
    whole = summed(tensors, counts)
    for block in (97, 1000):
        monkeypatch.setattr(tree_sum, "BLOCK", block)
        for results in summed(tensors, counts):
            for one, other in zip(whole[0], results, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("counts", "clients"),
    [
        *(((3, 3, 2), (client,)) for client in range(3)),
        *(((2, 2, 2, 2), clients) for clients in ((3,), (0, 1), (1, 3))),
        *(((5, 1, 1, 1), clients) for clients in ((0,), (2, 3))),
        ((2, 1, 1, 1, 1, 1, 1), (0, 2, 6)),
        ((4, 4), (1,)),
    ],
)
def test_sums_for_replicas_with_slow_links_have_the_bits_of_one_tree(
    counts: tuple[int, ...], clients: tuple[int, ...]
) -> None:
    tensors = [parts_of((67, 97), "float32"), parts_of((9001,), "float64"), parts_of((), "float64")]
    for results in summed(tensors, counts, clients=clients):
        for parts, total in zip(tensors, results, strict=True):
            a, b, c, d, e, f, g, h = parts
            expected = ((a + b) + (c + d)) + ((e + f) + (g + h))
            np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("counts", [(2, 2, 2, 2), (3, 2, 2, 1), (1, 1, 3, 3)])
def test_a_replica_with_a_slow_link_sends_each_element_of_its_subtrees_once(
    counts: tuple[int, ...],
) -> None:
    """And one block more, as it gets the last sums. Otherwise it sends 1.5 times as much, or 2.25 times."""
    parts = parts_of((8 * 11 * 3 * 64,), "float32")
    sent: list[int] = []
    summed([parts], counts, sent, clients=(3,))
    subtrees = len(subtrees_of_replicas(counts)[3])
    assert min(sent) == (subtrees + 1 / 8) * parts[0].nbytes


class Counted:
    """Number that counts additions."""

    def __init__(self, additions: list[None]) -> None:
        self._additions = additions

    def __add__(self, other: Counted) -> Counted:
        self._additions.append(None)
        return Counted(self._additions)


@pytest.mark.parametrize("large", [0, LARGE])
def test_each_addition_is_made_once_on_one_replica(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_sum, "SMALL", 0)
    monkeypatch.setattr(tree_sum, "LARGE", large)
    for replicas in range(1, PARTS + 1):
        additions: list[None] = []
        length = 3 * 8 * 5 * 7 * 11
        parts = np.full((PARTS, length), Counted(additions), dtype=object)
        summed([parts], equal_part_counts(PARTS, replicas))
        assert len(additions) == (PARTS - 1) * length


def test_a_replica_sums_the_largest_subtrees_of_its_parts() -> None:
    assert subtrees_of_replicas((4, 4)) == [[(0, 4)], [(4, 4)]]
    assert subtrees_of_replicas((3, 3, 2)) == [[(0, 2), (2, 1)], [(3, 1), (4, 2)], [(6, 2)]]
    assert subtrees_of_replicas((1, 7)) == [[(0, 1)], [(1, 1), (2, 2), (4, 4)]]


def test_all_but_three_replicas_send_what_a_ring_all_reduce_sends() -> None:
    for elements in (250, LARGE):
        for replicas in (1, 2, 4, 5, 6, 7, 8):
            ring = 2000 * (replicas - 1) / replicas
            assert exchanged_bytes(1000, elements, PARTS, replicas) == ring
    assert exchanged_bytes(1000, 250, PARTS, 3) == 2000


def test_three_replicas_send_large_vectors_in_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.3 times what a ring sends, and 1.25 times in the mean, which no order is below."""
    monkeypatch.setattr(tree_sum, "LARGE", 1 << 14)
    sent: list[int] = []
    for elements in ((1 << 14) - 2, 33 << 10):
        sent.clear()
        parts = parts_of((elements,), "float32")
        a, b, c, d, e, f, g, h = parts
        for (total,) in summed([parts], (3, 3, 2), sent):
            np.testing.assert_array_equal(total, ((a + b) + (c + d)) + ((e + f) + (g + h)))
    ring = 2 * 2 / 3 * parts[0].nbytes
    assert sum(sent) == pytest.approx(3 * 1.25 * ring)
    assert max(sent) == exchanged_bytes(parts[0].nbytes, parts[0].size, PARTS, 3) < 1.3 * ring
