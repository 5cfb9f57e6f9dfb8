"""Horovod in a process that stands for all: its libraries record what would be sent, and send nothing.

Stand-ins take the place of the compiled libraries, so that all of Horovod's Python code runs.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import Any

from isotrain.adapters.horovod import private_api
from isotrain.plugin import ProcessContext

ProcessSets = dict[int, tuple[int, ...]]
"""Ranks by the ID of a process set."""


class RecordedLibrary:
    """Stand-in for a compiled library of Horovod, which it is for all that a subclass does not replace."""

    def __init__(self, library: Any, rank: int, process_sets: ProcessSets) -> None:
        self._library = library
        self._rank = rank
        self._process_sets = process_sets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


class RecordedBasics(RecordedLibrary):
    """The library that tells ranks and sizes."""

    def horovod_rank(self) -> int:
        """Rank of this process."""
        return self._rank

    def horovod_size(self) -> int:
        """Number of processes."""
        return len(self._process_sets[0])

    def horovod_process_set_rank(self, identifier: ctypes.c_int) -> int:
        """Index of this process in a process set."""
        return self._process_sets[identifier.value].index(self._rank)

    def horovod_process_set_size(self, identifier: ctypes.c_int) -> int:
        """Number of processes in a process set."""
        return len(self._process_sets[identifier.value])

    def horovod_shutdown(self) -> None:
        """Does nothing: Horovod's threads do not run."""


def start(hvd: Any, context: ProcessContext, process_sets: Sequence[Any]) -> None:
    """Puts stand-ins in the place of Horovod's libraries, for the rest of this process. Local.

    Args:
        hvd: Horovod module of the framework, `horovod.torch` or `horovod.tensorflow`.
        context: Context of this process.
        process_sets: Horovod process sets; they get their IDs.
    """
    ranks: ProcessSets = {0: tuple(range(context.world_size))}
    hvd.global_process_set.ranks = list(ranks[0])
    for identifier, process_set in enumerate(process_sets, 1):
        process_set.process_set_id = identifier
        ranks[identifier] = tuple(process_set.ranks)
    name = "torch" if hvd.__name__.endswith("torch") else "tf"
    operations = importlib.import_module(f"isotrain.adapters.horovod.{name}_recorded")
    private_api.replace_libraries(
        hvd.__name__.rpartition(".")[2],
        lambda library: RecordedBasics(library, context.rank, ranks),
        lambda library: operations.RecordedOperations(library, context.rank, ranks),
    )
