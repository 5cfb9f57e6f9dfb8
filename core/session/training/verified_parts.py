"""Parts of a global batch that all replicas compute, to compare their bits (`verify_every` of the spec)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from isotrain.core.contracts.backend.replica import Tensor
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.process import ProcessInfo, named_replicas
from isotrain.core.data.batch import Batch
from isotrain.core.data.sampler import part_bounds, slice_bounds
from isotrain.core.errors import IsotrainError

Row = Sequence[Sequence[Tensor]]
"""Tensors of a part, for each local replica: gradients, loss, and others."""


class VerifiedParts:
    """Compares what the replicas have computed for one and the same part of a global batch.

    Machines that compute wrong numbers without an error: Dixit et al., "Silent Data Corruptions at Scale",
    arXiv 2102.11245; Hochschild et al., "Cores that don't count", HotOS 2021.
    """

    def __init__(self, group: ReplicaGroup, processes: Sequence[ProcessInfo]) -> None:
        """Takes whom to compare.

        Args:
            group: Replica group of this process.
            processes: Processes of the run, for errors.
        """
        self._group = group
        self._processes = processes
        self._checksums = np.zeros(0)
        """Checksum of the part as it counts in the step, then of what each replica has computed."""

    def observed(self, batch: Batch, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows of a step, whose last ones are the verified part; takes checksums of them. Local."""
        assert batch.part_counts is not None
        part, counts = _verified_part(batch), batch.part_counts
        self._checksums = np.zeros(1 + self._group.replicas)
        for index, row in enumerate(rows):
            for replica, tensors in zip(self._group.local_replicas, row, strict=True):
                if index == counts[replica]:
                    self._checksums[1 + replica] = self._checksum(tensors)
                elif index < counts[replica] and part_bounds(counts, replica)[0] + index == part:
                    self._checksums[0] = self._checksum(tensors)
            yield row

    def compare(self, batch: Batch) -> None:
        """Compares the checksums of all replicas. Collective.

        Raises:
            IsotrainError: They differ: on processes whose replicas are in the minority, or on all where none
                is. The others then lose these processes.
        """
        assert batch.part_counts is not None
        contributed, *repeated = self._group.all_reduce_max(self._checksums.tolist())
        if {*repeated} == {contributed}:
            return
        part, replicas = _verified_part(batch), range(len(repeated))
        owner = next(each for each in replicas if part < part_bounds(batch.part_counts, each)[1])
        what = f"verify_every: step {batch.step}: part {part} of {sum(batch.part_counts)} of the global batch"
        if repeated[owner] != contributed:
            wrong = {owner}
            named = named_replicas(self._processes, wrong)
            text = f"{what}: {named} has computed it twice, with different bits."
        else:
            most = max(repeated, key=repeated.count)
            wrong = {each for each in replicas if repeated[each] != most}
            others = [each for each in replicas if each not in wrong]
            named, named_others = (named_replicas(self._processes, e) for e in (wrong, others))
            text = f"{what} has other bits on {named} than on {named_others}."
            if 2 * len(others) <= len(repeated):
                wrong = {*replicas}
                text += " More replicas would tell which of them are right."
        if wrong.intersection(self._group.local_replicas):
            raise IsotrainError(
                f"{text} The gradients of this step, and maybe of those before, are wrong. Look for a faulty"
                " processor or memory, or for other processors, versions of libraries or numbers of threads"
                " than on the other hosts."
            )

    def _checksum(self, tensors: Sequence[Tensor]) -> int:
        """CRC-32 of the bytes of tensors, plus 1: a number above 0. Local."""
        checksum = 0
        for tensor in tensors:
            array = np.ascontiguousarray(self._group.numpy(tensor)).reshape(-1)
            checksum = zlib.crc32(array.view(np.uint8).data, checksum)
        return checksum + 1


def _verified_part(batch: Batch) -> int:
    """Index of the part of the global batch that all replicas compute."""
    assert batch.part_counts is not None
    assert batch.verified is not None
    parts, first = sum(batch.part_counts), batch.verified.first
    return next(each for each in range(parts) if slice_bounds(batch.size, parts, each)[0] == first)
