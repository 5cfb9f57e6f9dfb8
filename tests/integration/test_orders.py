"""Orders of the spec on every backend: the same samples and losses for any replicas, and after a resume."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

SAMPLES = 40
LENGTHS = np.random.default_rng(1).choice([4, 8, 12], SAMPLES)
CLASSES = np.arange(SAMPLES) % 5 // 4


def model() -> Any:
    import keras

    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])


def data() -> isotrain.DataSet:
    features = np.random.default_rng(0).standard_normal((SAMPLES, 12))
    return isotrain.DataSet((features, features.sum(1, keepdims=True) + CLASSES[:, None]))


def mixture() -> Any:
    features, targets = data().train
    parts = {"a": (features[:30], targets[:30]), "b": (features[30:], targets[30:])}
    return isotrain.sources.mixture(parts, {"a": 1, "b": 3}, samples=28)


def joined() -> Any:
    features, targets = data().train
    parts = {"a": (features[:30], targets[:30]), "b": (features[30:], targets[30:])}
    return isotrain.sources.joined(parts)


def texts() -> Any:
    random = np.random.default_rng(3)
    samples = [random.integers(9, size=length) for length in LENGTHS]
    return isotrain.sources.MapStyle([(sample[:-1], sample[1:]) for sample in samples])


def text_model() -> Any:
    import keras

    embedding, dense = keras.layers.Embedding(9, 4), keras.layers.Dense(9)
    return keras.Sequential([keras.Input((None,), dtype="int64"), embedding, dense])


def joined_model() -> Any:
    import keras

    inputs = {name: keras.Input((12,), name=f"in_{name}") for name in "ab"}
    dense = keras.layers.Dense(4, name="shared")
    outputs = {name: keras.layers.Dense(1, name=name)(dense(inputs[name])) for name in "ab"}
    return keras.Model(inputs, outputs)


class Drawn:
    """A map-style data set that augments by NumPy's global generator."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        features, targets = data().train
        return features[index] + np.random.normal(0, 0.1, 12), targets[index]


def lengths(columns: Any) -> np.ndarray:
    return LENGTHS


def classes(columns: Any) -> np.ndarray:
    return np.ravel(columns["targets"] > 0)


def easiest_first(seed: int, epoch: int, length: int, columns: Any) -> np.ndarray:
    """A curriculum: the 24 samples with the smallest targets, then all of these in reverse."""
    order = np.argsort(np.ravel(columns["targets"]), kind="stable")[:24]
    return order if epoch % 2 == 0 else order[::-1]


def noisy(inputs: Any, targets: Any, random: Any) -> Any:
    return inputs + random.normal(0.0, 0.1, (12,)), targets


def mixed(inputs: Any, targets: Any, random: Any) -> Any:
    others, other_targets, _ = random.partner()
    return (inputs + others) / 2, (targets + other_targets) / 2


def spec(order: Any, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": data,
        "order": order,
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.0625},
        "global_batch_size": 8,
        "steps": 12,
        "precision": "float64",
        "threads": 1,
        "device": "cpu",
        **fields,
    }


TEXTS_BY_LENGTH = {"name": "by-length", "lengths": "inputs", "tokens": 60}
TOKENS = {"name": "by-length", "lengths": lengths, "buckets": [4, 8, 12], "tokens": 64}
SPECS = {
    "by length, accumulated": spec(
        TOKENS, global_batch_size=16, epoch_steps=4, gradient_accumulation_steps=2
    ),
    "weighted": spec({"name": "weighted", "weights": classes}, transform=noisy),
    "balanced": spec({"name": "balanced", "by": classes}),
    "repeated": spec({"name": "repeated", "times": 4}, transform=noisy),
    "call": spec(easiest_first),
    "padded, accumulated": spec(
        TEXTS_BY_LENGTH,
        data=texts,
        model=text_model,
        loss={
            "name": "sparse_categorical_crossentropy",
            "from_logits": True,
            "ignore_class": -1,
        },
        collate={"pad": {"inputs": 0, "targets": -1}},
        gradient_accumulation_steps=2,
    ),
    "drawn by workers": spec(
        {"name": "repeated", "times": 2}, data=Drawn, transform=mixed, loader={"workers": 2}
    ),
    "partners": spec(None, transform=mixed, shuffle=False),
    "mixture": spec(None, data=mixture),
    "joined": spec(None, data=joined, model=joined_model, loss={"a": "mse", "b": "mse"}),
}


def trained(session: isotrain.Session, name: str) -> list[tuple[int, int, float]]:
    return [stepped(session, batch) for batch in session.batches()]


def stepped(session: isotrain.Session, batch: Any) -> tuple[int, int, float]:
    session.step(batch)
    assert session.last_loss is not None
    return batch.size, batch.epoch, session.last_loss


@functools.cache
def results(backend: str, replicas: int) -> dict[str, Any]:
    specs = {name: SPECS[name] for name in CELLS.get((backend, replicas), SPECS)}
    return launched_in_turn(specs, trained, backend, replicas)[0]


BY_LENGTH = "by length, accumulated"
CELLS = {
    ("torch-ddp", 3): tuple(SPECS),
    ("tf-mirrored", 3): (BY_LENGTH, "padded, accumulated", "partners", "joined", "mixture"),
    ("tf-multiworker", 2): (BY_LENGTH, "weighted", "drawn by workers", "partners", "mixture"),
    ("horovod-torch", 2): (BY_LENGTH, "partners", "mixture"),
    ("horovod-tf", 2): (BY_LENGTH, "partners", "mixture"),
}
"""Orders by backend and replicas: what makes batches is the same on all; sizes, padding and draws are not."""


@pytest.mark.parametrize(
    ("backend", "replicas", "name"),
    [param(*cell, name) for cell, names in CELLS.items() for name in names],
)
def test_steps_are_those_of_one_replica(backend: str, replicas: int, name: str) -> None:
    expected, found = results("torch-ddp", 1)[name], results(backend, replicas)[name]
    assert [step[:2] for step in found] == [step[:2] for step in expected]
    assert [step[2] for step in found] == pytest.approx([step[2] for step in expected], rel=1e-11)


def test_sizes_follow_the_budget_and_epochs_the_steps() -> None:
    steps = results("torch-ddp", 1)[BY_LENGTH]
    assert {size for size, _, _ in steps} >= {5, 8, 9}
    assert [epoch for _, epoch, _ in steps] == [step // 4 for step in range(12)]


def drawn_without_seed(seed: int, epoch: int, length: int, columns: Any) -> np.ndarray:
    return np.random.default_rng().permutation(length)


def test_an_order_that_differs_between_processes_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        isotrain.IsotrainError, match=r"do not see the same samples.*An `order` must not"
    ):
        isotrain.run(
            spec(drawn_without_seed),
            backend="torch-ddp",
            replicas=2,
            output=tmp_path / "run",
            on_event=lambda _: None,
        )


def test_a_resumed_run_continues_within_a_pass(tmp_path: Path) -> None:
    fields = spec(TOKENS, global_batch_size=16, epoch_steps=3, transform=noisy)
    fields["checkpoint"] = {"every_steps": 5}
    losses = []
    for folder, steps, backend, replicas in (
        ("whole", 12, "torch-ddp", 2),
        ("first", 5, "torch-ddp", 2),
        ("rest", 12, "tf-mirrored", 3),
    ):
        result = isotrain.run(
            {**fields, "steps": steps},
            backend=backend,
            replicas=replicas,
            output=tmp_path / folder,
            resume=tmp_path / "first" if folder == "rest" else None,
            on_event=lambda _: None,
        )
        losses.append(result.final_loss)
    assert losses[2] == pytest.approx(losses[0], rel=1e-11)
    assert "order: global batches have 5 to 9 samples" in result.plan["notes"]
    with pytest.raises(isotrain.IsotrainError, match=r"order.tokens: 64 in the checkpoint, 72 now"):
        isotrain.run(
            {**fields, "order": {**TOKENS, "tokens": 72}},
            backend="torch-ddp",
            output=tmp_path / "other",
            resume=tmp_path / "first",
            on_event=lambda _: None,
        )
