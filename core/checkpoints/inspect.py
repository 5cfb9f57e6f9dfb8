"""Inspection of checkpoints: verifying checksums, and describing the content as JSON values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.folder import folder_at, open_if_checkpoint
from isotrain.core.checkpoints.tensor_part import StoredTensor
from isotrain.core.errors import CheckpointError


def verify_checkpoints(location: str | os.PathLike[str]) -> Iterator[tuple[str, str | None]]:
    """Reads and verifies every byte of a checkpoint, or of all in a folder or a run directory.

    Yields:
        The location of each checkpoint, and what is wrong with it or None.

    Raises:
        CheckpointError: There is no checkpoint, not even a damaged one.
    """
    try:
        checkpoint = open_if_checkpoint(location)
    except CheckpointError as error:
        yield os.fspath(location), str(error)
        return
    if checkpoint is not None:
        yield checkpoint.location, _fault(checkpoint)
        return
    folder = folder_at(location)
    damaged, complete = folder.damaged(), folder.complete()
    if not (damaged or complete):
        raise CheckpointError(f"{location}: there is no checkpoint.")
    for checkpoint in complete:
        yield checkpoint.location, _fault(checkpoint)
    for fault in damaged.values():
        yield folder.location, fault


def _fault(checkpoint: Checkpoint) -> str | None:
    try:
        checkpoint.verify()
    except CheckpointError as error:
        return str(error)
    return None


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describes a checkpoint as JSON values; reads its JSON records, but no tensors.

    Raises:
        CheckpointError: A record cannot be read, or is corrupted.
    """
    sections = {name: checkpoint.tensors(name) for name in checkpoint.sections()}
    plan = _mapping(checkpoint.run.get("plan"))
    return {
        "location": checkpoint.location,
        "step": checkpoint.step,
        **{name: plan.get(name) for name in ("backend", "replicas", "strategy")},
        "versions": _mapping(checkpoint.run.get("versions")),
        "bytes": sum(each.nbytes for tensors in sections.values() for each in tensors.values()),
        "sections": [
            {"name": name, "tensors": [_description(*item) for item in sorted(tensors.items())]}
            for name, tensors in sections.items()
        ],
    }


def _description(name: str, tensor: StoredTensor) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "bytes": tensor.nbytes,
        "parts": tensor.parts,
    }


def _mapping(plain: Any) -> dict[str, Any]:
    return plain if isinstance(plain, dict) else {}
