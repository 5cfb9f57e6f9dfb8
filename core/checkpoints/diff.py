"""In which tensors two checkpoints differ, and by how much."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.tensor_part import StoredTensor


@dataclass(frozen=True)
class TensorDiff:
    """A tensor of both whose numbers, shape or dtype differ.

    Attributes:
        section: Of the tensor.
        name: Of it.
        shapes: In the one and in the other; where they differ, no numbers are compared.
        dtypes: In the one and in the other.
        numbers: How many it has.
        differing: How many of them differ; NaN does not differ from NaN.
        largest: Of the absolute differences; NaN where one of two numbers is NaN.
        relative: That, divided by the largest absolute number of the one.
    """

    section: str
    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    numbers: int | None = None
    differing: int | None = None
    largest: float | None = None
    relative: float | None = None


@dataclass(frozen=True)
class CheckpointDiff:
    """What is not the same in two checkpoints.

    Attributes:
        compared: How many tensors are in both.
        only_in_one: `section: name` of tensors that the other lacks.
        only_in_other: The same, of the other.
        tensors: Those that differ, by section and name.
    """

    compared: int
    only_in_one: list[str]
    only_in_other: list[str]
    tensors: list[TensorDiff]

    @property
    def has_none(self) -> bool:
        """Whether they hold the same."""
        return not (self.only_in_one or self.only_in_other or self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return asdict(self)


def diff_checkpoints(one: Checkpoint, other: Checkpoint) -> CheckpointDiff:
    """Compares two checkpoints, a tensor at a time.

    Raises:
        CheckpointError: One of them cannot be read, or is not as it was written.
    """
    ours, theirs = _all_tensors(one), _all_tensors(other)
    both = sorted(ours.keys() & theirs.keys())
    found = [_difference(one, other, each, ours[each], theirs[each]) for each in both]
    return CheckpointDiff(
        len(both),
        [f"{section}: {name}" for section, name in sorted(ours.keys() - theirs.keys())],
        [f"{section}: {name}" for section, name in sorted(theirs.keys() - ours.keys())],
        [each for each in found if each is not None],
    )


def _all_tensors(checkpoint: Checkpoint) -> dict[tuple[str, str], StoredTensor]:
    return {
        (section, name): tensor
        for section in checkpoint.sections()
        for name, tensor in checkpoint.tensors(section).items()
    }


def _difference(
    one: Checkpoint,
    other: Checkpoint,
    where: tuple[str, str],
    ours: StoredTensor,
    theirs: StoredTensor,
) -> TensorDiff | None:
    shapes, dtypes = (ours.shape, theirs.shape), (ours.dtype, theirs.dtype)
    if ours.shape != theirs.shape:
        return TensorDiff(*where, shapes, dtypes)
    a, b = one.read_part(*where), other.read_part(*where)
    differ = (a != b) & ~(_is_nan(a) & _is_nan(b))
    count = int(differ.sum())
    if not count and ours.dtype == theirs.dtype:
        return None
    with np.errstate(invalid="ignore"):  # infinite numbers
        apart = np.abs(_wide(a[differ]) - _wide(b[differ]))
    largest = float(apart.max(initial=0.0))
    scale = float(np.abs(_wide(a[~_is_nan(a)])).max(initial=0.0))
    relative = largest / scale if scale else None
    return TensorDiff(*where, shapes, dtypes, a.size, count, largest, relative)


def _is_nan(array: np.ndarray) -> np.ndarray:
    return np.asarray(array != array)


def _wide(array: np.ndarray) -> np.ndarray:
    """In a dtype in which the difference of any two numbers has room."""
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")
