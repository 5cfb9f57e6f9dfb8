"""The step context of torch: rows that are gathered, and how many all-reduces that takes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import isotrain
from isotrain.adapters.torch.trainer.step_context import TorchStepContext
from isotrain.core.data.batch import Batch, Slice

REPLICAS = 3


class _AllReduce:
    """Sum over threads that stand for replicas; counts the calls of replica 0."""

    def __init__(self) -> None:
        self.calls = 0
        self._sent: list[Any] = [None] * REPLICAS
        self._barrier = threading.Barrier(REPLICAS, timeout=60)

    def __call__(self, index: int, x: torch.Tensor) -> torch.Tensor:
        self.calls += index == 0
        self._sent[index] = x
        self._barrier.wait()
        assert len({each.shape for each in self._sent}) == 1
        total = torch.stack(self._sent).sum(0)
        self._barrier.wait()
        return total


def _contexts(all_reduce: _AllReduce) -> list[TorchStepContext]:
    spec = isotrain.TrainingSpec(
        model={"torch": torch.nn.Identity},
        objective=lambda model, batch, step: 0,
        optimizer={"name": "sgd", "lr": 0.1},
        steps=1,
        global_batch_size=8,
        data=dict,
    )
    contexts = [TorchStepContext(spec, {}) for _ in range(REPLICAS)]
    for index, each in enumerate(contexts):
        each.connect(
            index,
            REPLICAS,
            lambda x, index=index: all_reduce(index, x),
            torch.device("cpu"),
        )
    return contexts


def _gathered(
    contexts: Sequence[TorchStepContext], samples: Sequence[int], rows: Sequence[int]
) -> None:
    """Gathers rows `[rows, 2]` of each replica, and compares values and gradients with plain ones.

    Args:
        contexts: Step context of each replica.
        samples: Number of samples of each replica in the global batch.
        rows: Number of rows of each replica.
    """
    starts = [sum(rows[:index]) for index in range(REPLICAS)]
    expected = torch.arange(2.0 * sum(rows)).view(-1, 2)

    def gather(index: int) -> None:
        context, count = contexts[index], samples[index]
        piece = Slice(None, None, count, count * REPLICAS / sum(samples))
        context.set_batch(Batch(0, 0, 0, sum(samples), False, False, ((piece,),)))
        context.set_slice(piece)
        x = expected[starts[index] :][: rows[index]] if count else torch.ones(1, 2)
        x = x.clone().requires_grad_()
        gathered, first = context.all_gather(x)
        assert torch.equal(gathered, expected)
        assert first == (starts[index] if count else 0)
        (gathered * (index + 1) * expected).sum().backward()
        local = expected[first:][: rows[index]] if count else torch.zeros(1, 2)
        assert x.grad is not None
        assert torch.equal(x.grad, 6 * local)

    with ThreadPoolExecutor(REPLICAS) as pool:
        list(pool.map(gather, range(REPLICAS)))


def test_rows_of_uneven_shares_have_no_mean() -> None:
    """Gloo would end the process; shapes are compared in the first batch of each kind alone."""
    all_reduce = _AllReduce()
    contexts = _contexts(all_reduce)

    def mean(index: int, samples: Sequence[int]) -> Any:
        piece = Slice(None, None, samples[index], samples[index] * REPLICAS / sum(samples))
        even = len(set(samples)) == 1
        contexts[index].set_batch(Batch(0, 0, 0, sum(samples), False, even, ((piece,),)))
        contexts[index].set_slice(piece)
        return contexts[index].mean(torch.ones(samples[index]))

    with ThreadPoolExecutor(REPLICAS) as pool:
        for samples, calls in [((2, 2, 2), 2), ((3, 3, 3), 3)]:
            list(pool.map(mean, range(REPLICAS), [samples] * REPLICAS))
            assert all_reduce.calls == calls
        futures = [pool.submit(mean, index, (3, 3, 2)) for index in range(REPLICAS)]
        for each in futures:
            with pytest.raises(
                isotrain.SpecError, match=r"Received \[3\] of replicas 0 to 1, \[2\] of replica 2"
            ):
                each.result()


def test_rows_per_sample_that_stay_the_same_are_gathered_by_one_all_reduce() -> None:
    all_reduce = _AllReduce()
    contexts = _contexts(all_reduce)
    calls = []
    for samples, rows in [
        ((3, 3, 2), (6, 6, 4)),  # counts are exchanged once
        ((3, 3, 2), (6, 6, 4)),
        ((1, 1, 0), (2, 2, 0)),  # a placeholder
        ((3, 3, 2), (6, 5, 4)),  # as data have it: the replicas notice, and exchange the counts
        ((3, 3, 2), (6, 0, 4)),
        ((3, 3, 2), (3, 3, 2)),
        ((3, 3, 2), (3, 3, 2)),
        ((4, 1, 3), (4, 1, 3)),  # a batch of the loop's own
    ]:
        before = all_reduce.calls
        _gathered(contexts, samples, rows)
        calls.append(all_reduce.calls - before - 1)  # one in the backward pass
    assert calls == [2, 1, 1, 3, 2, 2, 1, 3]
