"""The weights file of a run directory: `weights.safetensors`, trainable and non-trainable weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isotrain.core.contracts.state import StateKind
from isotrain.core.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from isotrain.core.contracts.backend.replica_group import ReplicaGroup

WEIGHTS_FILE = "weights.safetensors"
"""Name of the file with the final weights in a run directory."""
AVERAGE = "average"
"""Checkpoint section with the average of the weights over steps (`ema`, `swa`), under the weights' names."""
WEIGHTS: tuple[StateKind, ...] = ("trainable", "non-trainable")


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Reads a file of `save_weights`; bfloat16, which NumPy lacks, becomes float32.

    Raises:
        CheckpointError: The file does not exist, or is not a safetensors file.
    """
    from isotrain.core.checkpoints.safetensors_file import SafetensorsFile

    return SafetensorsFile(path).read_all()


def has_all_weights(group: ReplicaGroup) -> bool:
    """Whether this process has all trainable weights in full, none of them sharded. Local."""
    return all(info.offset is None for info in group.describe_state(("trainable",)).values())


def require_storable(group: ReplicaGroup, kinds: Sequence[StateKind]) -> None:
    """Refuses state with a dtype that safetensors files lack, before any training. Local.

    Raises:
        SpecError: There is such state.
    """
    from isotrain.core.checkpoints.dtypes import CODES

    state = group.describe_state(kinds)
    refused = [f"{name} ({info.dtype})" for name, info in state.items() if info.dtype not in CODES]
    if refused:
        raise SpecError(
            f"model: {', '.join(refused)}: what a run has trained is kept in safetensors files, which hold"
            f" {', '.join(CODES)}. Give the model another type there, such as a pair of real numbers for each"
            " complex one, and convert it where it is used. A loop of your own (isotrain.launch) without"
            " `checkpoint` keeps nothing by itself."
        )


def save_weights(group: ReplicaGroup, target: Path) -> None:
    """Writes the weights of the first local replica by name, each in its own dtype; replaces atomically.

    Raises:
        OSError: The file cannot be written; `target` is unchanged.
    """
    from isotrain.core.checkpoints.safetensors_file import write_safetensors
    from isotrain.core.checkpoints.tensor_part import TensorPart

    weights, infos = group.read_state(WEIGHTS), group.describe_state(WEIGHTS)
    parts = {name: TensorPart(array, infos[name].dtype) for name, array in weights.items()}
    write_safetensors(target, parts)
