"""What is in a checkpoint, as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.parts import StoredTensor


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describes a checkpoint; reads its records, and none of its numbers.

    Raises:
        CheckpointError: A record cannot be read, or is not as it was written.
    """
    sections = {name: checkpoint.tensors(name) for name in checkpoint.sections()}
    return {
        "location": checkpoint.location,
        "step": checkpoint.step,
        **{name: _in_plan(checkpoint.run, name) for name in ("backend", "replicas", "strategy")},
        "versions": _mapping(checkpoint.run.get("versions")),
        "bytes": sum(each.nbytes for tensors in sections.values() for each in tensors.values()),
        "sections": [
            {"name": name, "tensors": [_described(*item) for item in sorted(tensors.items())]}
            for name, tensors in sections.items()
        ],
    }


def _described(name: str, tensor: StoredTensor) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "bytes": tensor.nbytes,
        "parts": tensor.parts,
    }


def _in_plan(run: Mapping[str, Any], name: str) -> Any:
    return _mapping(run.get("plan")).get(name)


def _mapping(plain: Any) -> dict[str, Any]:
    return plain if isinstance(plain, dict) else {}
