"""The file in which a run keeps its weights, trained and not trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isotrain.core.contracts.state import StateKind
from isotrain.core.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from isotrain.core.contracts.replica_group import ReplicaGroup

WEIGHTS_FILE = "weights.safetensors"
"""Where a run directory has the final weights."""
WEIGHTS: tuple[StateKind, ...] = ("trainable", "non-trainable")


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Reads what `save_weights` wrote; bfloat16, which NumPy lacks, as float32.

    Raises:
        CheckpointError: There is no such file, or it is not one of weights.
    """
    from isotrain.core.checkpoints.safetensors_file import SafetensorsFile

    return SafetensorsFile(path).read_all()


def require_storable(group: ReplicaGroup, kinds: Sequence[StateKind]) -> None:
    """Refuses state of a type that no file holds, before a run is trained that could not be kept. Local.

    Raises:
        SpecError: Names it.
    """
    from isotrain.core.checkpoints.dtypes import CODES

    state = group.describe_state(kinds)
    found = [f"{name} ({info.dtype})" for name, info in state.items() if info.dtype not in CODES]
    if found:
        raise SpecError(
            f"model: {', '.join(found)}: what a run has trained is kept in safetensors files, which hold"
            f" {', '.join(CODES)}. Give the model another type there, such as a pair of real numbers for each"
            " complex one, and convert it where it is used. A loop of your own (isotrain.launch) without"
            " `checkpoint` keeps nothing by itself."
        )


def save_weights(group: ReplicaGroup, target: Path) -> None:
    """Writes the weights of the first replica here by name, each in its own type.

    Raises:
        OSError: The file cannot be written; `target` is as it was.
    """
    from isotrain.core.checkpoints.safetensors_file import write_safetensors
    from isotrain.core.checkpoints.tensor_part import TensorPart

    weights, known = group.read_state(WEIGHTS), group.describe_state(WEIGHTS)
    parts = {name: TensorPart(array, known[name].dtype) for name, array in weights.items()}
    write_safetensors(target, parts)
