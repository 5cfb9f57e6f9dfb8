"""Every kind of source gathers the right samples, and files stay memory-mapped."""

from __future__ import annotations

import mmap
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from isotrain.core.data.array_files import npy, npz
from isotrain.core.data.arrays import ArraySource, arrays, reader
from isotrain.core.data.map_style import BatchIndexed, MapStyle
from isotrain.core.data.sources import ShardedStream, Source, as_source
from isotrain.core.errors import DataError

ROWS = np.array([7, 0, 3, 3, 9])
X = np.random.default_rng(0).standard_normal((10, 4, 3)).astype(np.float32)
Y = np.arange(10) * 2


def check(source: Source) -> None:
    assert len(source) == 10
    inputs, targets = source.gather(ROWS)
    assert type(inputs) is np.ndarray
    np.testing.assert_array_equal(inputs, X[ROWS])
    np.testing.assert_array_equal(targets, Y[ROWS])
    assert inputs.dtype == np.float32
    assert targets.dtype == np.int64
    assert inputs.flags.writeable


class Columns:
    """A data set like Hugging Face's: a list of indices gives a dict of lists."""

    column_names = ("image", "label")

    def __len__(self) -> int:
        return 10

    def __getitem__(self, rows: list[int]) -> dict[str, list]:
        assert isinstance(rows, list)
        return {"image": [X[i].tolist() for i in rows], "label": [int(Y[i]) for i in rows]}


class Formatted(Columns):
    """The same data set with formats: only the NumPy one keeps float32."""

    def __init__(self, kind: str | None = None) -> None:
        self.format = {"type": kind}

    def with_format(self, kind: str) -> Formatted:
        return Formatted(kind)

    def __getitem__(self, rows):
        if self.format["type"] == "numpy":
            return {"image": X[rows], "label": Y[rows]}
        return super().__getitem__(rows)


class Pairs:
    """A map-style data set of (inputs, targets)."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int):
        return X[index], Y[index]


class Scaled(TensorDataset):
    """Tensors that a person's own class changes."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        inputs, targets = super().__getitem__(index)
        return inputs * 2, targets


def test_getitem_of_a_tensor_dataset_subclass_is_used():
    plain, changed = (
        kind(torch.from_numpy(X), torch.from_numpy(Y)) for kind in (TensorDataset, Scaled)
    )
    for samples, factor in ((plain, 1), (changed, 2)):
        inputs, targets = as_source(DataLoader(samples, batch_size=2)).gather(ROWS)
        np.testing.assert_array_equal(inputs, X[ROWS] * factor)
        np.testing.assert_array_equal(targets, Y[ROWS])


def test_an_attribute_named_features_makes_no_data_set_of_columns():
    class Described(Pairs):
        features = 4

    inputs, _ = as_source(Described()).gather(ROWS)
    np.testing.assert_array_equal(inputs, X[ROWS])


class Stream:
    def __len__(self) -> int:
        return 3

    def iterate(self, *, epoch, seed, replica, replicas):
        yield X[:2], Y[:2]


@pytest.mark.parametrize(
    "value",
    [
        (X, Y),
        [X, Y],
        (torch.from_numpy(X).requires_grad_(), torch.from_numpy(Y)),
        (X.astype(">f4"), Y),
        (np.asfortranarray(X), Y),
        (X[::-1][::-1], Y),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        Pairs(),
        BatchIndexed(Formatted(), inputs="image", targets="label"),
    ],
    ids=["tuple", "list", "torch", "other-endian", "fortran", "strided", "map", "pairs", "columns"],
)
def test_samples_are_gathered(value):
    check(as_source(value))


def test_gathering_many_rows_of_a_strided_array_is_right_too():
    wide = np.arange(60.0).reshape(10, 6)
    inputs, _ = as_source(wide[:, ::2]).gather(ROWS)
    np.testing.assert_array_equal(inputs, wide[ROWS][:, ::2])


def test_one_array_has_no_targets():
    for value in (X, (X,), torch.from_numpy(X)):
        inputs, targets = as_source(value).gather(ROWS)
        np.testing.assert_array_equal(inputs, X[ROWS])
        assert targets is None


def test_nested_structures_are_kept():
    source = arrays(inputs=(X, {"id": Y}), targets={"a": Y, "b": X})
    inputs, targets = source.gather(ROWS)
    np.testing.assert_array_equal(inputs[0], X[ROWS])
    np.testing.assert_array_equal(inputs[1]["id"], Y[ROWS])
    np.testing.assert_array_equal(targets["b"], X[ROWS])
    inputs, targets = as_source({"image": X, "label": Y}).gather(ROWS)
    assert list(inputs) == ["image", "label"]
    assert targets is None


def test_samples_are_copies_of_the_data():
    inputs, targets = reader(arrays(X, Y), in_order=True)(np.arange(2, 5))
    np.testing.assert_array_equal(inputs, X[2:5])
    np.testing.assert_array_equal(targets, Y[2:5])
    assert not np.shares_memory(inputs, X)
    assert not np.shares_memory(targets, Y)
    locked = X.copy()
    locked.flags.writeable = False
    inputs, _ = reader(arrays(locked), in_order=True)(np.arange(2, 5))
    assert inputs.flags.writeable


def test_third_party_sources_are_used_unchanged():
    for source in (arrays(X), MapStyle(Pairs()), Stream()):
        assert as_source(source) is source
    assert isinstance(Stream(), ShardedStream)
    assert not isinstance(Pairs(), Source | ShardedStream)


# Files


@pytest.fixture
def npy_files(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    return tmp_path / "x.npy", tmp_path / "y.npy"


def is_mapped(array: np.ndarray) -> bool:
    return isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap)


def test_npy_files_are_mapped(npy_files):
    source = npy(*npy_files)
    check(source)
    assert is_mapped(source.inputs)
    assert is_mapped(source.targets)
    assert not source.in_memory


def test_fortran_order_and_newer_headers_are_read(tmp_path):
    np.save(tmp_path / "x.npy", np.asfortranarray(X))
    with (tmp_path / "y.npy").open("wb") as file:
        np.lib.format.write_array(file, Y, version=(2, 0))
    source = npy(tmp_path / "x.npy", tmp_path / "y.npy")
    check(source)
    check(pickle.loads(pickle.dumps(source)))  # noqa: S301 - written two lines above


def test_uncompressed_npz_members_are_mapped_where_they_lie(tmp_path):
    np.savez(tmp_path / "d.npz", y=Y, other=np.ones(3), x=X)
    source = npz(tmp_path / "d.npz")
    check(source)
    assert is_mapped(source.inputs)
    assert is_mapped(source.targets)


def test_compressed_npz_members_are_loaded(tmp_path):
    np.savez_compressed(tmp_path / "d.npz", x=X, y=Y)
    source = npz(tmp_path / "d.npz")
    check(source)
    assert source.in_memory


@pytest.mark.slow
def test_a_mapped_source_is_mapped_again_in_another_process(tmp_path):
    big = np.arange(200_000, dtype=np.float64).reshape(1000, 200)
    np.save(tmp_path / "x.npy", big)
    np.savez(tmp_path / "d.npz", x=big, y=big)
    given = np.load(tmp_path / "x.npy", mmap_mode="r")
    for source in (npy(tmp_path / "x.npy"), npz(tmp_path / "d.npz"), as_source((given,))):
        sent = pickle.dumps(source)
        assert len(sent) < 2000
        code = (
            "import pickle, sys, numpy as np\n"
            "s = pickle.loads(sys.stdin.buffer.read())\n"
            "assert isinstance(s.inputs, np.memmap) and not s.in_memory\n"
            "print(s.gather(np.array([999, 1]))[0][:, 0].tolist())"
        )
        done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True)
        assert done.stdout.decode().strip() == "[199800.0, 200.0]", done.stderr.decode()


def test_a_slice_of_a_mapped_array_is_pickled_by_value(npy_files):
    part = np.load(npy_files[0], mmap_mode="r")[4:]
    again = pickle.loads(pickle.dumps(arrays(part)))  # noqa: S301 - written in this line
    np.testing.assert_array_equal(again.gather(np.array([1]))[0], X[5:6])


def test_objects_in_files_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "d.npz", x=np.array([{}, {}], dtype=object))
    np.savez_compressed(tmp_path / "c.npz", x=np.array([{}, {}], dtype=object))
    with pytest.raises(DataError, match="Python objects"):
        npy(tmp_path / "x.npy")
    with pytest.raises(DataError, match="Python objects"):
        npz(tmp_path / "d.npz", targets=None)
    with pytest.raises(DataError, match="plain arrays"):
        npz(tmp_path / "c.npz", targets=None)


def test_wrong_files_are_named(tmp_path):
    (tmp_path / "text.npy").write_text("not an array")
    np.savez(tmp_path / "d.npz", a=X, b=Y)
    with pytest.raises(DataError, match=r"missing\.npy"):
        npy(tmp_path / "missing.npy")
    with pytest.raises(DataError, match=r"text\.npy"):
        npy(tmp_path / "text.npy")
    with pytest.raises(DataError, match=r"text\.npy"):
        npz(tmp_path / "text.npy")
    with pytest.raises(DataError, match=r"d\.npz: unknown array 'x'\. Available: a, b"):
        npz(tmp_path / "d.npz")
    np.save(tmp_path / "big.npy", X.astype(">f4"))
    with pytest.raises(DataError, match="byte order"):
        npy(tmp_path / "big.npy")


# Data sets


def test_columns_are_chosen():
    inputs, targets = as_source(Columns()).gather(ROWS)
    assert targets is None
    np.testing.assert_allclose(inputs["image"], X[ROWS])
    inputs, targets = BatchIndexed(Columns(), targets="label").gather(ROWS)
    assert list(inputs) == ["image"]
    np.testing.assert_array_equal(targets, Y[ROWS])
    inputs, targets = BatchIndexed(Columns(), ["label", "image"], ["label"]).gather(ROWS)
    assert list(inputs) == ["label", "image"]
    np.testing.assert_array_equal(targets["label"], Y[ROWS])
    with pytest.raises(
        DataError, match=r"column 'labels'\. Did you mean 'label'\? Available: image"
    ):
        BatchIndexed(Columns(), inputs="labels").gather(ROWS)


class Named(Pairs):
    """A map-style data set of dicts, as those of Hugging Face give them."""

    def __getitem__(self, index: int):
        return {"image": X[index], "label": Y[index]}


def test_targets_of_dict_samples_are_named():
    inputs, targets = as_source(Named()).gather(ROWS)
    assert targets is None
    np.testing.assert_array_equal(inputs["image"], X[ROWS])
    check(MapStyle(Named(), inputs="image", targets="label"))
    inputs, targets = MapStyle(Named(), targets=["label"]).gather(ROWS)
    np.testing.assert_array_equal(inputs["image"], X[ROWS])
    np.testing.assert_array_equal(targets["label"], Y[ROWS])
    stacked = MapStyle(Named(), default_collate, inputs="image", targets="label").gather(ROWS)
    np.testing.assert_array_equal(stacked[1], Y[ROWS])
    with pytest.raises(DataError, match=r"column 'labels'\. Did you mean 'label'"):
        MapStyle(Named(), targets="labels").gather(ROWS)
    with pytest.raises(DataError, match="sample 4: expected a dict or a dataclass"):
        MapStyle(Pairs(), targets="label").gather(np.array([4]))


def test_an_existing_format_is_kept():
    inputs, _ = BatchIndexed(Formatted("python"), inputs="image").gather(ROWS)
    assert inputs.dtype == np.float64


def test_batched_fetching_is_used_where_there_is_one():
    class Together(Pairs):
        def __getitems__(self, rows):
            asked.append(rows)
            return [self[i] for i in rows]

    asked: list[list[int]] = []
    check(as_source(Together()))
    assert asked == [ROWS.tolist()]


def test_dicts_of_samples_are_stacked():
    class Dicts(Pairs):
        def __getitem__(self, index):
            return {"image": torch.from_numpy(X[index]), "size": (index, 2.0)}

    inputs, targets = as_source(Dicts()).gather(ROWS)
    np.testing.assert_array_equal(inputs["image"], X[ROWS])
    np.testing.assert_array_equal(inputs["size"][0], ROWS)
    assert targets is None


def test_samples_of_unequal_shapes_are_named():
    class Ragged(Pairs):
        def __getitem__(self, index):
            return np.zeros(index + 1), 0

    with pytest.raises(DataError, match=r"inputs: .* \(8,\) for sample 7 and \(1,\) for sample 0"):
        as_source(Ragged()).gather(ROWS)


# Errors


@pytest.mark.parametrize("value", [None, 3, "data.npy", iter([1]), {1, 2}])
def test_other_things_are_refused_with_what_is_accepted(value):
    with pytest.raises(
        DataError, match=rf"received {type(value).__name__}.*Accepted: a tuple \(inputs"
    ):
        as_source(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((X, Y[:9]), "inputs has 10, targets has 9"),
        (((X, {"a": Y[:5]}), Y), r"inputs\[0\] has 10, inputs\[1\]\['a'\] has 5"),
        ((X, Y, Y, Y), "a tuple of 4"),
        ((X, Y, Y[:9]), "sample weights has 9"),
        ((X[:0], Y[:0]), "empty"),
        ({}, "empty"),
        ((np.float32(3), Y), "scalar"),
        ((np.array([b"a", b"b"]), Y), "expected numbers, booleans or text, received dtype .S1"),
        (([[1], [1, 2]], Y), "inputs: expected an array of numbers, received list"),
        ((torch.ones(2, dtype=torch.bfloat16), Y), "inputs: expected an array"),
        (TensorDataset(torch.ones(0, 2)), "empty"),
    ],
)
def test_unusable_data_is_explained(value, message):
    with pytest.raises(DataError, match=message):
        as_source(value)


def test_arrays_are_a_source():
    assert isinstance(as_source((X, Y)), ArraySource)
    assert arrays(X, Y).sample_bytes == 4 * 3 * 4 + 8


@pytest.mark.parametrize("kind", ["datetime64[s]", "timedelta64[s]", "V4", "complex64"])
def test_non_numeric_fields_are_refused_by_name(kind: str) -> None:
    times = np.zeros(3, kind)
    with pytest.raises(
        DataError, match=r"inputs: expected numbers, booleans or text, received dtype"
    ):
        as_source((times, np.zeros(3)))


def test_a_mask_is_not_dropped() -> None:
    """NumPy would give the values below it."""
    masked = np.ma.masked_greater(np.arange(6.0), 3)
    with pytest.raises(DataError, match=r"inputs: expected an array without masked values"):
        arrays(masked, np.arange(6))
    assert (
        arrays(np.ma.masked_greater(np.arange(6.0), 9), np.arange(6)).gather(np.array([2]))[0] == 2
    )
