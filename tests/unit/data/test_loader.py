"""The loader gives every replica its exact share of the same global batches."""

from __future__ import annotations

import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.loaded_batches import facts, loader, noisy, real, samples, source_of

from isotrain.core.data import sampler
from isotrain.core.data.arrays import ArraySource, arrays
from isotrain.core.data.batch import Batch
from isotrain.core.data.dataset import DataSet, as_dataset
from isotrain.core.data.loader import Loader
from isotrain.core.data.order.permutation import permutation
from isotrain.core.data.pytree import Weighted, leaves
from isotrain.core.errors import DataError

shapes = st.fixed_dictionaries(
    {
        "length": st.integers(1, 200),
        "global_batch_size": st.integers(1, 64),
        "replicas": st.integers(1, 9),
        "gradient_accumulation_steps": st.integers(1, 4),
        "shuffle": st.booleans(),
        "drop_remainder": st.booleans(),
    }
)


@settings(deadline=None)
@given(shape=shapes)
def test_slices_in_order_are_exactly_the_global_batches(shape):
    length, size, drop = shape["length"], shape["global_batch_size"], shape["drop_remainder"]
    if drop and length < size:
        with pytest.raises(DataError, match="not one global batch"):
            loader(**shape)
        return
    batches = list(loader(**shape, epochs=2))
    per_epoch = sampler.steps_per_epoch(length, size, drop)
    assert [(b.epoch, b.index, b.step) for b in batches] == [
        (step // per_epoch, step % per_epoch, step) for step in range(2 * per_epoch)
    ]
    for epoch in range(2):
        order = permutation(5, (epoch,), length) if shape["shuffle"] else np.arange(length)
        expected = order[: per_epoch * size]
        mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert [s for b in mine for s in samples(b)] == expected.tolist()
        if not drop:
            assert sorted(s for b in mine for s in samples(b)) == list(range(length))
        assert [b.is_last_of_epoch for b in mine] == [False] * (per_epoch - 1) + [True]
        assert all(len(samples(b)) == b.size for b in mine)


@settings(deadline=None)
@given(shape=shapes)
def test_weights_make_the_mean_exact(shape):
    shape["drop_remainder"] = False
    for batch in loader(**shape):
        assert len(batch.slices) == shape["replicas"]
        counts = [sum(p.count for p in micro_batches) for micro_batches in batch.slices]
        assert max(counts) - min(counts) <= 1
        assert batch.even == (len(set(counts)) == 1)
        contributions, exact = [], Fraction(0)
        for micro_batches in batch.slices:
            assert len(micro_batches) == shape["gradient_accumulation_steps"]
            contributions.append(sum(p.weight * p.targets.mean() for p in micro_batches))
            for micro_batch in micro_batches:
                assert (
                    len(micro_batch.inputs) == len(micro_batch.targets) == max(micro_batch.count, 1)
                )
                weight = Fraction(micro_batch.count * shape["replicas"], batch.size)
                assert micro_batch.weight == float(weight)
                exact += weight * Fraction(sum(real(micro_batch)), max(micro_batch.count, 1))
            if batch.even and shape["gradient_accumulation_steps"] == 1:
                assert micro_batches[0].weight == 1.0
        assert exact / shape["replicas"] == Fraction(sum(samples(batch)), batch.size)
        mean = np.mean(samples(batch))
        assert abs(np.mean(contributions) - mean) <= 1e-12 * max(1.0, mean)


@settings(deadline=None, max_examples=50)
@given(shape=shapes, data=st.data())
def test_a_process_gets_its_replicas_alone(shape, data):
    shape["drop_remainder"] = False
    chosen = data.draw(st.permutations(range(shape["replicas"])))[: data.draw(st.integers(1, 9))]
    part = loader(**shape, local_replicas=chosen)
    for mine, whole in zip(part, loader(**shape), strict=True):
        everyone = facts(whole)[-1]
        k = shape["gradient_accumulation_steps"]
        assert facts(mine)[-1] == [everyone[r * k + m] for r in chosen for m in range(k)]
        assert mine.even == whole.even


@settings(deadline=None, max_examples=50)
@given(shape=shapes, start=st.integers(0, 60))
def test_resuming_gives_the_batches_of_an_uninterrupted_run(shape, start):
    shape["drop_remainder"] = False
    whole = [facts(batch) for batch in loader(**shape, steps=50)]
    resumed = loader(**shape, steps=50, start_step=start)
    assert len(resumed) == max(0, 50 - start)
    assert [facts(batch) for batch in resumed] == whole[start:]


@settings(deadline=None, max_examples=50)
@given(
    length=st.integers(1, 60),
    size=st.integers(1, 20),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    start=st.integers(0, 5),
)
def test_parts_are_the_same_however_they_are_dealt(length, size, counts, start):
    parts = sum(counts)
    alone = loader(length, global_batch_size=size, parts=parts, steps=8)
    dealt = loader(length, global_batch_size=size, parts=parts, steps=8, replicas=len(counts))
    batches = list(dealt.from_step(start, part_counts=tuple(counts)))
    assert len(batches) == 8 - start
    for mine, whole in zip(batches, alone.from_step(start), strict=True):
        assert [len(slices) for slices in mine.slices] == list(mine.part_counts) == counts
        assert [real(p) for slices in mine.slices for p in slices] == [
            real(p) for p in whole.slices[0]
        ]
        assert whole.part_counts == (parts,)


@pytest.mark.parametrize("options", [{}, {"transform": lambda i, t, r: (i + 1, t)}])
def test_each_process_gets_the_parts_to_verify(options):
    """Besides its own ones, of which one may be the same; every fourth step from the first one of the run."""
    whole = loader(20, parts=4, epochs=6, **options)
    chosen = []
    for replica in range(3):
        dealt = loader(
            20, parts=4, epochs=6, replicas=3, local_replicas=[replica], verify_every=4, **options
        )
        for mine, alone in zip(
            dealt.from_step(1, part_counts=(2, 1, 1)), whole.from_step(1), strict=True
        ):
            assert [len(slices) for slices in mine.slices] == [[2, 1, 1][replica]]
            if mine.step % 4:
                assert mine.verified is None
                continue
            parts = alone.slices[0]
            part = next(n for n, each in enumerate(parts) if each.first == mine.verified.first)
            assert mine.verified.count == parts[part].count > 0
            np.testing.assert_array_equal(mine.verified.inputs, parts[part].inputs)
            np.testing.assert_array_equal(mine.verified.targets, parts[part].targets)
            chosen.append(part)
    assert chosen[:4] == chosen[4:8] == chosen[8:]
    assert len({*chosen}) > 1


class SampleBySample:
    """Arrays of which the loader knows nothing: it gathers whole shares, checks and cuts them."""

    def __init__(self, source: ArraySource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def gather(self, indices):
        return self._source.gather(indices)


def several_arrays(length: int, targets: bool) -> ArraySource:
    """Arrays of several dtypes, one of them not contiguous, with or without weighted targets."""
    values = np.arange(2.0 * length).reshape(length, 2)
    inputs = {"a": (values, values.astype(np.float32)), "b": np.arange(2 * length)[::2] % 3 == 0}
    rows = np.arange(length)
    return arrays(inputs, Weighted(rows.astype(np.int32), rows / 2) if targets else None)


def contents(batch: Batch) -> list:
    """Numbers of every slice; position, dtype, shape and bytes of every array in it."""
    return [
        (replica, micro_batch.count, micro_batch.weight, *(
            (path, array.dtype, array.shape, array.tobytes(), array.flags.writeable)
            for part in (micro_batch.inputs, micro_batch.targets) if part is not None
            for path, array in leaves(part, "")
        ))
        for replica, micro_batches in enumerate(batch.slices) for micro_batch in micro_batches
    ]  # fmt: skip


@settings(deadline=None, max_examples=30)
@given(shape=shapes, start=st.integers(0, 30), targets=st.booleans(), data=st.data())
def test_arrays_in_memory_give_the_batches_of_any_source(shape, start, targets, data):
    replicas = range(shape["replicas"])
    local = data.draw(st.lists(st.sampled_from(replicas), min_size=1, unique=True))
    options = {**shape, "drop_remainder": False, "local_replicas": local, "start_step": start}
    source = several_arrays(shape["length"], targets)
    quick, any_source = (
        list(loader(**options | {"source": each, "steps": 32}))
        for each in (source, SampleBySample(source))
    )
    assert [facts(b, contents) for b in quick] == [facts(b, contents) for b in any_source]


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(shape=shapes)
def test_augmentation_is_bit_equal_whatever_the_split(shape):
    shape["drop_remainder"] = False

    def seen(**split) -> dict[tuple[int, int], bytes]:
        return {
            (batch.epoch, sample): row.tobytes()
            for batch in loader(**shape | split, epochs=2, transform=noisy)
            for micro_batches in batch.slices
            for micro_batch in micro_batches
            for sample, row in zip(
                real(micro_batch), micro_batch.inputs[: micro_batch.count], strict=True
            )
        }

    one = seen(replicas=1, gradient_accumulation_steps=1)
    assert seen() == one
    assert len(one) == 2 * shape["length"]


def test_augmentation_changes_with_the_epoch_and_spares_the_data_set():
    source = source_of(6)
    batches = list(loader(6, source=source, transform=noisy, shuffle=False, epochs=2))
    first, second = (b.slices[0][0].inputs for b in batches)
    assert not np.any(first == second)
    assert source.inputs.tolist() == source_of(6).inputs.tolist()


def test_only_local_samples_are_gathered():
    class Recorder:
        def __init__(self):
            self.asked = []

        def __len__(self):
            return 12

        def gather(self, indices):
            self.asked += indices.tolist()
            return indices, None

    source = Recorder()
    list(loader(12, source=source, replicas=4, local_replicas=[2], shuffle=False))
    assert source.asked == [4, 5, 10]


def test_an_empty_local_batch_has_the_first_sample_as_placeholder():
    (batch,) = loader(2, replicas=3)
    micro_batch = batch.slices[2][0]
    assert (micro_batch.count, micro_batch.weight) == (0, 0.0)
    assert micro_batch.targets.tolist() == batch.slices[0][0].targets.tolist()
    assert not batch.even


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_copies_of_the_data(shuffle):
    source = source_of(16)
    for batch in loader(
        16, source=source, shuffle=shuffle, replicas=2, gradient_accumulation_steps=2
    ):
        for micro_batches in batch.slices:
            assert not any(
                np.shares_memory(micro_batch.inputs, source.inputs) for micro_batch in micro_batches
            )


def test_to_device_is_called_on_inputs_and_targets():
    (batch,) = loader(4, to_device=lambda array: ("placed", array.shape))
    micro_batch = batch.slices[0][0]
    assert (micro_batch.inputs, micro_batch.targets) == (("placed", (4, 2)), ("placed", (4,)))
    (batch,) = loader(4, source=arrays(np.ones((4, 2))), to_device=np.sum)
    assert (batch.slices[0][0].inputs, batch.slices[0][0].targets) == (8.0, None)


def test_lengths():
    runs = loader(20, epochs=3)
    assert (runs.steps_per_epoch, runs.total_steps, len(runs)) == (3, 9, 9)
    assert len(list(runs)) == 9
    dropped = loader(20, drop_remainder=True, steps=5, start_step=1)
    assert (dropped.steps_per_epoch, dropped.total_steps, len(dropped)) == (2, 5, 4)


def test_small_arrays_in_memory_are_gathered_at_once():
    def makers(source, **options):
        batches = loader(
            0,
            source=source,
            prefetch=2,
            to_device=lambda _: threading.current_thread().name,
            **options,
        )
        return {batch.slices[0][0].inputs for batch in batches}

    assert makers(source_of(64)) == {threading.current_thread().name}
    assert makers(arrays(np.zeros((64, 20_000)))) == {"isotrain-prefetch"}
    assert makers(arrays(np.zeros((64, 20_000))), shares_cores=True) == makers(source_of(64))


# Errors and data sets


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size: expected 1 or more, received 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"replicas": 2, "local_replicas": [2]}, "local_replicas: expected some of 0 to 1"),
        ({"local_replicas": []}, "local_replicas"),
        ({"start_step": -1}, "start_step"),
        ({"prefetch": -1}, "prefetch"),
        ({"epochs": None}, "either epochs or steps"),
        (
            {"epochs": 2, "global_batch_size": 30, "drop_remainder": True},
            "not one global batch of 30",
        ),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(DataError, match=message):
        loader(10, **options)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda x, y, random: x, r"expected it to return \(inputs, targets\)"),
        (lambda x, y, random: (x[1:], y), r"inputs: the transform gave shape \(7, 2\), expected 8"),
        (lambda x, y, random: ({"a": x}, y[0]), "targets: the transform gave shape"),
    ],
)
def test_wrong_transforms_are_explained(transform, message):
    with pytest.raises(DataError, match=message):
        list(loader(16, transform=transform))


def test_a_source_that_gives_too_few_samples_is_an_error():
    class Short:
        def __len__(self):
            return 8

        def gather(self, indices):
            return {"a": indices[1:]}, None

    with pytest.raises(DataError, match=r"inputs\['a'\]: the data set gave shape \(7,\)"):
        list(loader(8, source=Short()))


def test_data_sets():
    pair = (np.ones((3, 2)), np.ones(3))
    alone = as_dataset(pair)
    assert (len(alone.train), alone.validation) == (3, None)
    both = as_dataset(DataSet(pair, validation=pair[0]))
    assert (len(both.train), len(both.validation)) == (3, 3)
    assert as_dataset(both).train is both.train
    with pytest.raises(DataError, match="Accepted: a tuple"):
        as_dataset(DataSet(pair, validation=7))


class Endless:
    """Says that it has more samples than there can be."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def gather(self, indices: sampler.Indices) -> tuple[np.ndarray, None]:
        return np.zeros((len(indices), 1)), None


@pytest.mark.parametrize("length", [10**18, 10**30, -1])
def test_an_impossible_length_is_refused(length: int) -> None:
    options = {"drop_remainder": False, "seed": 0, "epochs": 1}
    with pytest.raises(DataError, match=r"data: (its length is|len\(\) of it fails)"):
        Loader(Endless(length), global_batch_size=4, replicas=1, local_replicas=[0], **options)
