"""Runs on what people have: generators, torch's and TensorFlow's loaders, Keras' data sets."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param

import isotrain
from isotrain.core.worker.fit import fit
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

SAMPLES = 23
INPUTS = np.random.default_rng(0).standard_normal((SAMPLES, 4)).astype(np.float32)
TARGETS = INPUTS.sum(1, keepdims=True)


def model() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def arrays() -> isotrain.DataSet:
    return isotrain.DataSet((INPUTS, TARGETS), (INPUTS, TARGETS))


def generator() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, SAMPLES, 5):
        yield INPUTS[start : start + 5], TARGETS[start : start + 5]


def tf_dataset() -> isotrain.DataSet:
    import tensorflow as tf

    samples = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(5).prefetch(1)
    return isotrain.DataSet(samples, samples)


def shuffled() -> Any:
    """Shuffles itself, by the seed that isotrain gives TensorFlow; one replica is given its tensors."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).shuffle(SAMPLES).batch(8)


def torch_loader() -> isotrain.DataSet:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    samples = TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))
    own_order = DataLoader(samples, sampler=range(SAMPLES), batch_size=5)
    return isotrain.DataSet(own_order, DataLoader(samples, batch_size=5))


def keras_dataset() -> isotrain.DataSet:
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            rows = slice(5 * index, 5 * index + 5)
            return INPUTS[rows], TARGETS[rows]

    return isotrain.DataSet(Batches(), Batches())


def keras_processes() -> isotrain.DataSet:
    """The same, whose batches are made by processes."""
    batches = keras_dataset().train
    batches.workers, batches.use_multiprocessing = 2, True
    return isotrain.DataSet(batches, batches)


def different() -> Any:
    """A stream that shuffles itself in another way in each process."""

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rows = np.random.default_rng().permutation(SAMPLES)
        yield INPUTS[rows], TARGETS[rows]

    return isotrain.sources.stream(read, SAMPLES)


def endless() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(5).repeat()


def spec(data: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": data,
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.0625},
        "global_batch_size": 8,
        "epochs": 2,
        "shuffle": False,
        "capture": False,  # what reads samples does not know of it
        "device": "cpu",
        "threads": 1,
    }


def trained(data: Any, backend: str, replicas: int, folder: Path, **fields: Any) -> Any:
    return isotrain.run(
        {**spec(data), **fields},
        backend=backend,
        replicas=replicas,
        output=folder,
        on_event=lambda _: None,
    )


CASES = {
    ("torch-ddp", 2): (torch_loader, generator),
    ("tf-mirrored", 2): (tf_dataset,),
    ("tf-multiworker", 2): (tf_dataset, keras_dataset, generator),
    ("torch-ddp", 1): (torch_loader, tf_dataset, keras_dataset, keras_processes),
    ("tf-multiworker", 1): (keras_processes,),
}
FEATURES = ("tf-multiworker", 1)
"""Horovod has no part in reading: each of its processes reads as one of `torch-ddp` or `tf-multiworker`."""


def fitted(session: isotrain.Session, name: str) -> dict[str, Any]:
    metrics = fit(session)
    return {"final loss": session.last_loss, "metrics": metrics}


@functools.cache
def results(backend: str, replicas: int) -> dict[str, dict[str, Any]]:
    """Results of every kind of data, in one run."""
    specs = {data.__name__: spec(data) for data in (arrays, *CASES[backend, replicas])}
    return launched_in_turn(specs, fitted, backend, replicas)[0]


@pytest.mark.parametrize(
    ("backend", "replicas", "kind"),
    [
        param(backend, replicas, data.__name__, features=(backend, replicas) == FEATURES)
        for (backend, replicas), kinds in CASES.items()
        for data in kinds
    ],
)
def test_loaders_give_the_result_of_arrays(backend: str, replicas: int, kind: str) -> None:
    found, expected = (results(backend, replicas)[name] for name in (kind, "arrays"))
    assert found["final loss"] == expected["final loss"]
    assert ("validation_loss" in found["metrics"]) == (kind != "generator")
    if kind != "generator":
        assert found["metrics"] == expected["metrics"]


def test_processes_that_see_other_samples_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(isotrain.IsotrainError, match="do not see the same samples"):
        trained(different, "torch-ddp", 2, tmp_path / "run")


def test_processes_shuffle_a_pipeline_without_seeds_alike(tmp_path: Path) -> None:
    losses = [
        trained(shuffled, "tf-multiworker", replicas, tmp_path / f"{replicas}").final_loss
        for replicas in (1, 2)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_data_set_that_never_ends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(isotrain.IsotrainError, match="never ends"):
        trained(endless, "tf-mirrored", 1, tmp_path / "run")


def test_a_data_set_that_never_ends_is_trained_on_by_epoch_steps(tmp_path: Path) -> None:
    results = [
        trained(endless, backend, replicas, tmp_path / backend, epoch_steps=4, epochs=3)
        for backend, replicas in (("tf-mirrored", 1), ("tf-multiworker", 2))
    ]
    assert [len(result.history.epochs) for result in results] == [3, 3]
    assert [len(result.history.loss) for result in results] == [12, 12]
    assert results[0].final_loss == pytest.approx(results[1].final_loss, rel=1e-6)
