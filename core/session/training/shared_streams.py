"""Streams that one process per host reads for all processes of the run there: `loader.workers`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.data.dataset import DataSet
from isotrain.core.data.host_reader.host_reader import HostReader, SharedStream
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.session.training.consensus import Consensus
from isotrain.core.session.training.dataloaders import load_data
from isotrain.core.spec.field_combinations import NEED_TRAINING_DATA
from isotrain.core.spec.training_spec import TrainingSpec

_FIELDS = {"data", "data_args", "seed", "timeouts", *NEED_TRAINING_DATA}
"""Fields of the spec that loading data needs; the reader gets no others, which may not be picklable."""


def share_streams(
    spec: TrainingSpec, context: ProcessContext, group: ReplicaGroup, data: DataSet
) -> tuple[DataSet, HostReader | None]:
    """The data, with streams that the host's reader reads if the spec has workers. Collective.

    Returns:
        The data, and this process's access to the reader, which it closes; None where there is none.
    """
    if not spec.loader.workers or not _streams(data):
        return data, None
    host = context.local_process.host
    hosts = list(dict.fromkeys(process.host for process in context.processes))
    local = [each for each in context.processes if each.host == host and each.has_session]
    replicas: Sequence[int] = range(group.replicas)
    if group.replicas == context.replicas:  # else some of a device mesh share their samples
        replicas = sorted({replica for each in local for replica in each.replicas})
    token = f"{Consensus(group).shared_token()}-{hosts.index(host)}"
    limits = {
        "start_seconds": spec.timeouts.start,
        "timeout": 0.9 * spec.timeouts.progress,
    }
    reader = HostReader(token, len(local), replicas, **limits)
    if context.rank == local[0].rank:
        others = dict.fromkeys(type(spec).model_fields.keys() - _FIELDS)
        load = functools.partial(load_streams, spec.model_copy(update=others))
        counts = {
            name: _readers(each, spec.loader.workers) for name, each in _streams(data).items()
        }
        reader.start(load, {name: count for name, count in counts.items() if count > 1})

    def shared(name: str, source: Any) -> Any:
        if not isinstance(source, BatchStream):
            return source
        return SharedStream(name, reader, source.shards, collates=source.collates)

    sets = {name: shared(f"validation {name}", part) for name, part in data.validation_sets.items()}
    train, validation = shared("train", data.train), shared("validation", data.validation)
    return replace(data, train=train, validation=validation, validation_sets=sets), reader


def _readers(stream: BatchStream, workers: int) -> int:
    """Number of processes that read a stream."""
    return 1 if stream.shards is None else min(workers, stream.shards.shards)


def load_streams(spec: TrainingSpec) -> dict[str, BatchStream]:
    """Loads the streams of a spec's data by name, in the process that reads them."""
    return _streams(load_data(spec))


def _streams(data: DataSet) -> dict[str, BatchStream]:
    """The streams of a data set by name: `train`, `validation`, `validation NAME`."""
    parts = {"train": data.train, "validation": data.validation}
    parts |= {f"validation {name}": part for name, part in data.validation_sets.items()}
    return {name: part for name, part in parts.items() if isinstance(part, BatchStream)}
