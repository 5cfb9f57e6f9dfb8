"""Against a loop written by hand in JAX, the weights are equal to the bit.

Run as a program, this file is that loop: `python test_native_equality.py START RESULT`, two npz files of
weights by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from isotrain.testing.native_equality import assert_native_equality, trained

SAMPLES, GLOBAL_BATCH, EPOCHS, REPLICAS = 24, 8, 2, 2
RATE, MOMENTUM = 0.125, 0.875

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the run's processes cannot import it


def model() -> Any:
    import keras
    from keras import layers

    convolution = layers.Conv2D(4, 3, activation="relu", name="convolution")
    head = layers.Dense(5, name="head")
    return keras.Sequential([keras.Input((8, 8, 2)), convolution, layers.Flatten(), head])


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(17)
    images = generator.normal(size=(SAMPLES, 8, 8, 2)).astype("float32")
    return images, generator.integers(5, size=SAMPLES)


SPEC: dict[str, Any] = {
    "model": model,
    "data": data,
    "shuffle": False,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "optimizer": {"name": "sgd", "lr": RATE, "momentum": MOMENTUM},
    "global_batch_size": GLOBAL_BATCH,
    "epochs": EPOCHS,
    "threads": 1,
}


def test_native_equality(tmp_path: Path) -> None:
    start_path, result_path = tmp_path / "start.npz", tmp_path / "result.npz"

    def loop(start: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        np.savez(start_path, **start)  # type: ignore[arg-type]
        devices = f"--xla_force_host_platform_device_count={REPLICAS}"
        variables = {
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "NPROC": "1",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {devices}",
        }
        program = [sys.executable, __file__, str(start_path), str(result_path)]
        subprocess.run(program, env={**os.environ, **variables}, check=True)
        with np.load(result_path) as found:
            return dict(found)

    assert_native_equality(trained(SPEC, "jax-mesh", REPLICAS), loop)


def train_by_hand(start: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same training in one process with a device for each replica."""
    import jax
    import keras
    from jax.sharding import Mesh, PartitionSpec

    network, loss = model(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    optimizer.build(network.trainable_variables)

    def step(weights: Any, slots: Any, inputs: Any, targets: Any) -> tuple[Any, Any]:
        def mean_loss(weights: Any) -> Any:
            outputs, _ = network.stateless_call(weights, [], inputs, training=True)
            return loss(targets, outputs)

        gradients = jax.lax.pmean(jax.grad(mean_loss)(weights), "replica")
        trained_weights, new_slots = optimizer.stateless_apply(slots, gradients, weights)
        return trained_weights, new_slots

    equal, each = PartitionSpec(), PartitionSpec("replica")
    mapped = jax.shard_map(
        step,
        mesh=Mesh(jax.devices(), ("replica",)),
        in_specs=(equal, equal, each, each),
        out_specs=equal,
        check_vma=False,
    )
    compiled = jax.jit(mapped)
    weights = [start[variable.path] for variable in network.trainable_variables]
    slots = [variable.value for variable in optimizer.variables]
    inputs, targets = data()
    for _ in range(EPOCHS):
        for first in range(0, SAMPLES, GLOBAL_BATCH):
            rows = slice(first, first + GLOBAL_BATCH)
            weights, slots = compiled(weights, slots, inputs[rows], targets[rows])
    names = [variable.path for variable in network.trainable_variables]
    return dict(zip(names, map(np.asarray, weights), strict=True))


if __name__ == "__main__":
    for unneeded in ("sklearn", "matplotlib"):  # which Keras would import, for a second or more
        sys.modules[unneeded] = None  # type: ignore[assignment]
    with np.load(sys.argv[1]) as given:
        np.savez(sys.argv[2], **train_by_hand(dict(given)))  # type: ignore[arg-type]
