"""A data set of torch in shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
