"""Comparison of two checkpoints: which tensors differ, and by how much."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.tensor_part import StoredTensor


@dataclass(frozen=True)
class TensorDiff:
    """A tensor in both checkpoints whose elements, shape or dtype differ.

    Attributes:
        section: Section of the tensor.
        name: Name of the tensor.
        shapes: Shape in each of the two; elements are compared only if the shapes are equal.
        dtypes: Dtype in each of the two.
        numbers: Number of elements.
        differing: Number of elements that differ; NaN equals NaN.
        largest: Largest absolute difference; NaN if one of two elements is NaN.
        relative: Largest absolute difference over the largest absolute element of the first checkpoint.
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
    """The differences between two checkpoints.

    Attributes:
        compared: Number of tensors in both.
        only_in_one: `section: name` of the tensors that only the first checkpoint has.
        only_in_other: `section: name` of the tensors that only the second checkpoint has.
        tensors: Tensors that differ, sorted by section and name.
    """

    compared: int
    only_in_one: list[str]
    only_in_other: list[str]
    tensors: list[TensorDiff]

    @property
    def is_empty(self) -> bool:
        """Whether the checkpoints have equal tensors."""
        return not (self.only_in_one or self.only_in_other or self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """The differences as JSON values."""
        return asdict(self)


def diff_checkpoints(one: Checkpoint, other: Checkpoint) -> CheckpointDiff:
    """Compares two checkpoints, one tensor at a time.

    Raises:
        CheckpointError: A checkpoint cannot be read, or is corrupted.
    """
    tensors, other_tensors = _all_tensors(one), _all_tensors(other)
    common = sorted(tensors.keys() & other_tensors.keys())
    diffs = [_tensor_diff(one, other, key, tensors[key], other_tensors[key]) for key in common]
    return CheckpointDiff(
        len(common),
        [f"{section}: {name}" for section, name in sorted(tensors.keys() - other_tensors.keys())],
        [f"{section}: {name}" for section, name in sorted(other_tensors.keys() - tensors.keys())],
        [diff for diff in diffs if diff is not None],
    )


def _all_tensors(checkpoint: Checkpoint) -> dict[tuple[str, str], StoredTensor]:
    return {
        (section, name): tensor
        for section in checkpoint.sections()
        for name, tensor in checkpoint.tensors(section).items()
    }


def _tensor_diff(
    one: Checkpoint,
    other: Checkpoint,
    key: tuple[str, str],
    tensor: StoredTensor,
    other_tensor: StoredTensor,
) -> TensorDiff | None:
    """The difference of one tensor; None if there is none."""
    shapes, dtypes = (tensor.shape, other_tensor.shape), (tensor.dtype, other_tensor.dtype)
    if tensor.shape != other_tensor.shape:
        return TensorDiff(*key, shapes, dtypes)
    a, b = one.read_part(*key), other.read_part(*key)
    differ = (a != b) & ~(_is_nan(a) & _is_nan(b))
    count = int(differ.sum())
    if not count and tensor.dtype == other_tensor.dtype:
        return None
    with np.errstate(invalid="ignore"):  # infinite numbers
        differences = np.abs(_widened(a[differ]) - _widened(b[differ]))
    largest = float(differences.max(initial=0.0))
    scale = float(np.abs(_widened(a[~_is_nan(a)])).max(initial=0.0))
    relative = largest / scale if scale else None
    return TensorDiff(*key, shapes, dtypes, a.size, count, largest, relative)


def _is_nan(array: np.ndarray) -> np.ndarray:
    """Elementwise test for NaN: booleans of the array's shape, for any dtype."""
    return np.asarray(array != array)


def _widened(array: np.ndarray) -> np.ndarray:
    """The array in a dtype that holds the difference of any two elements: float64 or complex128."""
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")
