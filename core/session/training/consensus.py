"""How all processes come to know, at the same step, what only some of them were told."""

from __future__ import annotations

import secrets
import time

import numpy as np

from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.contracts.reporter import CheckpointRequest
from isotrain.core.data.arrays import ArraySource
from isotrain.core.data.batch import Batch
from isotrain.core.data.dataset import DataSet
from isotrain.core.data.rebatch import fingerprint
from isotrain.core.data.sources import AnySource
from isotrain.core.data.streams import BatchStream
from isotrain.core.errors import DataError

_SECONDS = 1.0
"""About so often they agree; it costs a collective of a few numbers."""
_MOST_STEPS = 1 << 20
_COMPARED_SAMPLES = 64
_COMPARED_BYTES = 1 << 20
"""Of the samples that are compared, unless two have more."""
_ONE_DATA_SET = (
    "Every process must load the same samples in the same order: give shuffling, splitting and drawing a"
    " fixed seed, and take no shard; isotrain gives each replica its part."
)


def require_same_samples(group: ReplicaGroup, batch: Batch) -> None:
    """Sees, where a stream says what it gave, that it gave the same to every process.

    Raises:
        DataError: It did not.
    """
    if batch.fingerprint is None or group.is_single_process:
        return
    high, low = group.all_reduce_max([batch.fingerprint, -batch.fingerprint])
    if high != -low:
        raise DataError(
            f"epoch {batch.epoch}: the processes do not see the same samples. A stream must give every"
            " process the same batches in the same order: give its shuffling a fixed seed, and let"
            " it take no shard of its own."
        )


def require_same_data(group: ReplicaGroup, data: DataSet, rank: int, plan: Plan) -> None:
    """Compares what the processes have loaded: numbers of samples, and some samples of arrays.

    A data function that shuffles or splits without a fixed seed gives every process other samples under the
    same positions, so that some are trained on twice and others never. Streams are compared as they are read.

    Args:
        group: The replica group, all of whose processes call this once they have their data (collective).
        data: The data set that this process has loaded.
        rank: The number of this process.
        plan: The plan, whose processes name ranks and hosts.

    Raises:
        DataError: They differ.
    """
    if group.is_single_process:
        return
    parts = {"training": data.train, "validation": data.validation}
    own = [float(number) for source in parts.values() for number in _identity(source)]
    found = group.all_reduce_max([*own, *(-number for number in own)])
    if found[: len(own)] == [-number for number in found[len(own) :]]:
        return
    slots = np.zeros((len(plan.processes), len(own)))
    slots[rank] = own
    rows = np.reshape(group.all_reduce_max(slots.ravel().tolist()), slots.shape)
    for name, (counts, checksums) in zip(parts, rows.T.reshape(2, 2, -1), strict=True):
        for process, count, checksum in zip(plan.processes, counts, checksums, strict=True):
            if (count, checksum) == (counts[0], checksums[0]):
                continue
            what = f"{count:.0f} {name} samples where rank 0 has {counts[0]:.0f}"
            if count == counts[0]:
                what = f"other {name} samples than rank 0, though as many"
            raise DataError(
                f"data: rank {process.rank} on {process.host} has {what}. {_ONE_DATA_SET}"
            )


def _identity(source: AnySource | None) -> tuple[int, int]:
    """The samples of a source, and a checksum of some of them; 0 for what is not known without reading."""
    if source is None or isinstance(source, BatchStream):
        return 0, 0
    if not isinstance(source, ArraySource):
        return len(source), 0
    count = max(2, min(_COMPARED_SAMPLES, _COMPARED_BYTES // max(1, source.sample_bytes)))
    places = np.unique(np.linspace(0, len(source) - 1, count).astype(np.int64))
    return len(source), fingerprint(source.gather(places))


class Consensus:
    """Gathers wishes at steps that every process knows, about once a second."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._is_alone = group.is_single_process
        self._next: int | None = None
        self._last = (0, 0.0)

    def all_reduce_requests(self, step: int, own: CheckpointRequest) -> CheckpointRequest:
        """Gives what any process wishes, the same on all of them; nothing before the next meeting.

        Every process calls it after the same steps.

        Args:
            step: Steps done.
            own: What this process wishes.
        """
        if self._is_alone:
            return own
        if self._next is None:  # the first steps, in which frameworks set up, tell no pace
            self._meet_at(step, step + 1)
        if self._next is not None and step < self._next:
            return CheckpointRequest()
        steps, seconds = step - self._last[0], time.monotonic() - self._last[1]
        pace = seconds / steps if steps > 0 else _SECONDS
        save, end, slowest = self._group.all_reduce_max([float(own.save), float(own.end), pace])
        self._meet_at(step, step + int(min(max(1.0, _SECONDS / max(slowest, 1e-9)), _MOST_STEPS)))
        return CheckpointRequest(save > 0, end > 0)

    def any_process(self, here: bool) -> bool:
        """Whether something is so on any process."""
        return self.all_reduce_max(here) > 0

    def all_reduce_max(self, here: float) -> float:
        """The highest of a number's values on all processes."""
        return here if self._is_alone else self._group.all_reduce_max([float(here)])[0]

    def shared_token(self) -> str:
        """A name that all processes have in common, and no other run has."""
        number = secrets.randbits(52)  # as many as a float64 keeps
        chosen = number if self._is_alone else int(self._group.all_reduce_max([float(number)])[0])
        return f"{chosen:013x}"

    def _meet_at(self, step: int, following: int) -> None:
        self._last = step, time.monotonic()
        self._next = following
