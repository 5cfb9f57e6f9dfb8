"""Identity of a process's data set: what tells that another process has loaded other samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from isotrain.core.data.arrays import ArraySource
from isotrain.core.data.dataset import DataSet
from isotrain.core.data.sources import AnySource
from isotrain.core.data.streaming.rebatch import fingerprint
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.quantities import counted

_COMPARED_SAMPLES = 64
_COMPARED_BYTES = 1 << 20
"""Limit on the bytes of the compared samples; two samples are compared in any case."""
SAME_DATA_HINT = (
    "Every process must load the same samples in the same order: give shuffling, splitting and drawing a"
    " fixed seed, and take no shard; isotrain gives each replica its part."
)

DataIdentity = Mapping[str, Sequence[int]]
"""Number of samples and a checksum of some, by part of a data set; 0 for what is unknown without reading."""


def data_identity(data: DataSet) -> DataIdentity:
    """Identity of a data set, for `data_difference`."""
    parts = {"training": data.train, "validation": data.validation}
    parts |= {f"validation {name!r}": part for name, part in data.validation_sets.items()}
    return {name: _identity(source) for name, source in parts.items()}


def _identity(source: AnySource | None) -> tuple[int, int]:
    if source is None or isinstance(source, BatchStream):
        return 0, 0
    if not isinstance(source, ArraySource):
        return len(source), 0
    count = max(2, min(_COMPARED_SAMPLES, _COMPARED_BYTES // max(1, source.sample_bytes)))
    indices = np.unique(np.linspace(0, len(source) - 1, count).astype(np.int64))
    return len(source), fingerprint(source.gather(indices))


def data_difference(local: DataIdentity, expected: DataIdentity, owner: str) -> str | None:
    """The first difference of a data set to that of another process, as text; None if there is none.

    Args:
        local: Identity of the data set.
        expected: Identity of the data set that another process has.
        owner: That process, as text.
    """
    for name, (wanted, checksum) in expected.items():
        count, found = local.get(name, (0, 0))
        if count != wanted:
            return f"{counted(int(count), f'{name} sample')} where {owner} has {wanted:.0f}"
        if found != checksum:
            return f"other {name} samples than {owner}, though as many"
    return None
