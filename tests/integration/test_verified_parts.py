"""A replica that computes other bits than the others is named, and nothing else changes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.reproducible_models import CASES, EVERYTHING
from integration.session_specs import spec

import isotrain
from isotrain.core.session.training import part_shares
from isotrain.testing.consecutive_sessions import launched_in_turn
from isotrain.testing.reference.layers import Dense, Layer
from isotrain.testing.reference.network import Network

FEATURES = pytest.mark.features
VERIFIED = {"verify_every": 2}
BY_SPEED = {"shares": {"every": 2}}
SECONDS = [1.0, 2.0, 4.0, 4.0]
"""Seconds of a part on each rank, by the tests' clock."""

flips = 0.0
"""Number of calls of this process in which the layers below are still to flip a bit."""


def flipped(slope: np.ndarray) -> np.ndarray:
    """A gradient, with another bit in the mantissa of its first number while this process is faulty."""
    global flips
    if flips > 0:
        flips -= 1
        slope = np.array(slope)
        slope.reshape(-1)[:1].view(f"u{slope.itemsize}")[...] ^= 1 << 12
    return slope


class Faulty(Layer):
    """Passes everything on."""

    def forward(self, inputs: Any, training: bool) -> Any:
        return inputs

    def backward(self, slope: Any) -> Any:
        return flipped(slope)


def network() -> Network:
    first = Dense(3, 5, "tanh", name="first")
    return Network([first, Faulty("faulty"), Dense(5, 1, name="last")])


def flipped_by_second(slope: np.ndarray, replica: int) -> np.ndarray:
    """The gradient of a replica, flipped where its number is 1."""
    return flipped(slope) if replica == 1 else slope


def portable() -> Any:
    """A model of Keras on TensorFlow. Of several replicas, the second may be faulty."""
    import keras
    import tensorflow as tf

    @tf.custom_gradient
    def passing(inputs: Any) -> Any:
        def backward(slope: Any) -> Any:
            context = tf.distribute.get_replica_context()
            number = context.replica_id_in_sync_group if context.num_replicas_in_sync > 1 else 1
            found = tf.numpy_function(flipped_by_second, [slope, number], slope.dtype)
            return tf.ensure_shape(found, slope.shape)

        return tf.identity(inputs), backward

    class Passing(keras.layers.Layer):
        """Passes everything on."""

        def call(self, inputs: Any) -> Any:
            return passing(inputs)

    layers = [keras.layers.Dense(5, "tanh"), Passing(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,)), *layers])


def module() -> Any:
    import torch
    from torch import nn

    class Passing(nn.Module):
        """Passes everything on."""

        def forward(self, inputs: Any) -> Any:
            passed = inputs * 1.0
            if passed.requires_grad:
                passed.register_hook(lambda slope: torch.from_numpy(flipped(slope.numpy())))
            return passed

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), Passing(), nn.Linear(5, 1))


CASE: dict[str, Any] = {
    "model": {"numpy": network, "torch": module, "tensorflow": portable},
    "global_batch_size": 6,
    "reproducible": "bits",
    "epochs": 6,
}


def trained(session: isotrain.Session, name: str = "") -> dict[str, Any]:
    """Losses, metrics and state of a run, and the verified samples of each step, by their first."""
    now, losses, firsts = 0.0, [], []
    history: dict[str, list[float]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_shares, "clock", lambda: now)
        for batch in session.batches():
            now += SECONDS[session.rank] * max(map(len, batch.slices))
            firsts.append(None if batch.verified is None else batch.verified.first)
            losses.append(float(session.step(batch)))
            if batch.is_last_of_epoch:
                for each, value in {**session.metrics(), **session.validate()}.items():
                    history.setdefault(each, []).append(value)
    numbers = {each: np.array(values) for each, values in {"losses": losses, **history}.items()}
    return {"verified": firsts, "numbers": numbers | session.read_state()}


def require_same_numbers(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = one["numbers"], other["numbers"]
    assert first.keys() == second.keys()
    assert [n for n in first if first[n].tobytes() != second[n].tobytes()] == []


def require_nothing_found(
    cases: dict[str, dict[str, Any]], backend: str, counts: tuple[int, ...]
) -> None:
    """Compares verified runs of several replicas of different speed with one that is not verified."""
    (alone,) = launched_in_turn(cases, trained, backend, 1)
    verified = {name: case | VERIFIED | BY_SPEED for name, case in cases.items()}
    for replicas in counts:
        for rank in launched_in_turn(verified, trained, backend, replicas):
            for name in cases:
                require_same_numbers(rank[name], alone[name])
                firsts = rank[name]["verified"]
                assert not any(each is not None for each in firsts[1::2])
                assert len({*firsts[::2]}) > 2
                assert None not in firsts[::2]


@pytest.mark.usefixtures("reference")
def test_nothing_is_found_where_all_compute_the_same() -> None:
    case = spec(**CASE, metrics=["mean_absolute_error"], validation_split=0.25)
    require_nothing_found({"plain": case}, "reference", (1, 2, 3, 4))


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.parametrize(
    ("backend", "cases", "counts"),
    [
        ("torch-ddp", (EVERYTHING, CASES["tagger"]), (3,)),
        ("horovod-torch", (EVERYTHING,), (2,)),
        ("tf-mirrored", (CASES["tagger"],), (3,)),
        ("tf-multiworker", (EVERYTHING,), (2,)),
    ],
    ids=["torch-ddp", "horovod-torch", "tf-mirrored", "tf-multiworker"],
)
def test_nothing_is_found_on_real_backends(
    backend: str, cases: Sequence[dict[str, Any]], counts: tuple[int, ...]
) -> None:
    """With batch normalization, dropout by sample, masks, and losses divided by their number of words."""
    few = {str(index): case | {"epochs": 4} for index, case in enumerate(cases)}
    require_nothing_found(few, backend, counts)


def faulty(session: isotrain.Session, step: int, rank: int, calls: float) -> None:
    """Trains, with a faulty rank in one step: in its first calls alone, or in all."""
    global flips
    for batch in session.batches():
        flips = calls * ((session.rank, batch.step) == (rank, step))
        session.step(batch)
        flips = 0.0


def failure(
    folder: Path, backend: str, replicas: int, rank: int, calls: float = math.inf, **options: Any
) -> str:
    """The error of a run in which a rank is faulty in step 4."""
    work = functools.partial(faulty, step=4, rank=rank, calls=calls)
    with pytest.raises(isotrain.RunFailedError) as raised:
        isotrain.launch(
            work,
            spec(**CASE, **VERIFIED, **BY_SPEED),
            backend=backend,
            replicas=replicas,
            output=folder,
            on_event=lambda event: None,
            **options,
        )
    return str(raised.value)


@pytest.mark.parametrize(
    "backend",
    ["reference", pytest.param("torch-ddp", marks=[pytest.mark.slow, FEATURES])],
)
@pytest.mark.usefixtures("reference")
def test_a_faulty_replica_is_named(backend: str, tmp_path: Path) -> None:
    text = failure(tmp_path / "run", backend, 3, rank=1)
    assert text.startswith("rank 1")
    assert "verify_every: step 4: part " in text
    assert " of 8 of the global batch has other bits on rank 1 on " in text
    others = text.split(" than on ")[1]
    assert others.startswith("rank 0 on ")
    assert "rank 2 on " in others.split(". ")[0]


@pytest.mark.slow
@pytest.mark.features
def test_a_faulty_replica_among_those_of_a_process_is_named(tmp_path: Path) -> None:
    text = failure(tmp_path / "run", "tf-mirrored", 3, rank=0)
    assert " of the global batch has other bits on replica 1 of rank 0 on " in text
    assert " than on replicas 0, 2 of rank 0 on " in text


@pytest.mark.features
@pytest.mark.usefixtures("reference")
def test_of_two_replicas_both_are_named(tmp_path: Path) -> None:
    text = failure(tmp_path / "run", "reference", 2, rank=1)
    assert " of the global batch has other bits on rank 1 on " in text
    assert " than on rank 0 on " in text
    assert "More replicas would tell which of them are right." in text


@pytest.mark.features
@pytest.mark.usefixtures("reference")
def test_a_part_that_a_replica_computes_twice_tells_it_apart(tmp_path: Path) -> None:
    """Its own parts, which come first, are wrong, and the verified one after them is not."""
    text = failure(tmp_path / "run", "reference", 1, rank=0, calls=6)
    assert "verify_every: step 4: part " in text
    assert "rank 0 on " in text
    assert " has computed it twice, with different bits." in text


def saving(session: isotrain.Session, folder: Path) -> None:
    """Trains to step 3, and saves."""
    for batch in session.batches():
        session.step(batch)
        if session.steps_done == 3:
            session.save(folder)
            return


@pytest.mark.features
@pytest.mark.usefixtures("reference")
def test_a_resumed_run_verifies_the_same_parts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "reference", "on_event": lambda event: None}
    case, folder = spec(**CASE, **VERIFIED), tmp_path / "saved"
    (whole,) = isotrain.launch(trained, case, output=tmp_path / "whole", **options)
    work = functools.partial(saving, folder=folder)
    isotrain.launch(work, case, output=tmp_path / "begun", replicas=2, **options)
    resumed = isotrain.launch(
        trained, case, output=tmp_path / "resumed", replicas=3, resume=folder, **options
    )
    expected = whole["numbers"] | {"losses": whole["numbers"]["losses"][3:]}
    for rank in resumed:
        assert rank["verified"] == whole["verified"][3:]
        require_same_numbers(rank, {"numbers": expected})
    assert "step 4" in failure(tmp_path / "faulty", "reference", 3, rank=1, resume=folder)
