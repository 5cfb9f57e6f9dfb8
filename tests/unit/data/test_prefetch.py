"""Batches that are prepared in a background thread."""

from __future__ import annotations

import threading
import traceback

import pytest
from unit.data.loaded_batches import facts, loader, noisy

# In the background


def test_the_background_thread_gives_the_same_batches():
    options = {"transform": noisy, "replicas": 3, "gradient_accumulation_steps": 2, "epochs": 3}
    plain = [facts(batch) for batch in loader(50, **options)]
    assert [facts(batch) for batch in loader(50, **options, prefetch=3)] == plain
    assert prefetch_threads() == []


def prefetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "isotrain-prefetch"]


def test_batches_are_prepared_in_one_thread_a_few_ahead():
    made: list[threading.Thread] = []

    def watch(inputs, targets, random):
        made.append(threading.current_thread())
        return inputs, targets

    for number, _ in enumerate(loader(400, transform=watch, prefetch=2)):
        assert len(made) <= number + 1 + 2
    assert [thread.name for thread in set(made)] == ["isotrain-prefetch"]
    assert len(made) == 50


def failing_transform(inputs, targets, random):
    if 13 in targets:
        raise ValueError("bad sample 13")
    return inputs, targets


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_reach_the_consumer_with_their_traceback(prefetch):
    seen = []
    batches = loader(40, transform=failing_transform, shuffle=False, prefetch=prefetch)
    with pytest.raises(ValueError, match="bad sample 13") as caught:
        seen.extend(batch.step for batch in batches)
    assert seen == [0]
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "failing_transform" in names
    assert prefetch_threads() == []


def test_stopping_early_leaves_no_thread():
    for _ in loader(400, transform=noisy, prefetch=2):
        break
    assert prefetch_threads() == []
    batches = iter(loader(400, transform=noisy, prefetch=2))
    next(batches)
    assert len(prefetch_threads()) == 1
    del batches
    assert prefetch_threads() == []


def test_a_failing_consumer_leaves_no_thread():
    def train():
        for _ in loader(400, transform=noisy, prefetch=2):
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        train()
    assert prefetch_threads() == []
