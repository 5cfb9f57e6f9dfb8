"""Agreement of all processes by all-reduce: requests at the same step, and equality of their data."""

from __future__ import annotations

import secrets
import time

import numpy as np

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.reporter import CheckpointRequest
from isotrain.core.data.batch import Batch
from isotrain.core.data.dataset import DataSet
from isotrain.core.data.identity import (
    SAME_DATA_HINT,
    DataIdentity,
    data_difference,
    data_identity,
)
from isotrain.core.errors import DataError

_SECONDS = 1.0
"""Target interval of the all-reduce of requests (3 numbers)."""
_MAX_STEPS = 1 << 20


def require_same_samples(group: ReplicaGroup, batch: Batch) -> None:
    """Compares a batch's fingerprint, which streams and some orders have, on all processes. Collective.

    Raises:
        DataError: The fingerprints differ.
    """
    if batch.fingerprint is None or group.is_single_process:
        return
    high, low = group.all_reduce_max([batch.fingerprint, -batch.fingerprint])
    if high != -low:
        raise DataError(
            f"epoch {batch.epoch}: the processes do not see the same samples. A stream must give every"
            " process the same batches in the same order: give its shuffling a fixed seed, and let"
            " it take no shard of its own. An `order` must not depend on the process: columns have to be"
            " equal on all, and a function may draw from its seed and epoch alone."
        )


def require_same_data(
    group: ReplicaGroup, data: DataSet, rank: int, plan: Plan
) -> DataIdentity | None:
    """Compares the data that the processes have loaded: number of samples, and some samples. Collective.

    A data function that shuffles or splits without a fixed seed gives every process different samples at the
    same indices, so that some are trained on twice and others never. Streams are compared as they are read.

    Returns:
        The identity of the data; None in a run of one process, which has nothing to compare.

    Raises:
        DataError: The data sets differ.
    """
    if group.is_single_process:
        return None
    identity = data_identity(data)
    local = [float(number) for part in identity.values() for number in part]
    bounds = group.all_reduce_max([*local, *(-number for number in local)])
    if bounds[: len(local)] == [-number for number in bounds[len(local) :]]:
        return identity
    table = np.zeros((len(plan.processes), len(local)))
    table[rank] = local
    rows = np.reshape(group.all_reduce_max(table.ravel().tolist()), table.shape)
    first, *others = [dict(zip(identity, row.reshape(-1, 2).tolist(), strict=True)) for row in rows]
    for process, each in zip(plan.processes[1:], others, strict=True):
        difference = data_difference(each, first, "rank 0")
        if difference is not None:
            raise DataError(
                f"data: rank {process.rank} on {process.host} has {difference}. {SAME_DATA_HINT}"
            )
    return identity


class Consensus:
    """Agrees on requests that only some processes have received, about once a second, at the same step."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._is_single_process = group.is_single_process
        self._next_step: int | None = None
        self._last = (0, 0.0)

    def all_reduce_requests(self, step: int, local: CheckpointRequest) -> CheckpointRequest:
        """Returns the requests of all processes, the same on each of them; none between two all-reduces.

        Collective: every process calls it after the same steps.
        """
        if self._is_single_process:
            return local
        if self._next_step is None:  # the first steps, in which frameworks set up, tell no pace
            self._schedule(step, step + 1)
        if self._next_step is not None and step < self._next_step:
            return CheckpointRequest()
        steps, seconds = step - self._last[0], time.monotonic() - self._last[1]
        pace = seconds / steps if steps > 0 else _SECONDS
        save, end, slowest = self._group.all_reduce_max([float(local.save), float(local.end), pace])
        self._schedule(step, step + int(min(max(1.0, _SECONDS / max(slowest, 1e-9)), _MAX_STEPS)))
        return CheckpointRequest(save > 0, end > 0)

    def any_process(self, flag: bool) -> bool:
        """Whether a flag is set on any process. Collective."""
        return self.all_reduce_max(flag) > 0

    def all_reduce_max(self, value: float) -> float:
        """The maximum of a number over all processes. Collective."""
        if self._is_single_process:
            return value
        return self._group.all_reduce_max([float(value)])[0]

    def shared_token(self) -> str:
        """A random token, the same on all processes of the run: 13 hexadecimal digits. Collective."""
        number = secrets.randbits(52)  # as many as a float64 keeps
        if not self._is_single_process:
            number = int(self._group.all_reduce_max([float(number)])[0])
        return f"{number:013x}"

    def _schedule(self, step: int, next_step: int) -> None:
        """Sets the step of the next all-reduce."""
        self._last = step, time.monotonic()
        self._next_step = next_step
