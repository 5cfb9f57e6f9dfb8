"""Partners of samples, for transforms that mix two samples of a global batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.loaded_batches import facts, loader, samples, samples_of, source_of
from unit.data.stream_samples import INPUTS, TARGETS
from unit.data.test_sharded_streams import Stream

from isotrain.core.data.arrays import arrays
from isotrain.core.data.order.named_orders import ordered
from isotrain.core.data.pytree import Weighted
from isotrain.core.data.refusals import RefusedError
from isotrain.core.data.sample_rng import SampleRandom
from isotrain.core.data.sources import stream
from isotrain.core.errors import DataError


def augmented(inputs: Any, random: Any) -> Any:
    inputs *= 1 + random.uniform()[:, None]
    return inputs


def mixed(inputs: Any, targets: Any, random: Any) -> Any:
    """CutMix with augmentation: the second column and the target are the partner's."""
    inputs = augmented(inputs, random)
    others, other_targets, other_random = random.partner()
    others = augmented(others, other_random)
    _, third, _ = random.partner()
    return np.stack([inputs[:, 0], others[:, 0], third], axis=1), other_targets


def rows(batch: Any) -> list[Any]:
    parts = [part for parts in batch.slices for part in parts]
    return [row for part in parts for row in part.inputs[: part.count].tolist()]


@pytest.mark.slow
@settings(deadline=None)
@given(
    length=st.integers(1, 40),
    size=st.integers(1, 12),
    replicas=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
)
def test_partners_are_those_of_one_replica(
    length: int, size: int, replicas: int, micro_batches: int
) -> None:
    shape = {"transform": mixed, "global_batch_size": size, "epochs": 2}
    alone = list(loader(length, **shape))
    together = list(
        loader(
            length,
            **shape,
            replicas=replicas,
            gradient_accumulation_steps=micro_batches,
            tries_transform=True,
        )
    )
    assert [rows(batch) for batch in alone] == [rows(batch) for batch in together]
    for batch, plain in zip(alone, loader(length, global_batch_size=size, epochs=2), strict=True):
        inputs, partners = rows(batch), samples(batch)
        assert sorted(partners) == sorted(samples(plain)), "partners are a permutation"
        fixed = [a == b for a, b in zip(partners, samples(plain), strict=True)]
        assert not any(fixed) or batch.size == 1
        # a partner is augmented as that sample itself is
        augmented_first = {
            sample: row[0] for sample, row in zip(samples(plain), inputs, strict=True)
        }
        assert [row[1] for row in inputs] == [augmented_first[partner] for partner in partners]


def test_partners_differ_by_step_epoch_seed_and_call() -> None:
    batches = list(loader(16, transform=mixed, epochs=2, shuffle=False))
    found = [tuple(samples(batch)) for batch in batches]
    assert len(set(found)) == 4
    assert found[0] != tuple(
        samples(next(iter(loader(16, transform=mixed, shuffle=False, seed=6))))
    )
    assert [row[2] for row in rows(batches[0])] != list(found[0])


def test_partners_of_repeated_samples_weights_and_streams() -> None:
    source = arrays(np.ones((20, 2)), Weighted(np.arange(20), np.arange(20.0)))
    batch = next(iter(loader(20, source=source, transform=mixed, shuffle=False)))
    (part,) = batch.slices[0]
    assert sorted(part.targets.targets.tolist()) == list(range(8))
    assert part.targets.weights.tolist() == list(range(8)), "weights stay those of the sample"
    repeated = samples_of(source_of(20), global_batch_size=8, seed=1, drop_remainder=False)
    order = ordered(repeated, "repeated", {"times": 4})
    batches = list(loader(20, order=order, shuffle=False, transform=mixed))
    assert all(len(set(samples(batch))) == 2 for batch in batches)
    read = stream(lambda: iter([(INPUTS.copy(), TARGETS)]), 20)
    streamed = [list(loader(1, source=read, transform=mixed, replicas=r)) for r in (1, 3)]
    assert [rows(batch) for batch in streamed[0]] == [rows(batch) for batch in streamed[1]]
    by_position = loader(1, source=arrays(INPUTS, TARGETS), transform=mixed, shuffle=False)
    assert [facts(batch) for batch in streamed[0]] == [facts(batch) for batch in by_position]


def test_mixing_without_partners_is_still_refused() -> None:
    def flipped(inputs: Any, targets: Any, random: Any) -> Any:
        others, _, _ = random.partner()
        return inputs + others[::-1], targets

    with pytest.raises(RefusedError, match=r"`random.partner\(\)` gives each sample another one"):
        list(loader(16, transform=flipped, tries_transform=True))


@pytest.mark.parametrize("source", [Stream(), source_of(16)])
def test_partners_that_are_not_known_are_refused(source: Any) -> None:
    def twice(inputs: Any, targets: Any, random: Any) -> Any:
        return random.partner()[2].partner()[:2]

    with pytest.raises(DataError, match=r"random.partner\(\): only this replica's samples"):
        list(loader(16, source=source, transform=twice, shuffle=False, global_batch_size=6))
    with pytest.raises(DataError, match=r"random.partner\(\)"):
        SampleRandom(0, 0, np.arange(3)).partner()
