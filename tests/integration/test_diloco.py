"""Strategy diloco on gradients that are the same in every step: exact outer steps and rounding errors."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.errors import RunFailedError

RATE = 0.125
INPUTS = np.random.default_rng(3).normal(size=(8, 5))
CHANGE = RATE * INPUTS.mean(0)
"""How far a step moves the weights, whatever they are."""


def model() -> Any:
    from torch import nn

    return nn.Linear(5, 1, bias=False)


def linear(model: Any, batch: Any) -> Any:
    return model(batch[0])[:, 0]


def data() -> Any:
    return INPUTS, np.zeros(8)


def spec(steps: int, **options: Any) -> dict[str, Any]:
    return {
        "model": {"torch": model},
        "data": data,
        "objective": linear,
        "optimizer": {"name": "sgd", "lr": RATE},
        "global_batch_size": 8,
        "steps": steps,
        "precision": "float64",
        "strategy": {"name": "diloco", "options": options},
        "threads": 1,
    }


def took(session: isotrain.Session, steps: int) -> None:
    """Takes so many of the next steps."""
    for batch in itertools.islice(session.batches(), steps):
        session.step(batch)


def moved(steps: int, **options: Any) -> np.ndarray:
    """How far so many steps have moved the weights, shape `[5]`."""
    with isotrain.open_session(spec(steps, **options), backend="torch-ddp", replicas=1) as session:
        before = session.read_state(("trainable",))["weight"].copy()
        for batch in session.batches():
            session.step(batch)
        return np.asarray(before - session.read_state(("trainable",))["weight"])[0]


@pytest.mark.slow
def test_the_outer_optimizer_begins_after_the_synchronous_steps() -> None:
    """Two steps before it count in full, the two of its own by its rate."""
    found = moved(4, every=2, start=2, outer_rate=0.5, outer_momentum=0)
    np.testing.assert_allclose(found, (2 + 0.5 * 2) * CHANGE, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_what_rounding_leaves_is_sent_later(bits: int) -> None:
    """After 40 outer steps as much is missing as one rounding leaves, not 40 of them."""
    found = moved(40, every=1, outer_rate=1.0, outer_momentum=0, bits=bits)
    half_a_digit = 0.5 / (2 ** (bits - 1) - 1)
    largest = 2 * np.abs(CHANGE).max()  # with what was left before
    assert np.abs(found - 40 * CHANGE).max() <= half_a_digit * largest
    assert np.abs(found - 40 * CHANGE).max() > 1e-12


HALF = {"outer_rate": 0.5, "outer_momentum": 0, "mix": 0}
"""Options with which an outer step is half of what the replicas moved, and they go on from there."""


@pytest.mark.parametrize(("before", "step", "after"), [(8, 0, 2), (9, 3, 1)])
def test_exchanges_under_way_are_applied_after_a_seek(before: int, step: int, after: int) -> None:
    """Two local steps after they began, or where the next exchange begins sooner.

    The first four steps and the next two move the outer weights by half of it, 3 in all.
    """
    fields = spec(16, every=4, overlap=2, **HALF)
    with isotrain.open_session(fields, backend="torch-ddp", replicas=1) as session:
        first = session.read_state(("trainable",))["weight"].copy()
        took(session, before)
        session.seek(step)
        took(session, after)
        found = first - session.read_state(("trainable",))["weight"]
    np.testing.assert_allclose(found[0], 3 * CHANGE, rtol=1e-12)


def sought(session: isotrain.Session, before: int, step: int, after: int) -> np.ndarray:
    """This process's weights after steps before and after a seek."""
    took(session, before)
    session.seek(step)
    took(session, after)
    return session.group.read_state(("trainable",))["weight"].copy()


@pytest.mark.features
@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco"])
def test_replicas_are_equal_after_a_seek_to_synchronous_steps(strategy: str, step: int) -> None:
    """Or to the first local one, after two of which they are averaged."""
    fields = spec(20, every=2, start=4)
    fields["optimizer"]["momentum"] = 0.5
    fields["strategy"]["name"] = strategy
    work = partial(sought, before=7, step=step, after=2)
    first, other = isotrain.launch(work, fields, backend="torch-ddp", replicas=2)
    np.testing.assert_array_equal(first, other)


STREAMING = {"every": 4, "fragments": 2, "overlap": 3, "mix": 0.25, "outer_momentum": 0.5}


def trained(folder: Path, replicas: int, **fields: Any) -> isotrain.RunResult:
    """A run whose checkpoint after six steps has exchanges of both fragments under way."""
    policy = {"checkpoint": {"every_steps": 6, "keep_last": None}}
    resume = {"resume": fields.pop("resume")} if "resume" in fields else {}
    given = {**spec(14, **STREAMING), **policy, **fields}
    return isotrain.run(
        given, backend="torch-ddp", replicas=replicas, output=folder, quiet=True, **resume
    )


@pytest.mark.features
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_exchanges_under_way_arrive_at_another_number_of_replicas(
    tmp_path: Path, before: int, after: int
) -> None:
    """The replicas' mean goes on as it was: gradients do not depend on the weights."""
    expected = trained(tmp_path / "whole", before)
    saved = tmp_path / "whole" / "checkpoints" / "step-000000006"
    found = trained(tmp_path / "resumed", after, resume=saved)
    np.testing.assert_allclose(found.weights["weight"], expected.weights["weight"], 1e-12)


@pytest.mark.features
def test_a_checkpoint_of_another_number_of_fragments_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "whole", 1)
    saved = tmp_path / "whole" / "checkpoints" / "step-000000006"
    other = {"name": "diloco", "options": {**STREAMING, "fragments": 4}}
    with pytest.raises(RunFailedError, match="fragments: the checkpoint has 2, the spec 4"):
        trained(tmp_path / "resumed", 1, resume=saved, strategy=other)


@pytest.mark.features
@pytest.mark.parametrize(("saved", "overlap"), [(3, 1), (1, 3)])
def test_exchanges_under_way_are_applied_with_another_overlap(
    tmp_path: Path, saved: int, overlap: int
) -> None:
    """After one more step, by the smaller of both: half of the four before the exchange."""
    options = {"backend": "torch-ddp", "replicas": 1}
    with isotrain.open_session(spec(9, every=4, overlap=saved, **HALF), **options) as session:
        first = session.read_state(("trainable",))["weight"].copy()
        took(session, 4)
        session.save(tmp_path)
    with isotrain.open_session(spec(9, every=4, overlap=overlap, **HALF), **options) as session:
        session.restore(tmp_path)
        took(session, 1)
        found = first - session.read_state(("trainable",))["weight"]
    np.testing.assert_allclose(found[0], 2 * CHANGE, rtol=1e-12)
