"""Cuts into stages are the best of all that there are, by trying all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotrain.core.pipeline.partition import Partitioner
from isotrain.core.pipeline.profile import Cut, LayerCost, ModelProfile
from isotrain.plugin import PlanError

SECONDS = st.integers(1, 9).map(float)
BYTES = st.integers(0, 40)


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    """Chains and other graphs: with branches, skipped layers, and layers that nobody needs."""
    count = draw(st.integers(1, 5))
    layers = []
    for place in range(count):
        sources = draw(st.sets(st.sampled_from(range(place)), max_size=2)) if place else set()
        seconds = draw(SECONDS), draw(SECONDS)
        layers.append(
            LayerCost(str(place), *seconds, draw(BYTES), draw(BYTES), tuple(sorted(sources)))
        )
    return ModelProfile(layers)


def all_cuts(profile: ModelProfile) -> list[Cut]:
    """Every set of layers that has what each of them needs."""
    places = range(len(profile.layers))
    return [
        cut
        for cut in range(1 << len(profile.layers))
        if all(
            all(cut >> source & 1 for source in profile.layers[place].sources)
            for place in places
            if cut >> place & 1
        )
    ]


def all_pipelines(profile: ModelProfile, before: Cut = 0) -> Iterator[list[Cut]]:
    """Every way to cut a model, by where the stages end."""
    if before == profile.whole:
        yield []
        return
    for cut in all_cuts(profile):
        if cut != before and not before & ~cut:
            for rest in all_pipelines(profile, cut):
                yield [cut, *rest]


def all_shares(workers: int, stages: int) -> Iterator[list[int]]:
    """Every way to give workers to stages, one at least to each."""
    if stages == 1:
        yield [workers]
        return
    for own in range(1, workers - stages + 2):
        for rest in all_shares(workers - own, stages - 1):
            yield [own, *rest]


def slowest(partitioner: Partitioner, cuts: list[Cut], shares: list[int]) -> float:
    """What a pipeline takes for a micro-batch, by the definition: its slowest stage or transfer."""
    stages = zip([0, *cuts[:-1]], cuts, shares, strict=True)
    computing = [partitioner.stage_seconds(*stage) for stage in stages]
    return max([*computing, *(partitioner.transfer_seconds(cut) for cut in cuts[:-1])])


@settings(max_examples=60, deadline=None)
@given(profiles(), st.integers(1, 4), st.sampled_from([1.0, 8.0, 1e9]))
def test_the_best_partition_is_the_fastest(
    profile: ModelProfile, workers: int, bandwidth: float
) -> None:
    """It is compared with all cuts and all replications of the stages, and is as fast as it says."""
    partitioner = Partitioner(profile, bandwidth)
    found = partitioner.best(workers)
    fastest = min(
        slowest(partitioner, cuts, shares)
        for cuts in all_pipelines(profile)
        for shares in all_shares(workers, len(cuts))
    )
    assert found.seconds == pytest.approx(fastest)
    assert found.workers == workers
    names = [layer.name for stage in found.stages for layer in stage.layers]
    assert sorted(names) == [layer.name for layer in profile.layers]
    cuts = list(_ends(found.stages))
    shares = [stage.workers for stage in found.stages]
    assert slowest(partitioner, cuts, shares) == pytest.approx(found.seconds)


def _ends(stages: object) -> Iterator[Cut]:
    cut = 0
    for stage in stages:  # type: ignore[attr-defined]
        for layer in stage.layers:
            cut |= 1 << int(layer.name)
        yield cut


@settings(max_examples=60, deadline=None)
@given(profiles(), st.integers(1, 4))
def test_the_balanced_partition_has_the_fastest_slowest_stage(
    profile: ModelProfile, stages: int
) -> None:
    """Among equals it sends least."""
    if stages > len(profile.layers):
        with pytest.raises(PlanError, match="each needs one"):
            Partitioner(profile, 1.0).balanced(stages)
        return
    found = Partitioner(profile, 1.0).balanced(stages)
    best = min(
        (
            max(map(profile.seconds, [0, *cuts[:-1]], cuts)),
            sum(profile.crossing_bytes(cut) for cut in cuts[:-1]),
        )
        for cuts in all_pipelines(profile)
        if len(cuts) == stages
    )
    sent = sum(stage.sent_bytes for stage in found.stages)
    assert (found.seconds, sent) == best


def chain(*weights: int, activation: int = 8) -> ModelProfile:
    """Layers one after the other, that take equally long."""
    return ModelProfile(
        [
            LayerCost(str(n), 1.0, 2.0, activation, weight, (n - 1,) if n else ())
            for n, weight in enumerate(weights)
        ]
    )


def test_the_seconds_of_a_stage_are_those_of_passes_and_exchange() -> None:
    """Two layers compute 6 seconds; 3 workers exchange 2 * 2 / 3 of 300 bytes; 8 go over a cut twice."""
    profile = chain(100, 200, 1)
    assert Partitioner(profile, bandwidth=50.0).stage_seconds(0, 0b011, 3) == 6 / 3 + 8 / 3
    accumulated = Partitioner(profile, bandwidth=50.0, update=16)
    assert accumulated.stage_seconds(0, 0b011, 3) == 6 / 3 + 8 / 16
    assert accumulated.stage_seconds(0, 0b011, 1) == 6
    assert Partitioner(profile, bandwidth=50.0).transfer_seconds(0b011) == 2 * 8 / 50


def test_the_seconds_of_a_stage_include_loss_and_update() -> None:
    """Three layers compute 9 seconds and the loss 3, shared by workers; updates of 12 are not."""
    layers = [replace(each, update=4.0) for each in chain(0, 0, 0).layers]
    profile = ModelProfile(layers, loss_seconds=3.0)
    partitioner = Partitioner(profile, bandwidth=1.0, update=8)
    assert partitioner.stage_seconds(0, 0b111, 3) == (9 + 3) / 3 + 12 / 8
    assert partitioner.stage_seconds(0, 0b011, 1) == 6 + 8 / 8, "the loss is of the last stage"
    each_updates = Partitioner(profile, bandwidth=1.0)
    assert each_updates.stage_seconds(0b011, 0b111, 2) == (3 + 3) / 2 + 4 / 2


def test_large_weights_are_not_replicated() -> None:
    """As in PipeDream's VGG-16, convolutions are replicated, and large dense layers behind them are not."""
    found = Partitioner(chain(0, 0, 0, 1000), bandwidth=100.0).best(4)
    assert [stage.workers for stage in found.stages] == [3, 1]
    assert [len(stage.layers) for stage in found.stages] == [3, 1]


def test_free_exchange_gives_data_parallelism() -> None:
    """Where an exchange of gradients costs nothing, there is one stage."""
    found = Partitioner(chain(1, 1, 1, 1, activation=800), bandwidth=100.0).best(4)
    assert [stage.workers for stage in found.stages] == [4]


def test_a_skip_connection_crosses_every_cut_it_spans() -> None:
    """The result is sent once, however many layers take it."""
    layers = [
        LayerCost(str(n), 1.0, 1.0, 10 + n, 0, sources)
        for n, sources in enumerate([(), (0,), (0, 1), (0, 2)])
    ]
    profile = ModelProfile(layers)
    assert profile.crossing_bytes(0b0001) == 10
    assert profile.crossing_bytes(0b0011) == 10 + 11
    assert profile.crossing_bytes(0b0111) == 10 + 12


def test_graphs_of_many_branches_are_cut_in_their_order() -> None:
    """They have more cuts than can be enumerated."""
    branches = [LayerCost(str(n), 1.0, 1.0, 1, 1, (0,) if n else ()) for n in range(24)]
    found = Partitioner(ModelProfile(branches), 1e9).balanced(4)
    assert found.seconds == 12.0


def test_layers_out_of_order_are_refused() -> None:
    with pytest.raises(PlanError, match="expected sources with smaller indices"):
        ModelProfile([LayerCost("a", 1.0, 1.0, 1, 1, (1,)), LayerCost("b", 1.0, 1.0, 1, 1)])
