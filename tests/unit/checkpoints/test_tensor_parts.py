"""Tensors are written in any parts and blocks, and read in any others."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotrain.core.checkpoints import checkpoint, dtypes
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.errors import CheckpointError

Box = tuple[tuple[int, ...], tuple[int, ...]]


def test_blocks_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "BLOCK_BYTES", 24)
    for shape in [(), (1,), (7,), (3, 0, 2), (5, 3), (2, 9), (1, 50), (2, 3, 4), (3, 1, 7, 2)]:
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        blocks = [array[dtypes.block_index(*place)] for place in dtypes.blocks(shape, 8)]
        assert all(block.nbytes <= 24 for block in blocks)
        numbers = np.concatenate([np.empty(0), *map(np.ravel, blocks)])
        assert numbers.tolist() == array.ravel().tolist()


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """An axis in pieces: where each begins, and its length."""
    places = draw(st.lists(st.integers(0, length), max_size=2))
    return [(a, b - a) for a, b in itertools.pairwise(sorted([0, *places, length]))]


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], Box]:
    """A shape, boxes that fill it, and a box in it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    grid = [draw(cuts(length)) for length in shape]
    boxes = [
        (tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*grid)
    ]
    corner = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    wanted = tuple(a for a, _ in corner), tuple(b - a for a, b in corner)
    return shape, draw(st.permutations(boxes)), wanted


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """A block has three numbers, so that most tensors have several; and the rules are those of large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtypes, "BLOCK_BYTES", 12)
        patch.setattr(checkpoint, "PARALLEL_READ_BYTES", 0)
        patch.setattr(checkpoint, "HUGE_PAGE_BYTES", 1)
        yield


@given(splits(), st.sampled_from(["float32", "bfloat16", "int16"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_sharding_is_read_as_any_other(
    split: tuple[tuple[int, ...], list[Box], Box], dtype: str, transposed: bool
) -> None:
    shape, boxes, wanted = split
    kind = "float32" if dtype == "bfloat16" else dtype
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    source = whole.copy(order="F") if transposed else whole
    folder = CheckpointFolder(f"memory://{uuid.uuid4()}")
    for writer, place in enumerate(boxes):
        part = TensorPart(source[dtypes.block_index(*place)], dtype, shape, place[0])
        folder.write(1, token="t", writer=writer, sections={"state": {"w": part}})
    checkpoint = folder.commit(1, token="t", writers=len(boxes), run={}, timeout_s=0.0)
    found = checkpoint.read("state")["w"]
    assert found.dtype == kind
    np.testing.assert_array_equal(found, whole)
    np.testing.assert_array_equal(
        checkpoint.read_part("state", "w", *wanted), whole[dtypes.block_index(*wanted)]
    )
    checkpoint.verify()


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (1, 3))],
        [((0, 0), (2, 3)), ((1, 0), (1, 3))],
        [((0, 0), (1, 3)), ((0, 0), (1, 3))],
        [((0, 0), (2, 2)), ((0, 1), (2, 1))],
    ],
    ids=["a gap", "an overlap", "twice the same", "as many numbers, but not all"],
)
def test_incomplete_shards_are_never_committed(boxes: list[Box]) -> None:
    folder = CheckpointFolder(f"memory://{uuid.uuid4()}")
    for writer, (offset, shape) in enumerate(boxes):
        part = TensorPart(np.zeros(shape), global_shape=(2, 3), offset=offset)
        folder.write(1, token="t", writer=writer, sections={"state": {"w": part}})
    with pytest.raises(CheckpointError, match=r"'w': its \d parts overlap or leave gaps"):
        folder.commit(1, token="t", writers=len(boxes), run={}, timeout_s=0.0)
    assert folder.newest() is None


@pytest.mark.parametrize(
    ("offset", "shape"), [((0, 0), (3, 1)), ((-1, 0), (1, 1)), ((0,), (1,)), ((2, 3), (1, 1))]
)
def test_a_shard_outside_of_its_tensor_is_refused(
    offset: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    state = {"w": TensorPart(np.zeros((2, 3)))}
    folder = CheckpointFolder(f"memory://{uuid.uuid4()}")
    checkpoint = folder.save(1, sections={"state": state}, run={})
    with pytest.raises(CheckpointError, match="does not lie in"):
        checkpoint.read_part("state", "w", offset, shape)


@pytest.mark.parametrize(
    ("array", "options"),
    [
        (np.array(["text"]), {}),
        (np.array([object()]), {}),
        (np.zeros(2, "float128" if hasattr(np, "float128") else "complex128"), {}),
        (np.zeros(2, "float64"), {"dtype": "bfloat16"}),
        (np.zeros(2, "float32"), {"dtype": "float16"}),
        (np.zeros(2), {"global_shape": (2, 1)}),
        (np.zeros(2), {"offset": (1, 1)}),
    ],
)
def test_invalid_tensor_parts_are_refused(array: np.ndarray, options: dict[str, str]) -> None:
    with pytest.raises(CheckpointError):
        TensorPart(array, **options)
