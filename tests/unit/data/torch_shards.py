"""Data sets of torch in shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from unit.data.reader_programs import COUNTS, Counting


class CountedShards(IterableDataset):
    """The numbers of `reader_programs`, in shards that it asks for; it has a state."""

    def __init__(self, *, asks: bool = True) -> None:
        self.asks = asks
        self.numbers: Counting | None = None
        self.state: dict[str, int] | None = None

    def state_dict(self) -> dict[str, int]:
        assert self.numbers is not None
        return self.numbers.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state

    def __iter__(self) -> Iterator[Any]:
        shard = get_worker_info().id if self.asks else 0
        self.numbers = Counting(shard, COUNTS[shard])
        if self.state is not None:
            self.numbers.load_state_dict(self.state)
            self.state = None
        yield from self.numbers


class CountedEpochs(IterableDataset):
    """Samples that are 100 times the epoch plus the position; the epoch is counted after the last one."""

    def __init__(self, lengths: Sequence[int], *, resets: bool) -> None:
        self.lengths, self.resets = lengths, resets
        self.epoch = self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]

    def __iter__(self) -> Iterator[Any]:
        length = self.lengths[get_worker_info().id]
        if not self.resets:
            self.position %= length
        while self.position < length:
            self.position += 1
            number = 100 * self.epoch + self.position - 1
            yield np.full(2, number, np.float32), np.array(number)
        self.epoch += 1
        if self.resets:
            self.position = 0
