"""The part of a global batch that the replicas of one process train on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isotrain.core.data.streaming.stream_state import StreamState


@dataclass(frozen=True, slots=True)
class Slice:
    """A micro-batch: the samples of one forward and backward pass of one replica.

    Attributes:
        inputs: Array, or tuple or dict of arrays, of shape [max(count, 1), ...]; or the tensors that
            `to_device` made of them.
        targets: As `inputs`, or None; a `Weighted` where the data have sample weights.
        count: Number of samples. If 0, the arrays hold one placeholder sample, so that the replica can
            take part in every collective; its weight is 0.
        weight: `count * replicas / size of the global batch`. A replica's loss is the sum over its slices
            of weight * mean; the mean of these losses over all replicas is then exactly the mean over the
            global batch.
        first: Index of its first sample in the global batch.
    """

    inputs: Any
    targets: Any
    count: int
    weight: float
    first: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The part of one global batch that belongs to this process.

    Attributes:
        epoch: Index of the epoch, from 0.
        index: Index of the global batch in its epoch, from 0.
        step: Index of the global batch in the run, from 0.
        size: Number of samples in the global batch, over all replicas.
        is_last_of_epoch: Whether the next batch belongs to another epoch.
        even: Whether every replica of the run has equally many samples; without gradient accumulation,
            each weight is then exactly 1.
        slices: Slices of each local replica, in sample order: one per gradient accumulation step.
        fingerprint: Checksum of the global batch, to compare between processes; only in the first batch
            that is read of each epoch of a stream, or of an order that the data or a function decide.
        stream_state: A stream state from which reading can continue, if the stream has a state.
        values: Scalars that the objective gets as `step.values`, by name; equal on all processes.
        varying_widths: Whether shapes of slices may differ in more than their first axis.
        part_counts: Number of parts of each replica of the run, where the slices are parts of the global
            batch whatever the number of replicas; else None.
        verified: Part of the global batch that every replica computes besides its own ones, so that their
            bits are compared; None in most batches.
    """

    epoch: int
    index: int
    step: int
    size: int
    is_last_of_epoch: bool
    even: bool
    slices: tuple[tuple[Slice, ...], ...]
    fingerprint: int | None = None
    stream_state: StreamState | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    varying_widths: bool = False
    part_counts: tuple[int, ...] | None = None
    verified: Slice | None = None
