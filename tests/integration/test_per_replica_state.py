"""State that each replica keeps for itself: `per_replica`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain

pytestmark = pytest.mark.features

BATCH, STEPS = 4, 4
DATA = np.random.default_rng(0).normal(size=(BATCH * STEPS, 3))
PAIRS = (DATA, DATA.sum(1, keepdims=True))
BACKENDS = ("torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")


def portable() -> Any:
    """A recurrent layer whose state is a non-trainable weight, and a batch normalization."""
    import keras

    class Recurrent(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(3, 3), initializer="identity", name="kernel")
            self.hidden = self.add_weight(
                shape=(3,), initializer="zeros", trainable=False, name="hidden"
            )
            super().build(shape)

        def call(self, inputs: Any, training: bool = False) -> Any:
            hidden = keras.ops.tanh(inputs + keras.ops.matmul(self.hidden[None], self.kernel))
            if training:
                self.hidden.assign(keras.ops.mean(keras.ops.stop_gradient(hidden), 0))
            return hidden

    return keras.Sequential(
        [
            keras.Input((3,)),
            Recurrent(name="recurrent"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(1),
        ]
    )


def native() -> Any:
    """The same in torch, whose normalization has `running_*` buffers."""
    import torch
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Parameter(torch.eye(3))
            self.register_buffer("hidden", torch.zeros(3))
            self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(inputs + self.hidden.clone() @ self.kernel)
            if self.training:
                self.hidden.copy_(hidden.detach().mean(0))
            return self.head(self.norm(hidden))

    return Recurrent()


def module() -> Any:
    """A `tf.Module` with a hidden state, a mean and a variance, which its calls update."""
    import tensorflow as tf

    class Recurrent(tf.Module):
        def __init__(self) -> None:
            super().__init__(name="norm")
            dtype = tf.float64
            self.kernel = tf.Variable(tf.eye(3, dtype=dtype), name="kernel")
            self.hidden, self.mean, self.variance = (
                tf.Variable(tf.zeros(3, dtype), trainable=False, name=name)
                for name in ("hidden", "mean", "variance")
            )

        def __call__(self, inputs: Any, training: bool = False) -> Any:
            hidden = tf.tanh(inputs + tf.linalg.matvec(self.kernel, self.hidden.read_value()))
            if training:
                self.hidden.assign(tf.stop_gradient(tf.reduce_mean(hidden, 0)))
                self.mean.assign_add(tf.reduce_mean(inputs, 0))
                self.variance.assign_add(tf.math.reduce_variance(inputs, 0))
            return tf.reduce_sum(hidden, 1, keepdims=True)

    return Recurrent()


def spec(model: Any) -> isotrain.TrainingSpec:
    return isotrain.TrainingSpec(
        model=model,
        data=isotrain.DataSet(PAIRS, PAIRS),
        loss="mean_squared_error",
        optimizer={"name": "sgd", "lr": 0.125},
        precision="float64",
        shuffle=False,
        global_batch_size=BATCH,
        epochs=1,
        threads=1,
        per_replica=["*hidden", "*mean"],
    )


def trained(session: isotrain.Session, folder: Path, is_resumed: bool) -> Any:
    """Losses, and each local replica's non-trainable state at the checkpoint and at the end."""
    if is_resumed:
        session.restore(folder)
    losses, saved = [], states(session)
    for batch in session.batches():
        session.evaluate()
        losses.append(float(session.step(batch)))
        if not is_resumed and session.steps_done == STEPS // 2:
            session.save(folder)
            saved = states(session)
    return losses, saved, states(session)


def states(session: isotrain.Session) -> dict[int, dict[str, np.ndarray]]:
    """Non-trainable state by local replica, under the last two parts of its names."""
    group = session.group
    return {
        replica: {
            ".".join(name.replace("/", ".").split(".")[-2:]): value
            for name, value in group.read_state(("non-trainable",), replica=replica).items()
        }
        for replica in group.local_replicas
    }


def launched(
    model: Any,
    backend: str,
    folder: Path,
    *,
    is_resumed: bool = False,
    replicas: int = 2,
    per_replica: Sequence[str] = ("*hidden", "*mean"),
    on_event: Callable[[Any], None] = lambda event: None,
) -> Any:
    """Losses of rank 0, and the states of all replicas at the checkpoint and at the end."""
    returned = isotrain.launch(
        functools.partial(trained, folder=folder / "saved", is_resumed=is_resumed),
        spec(model).replace(per_replica=per_replica),
        backend=backend,
        replicas=replicas,
        output=folder / f"run-{is_resumed}-{replicas}",
        on_event=on_event,
    )
    saved = {int(r): state for _, each, _ in returned for r, state in each.items()}
    final = {int(r): state for _, _, each in returned for r, state in each.items()}
    return returned[0][0], saved, final


CASES = [
    *((portable, backend) for backend in BACKENDS),
    ({"torch": native}, "torch-ddp"),
    ({"torch": native}, "horovod-torch"),
    ({"tensorflow": module}, "tf-mirrored"),
    ({"tensorflow": module}, "tf-multiworker"),
]


@pytest.mark.parametrize(("model", "backend"), CASES)
def test_replicas_keep_their_own_state(model: Any, backend: str, tmp_path: Path) -> None:
    losses, saved, final = launched(model, backend, tmp_path)
    kept = [n for n in final[0] if n.endswith(("hidden", "mean"))]
    assert len(kept) == 2
    for name, value in final[0].items():
        difference = np.abs(value - final[1][name]).max()
        assert difference > 1e-3 if name in kept else difference == 0, name
    again, restored, final_again = launched(model, backend, tmp_path, is_resumed=True)
    assert again == losses[STEPS // 2 :]
    for replica in (0, 1):
        for name in final[0]:
            np.testing.assert_array_equal(restored[replica][name], saved[replica][name])
            np.testing.assert_array_equal(final_again[replica][name], final[replica][name])


@pytest.mark.parametrize(("model", "backend"), [CASES[0], CASES[1], CASES[5]])
def test_another_number_of_replicas_starts_anew(model: Any, backend: str, tmp_path: Path) -> None:
    _, saved, _ = launched(model, backend, tmp_path)
    events: list[Any] = []
    _, restored, _ = launched(
        model, backend, tmp_path, is_resumed=True, replicas=1, on_event=events.append
    )
    assert "carry state of 2 replicas, now 1 replica" in " ".join(map(str, events))
    for name, value in restored[0].items():
        expected = 0 if name.endswith(("hidden", "mean")) else saved[0][name]
        np.testing.assert_array_equal(value, np.broadcast_to(expected, value.shape), err_msg=name)


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_patterns_may_change_when_a_run_resumes(backend: str, tmp_path: Path) -> None:
    """State that only one of the two specs names begins as replica 0 had it in the checkpoint."""
    _, saved, _ = launched(portable, backend, tmp_path, per_replica=["*hidden", "*mean"])
    _, restored, _ = launched(
        portable, backend, tmp_path, is_resumed=True, per_replica=["*hidden", "*variance"]
    )
    for replica, state in restored.items():
        for name, value in state.items():
            expected = saved[replica if name.endswith("hidden") else 0][name]
            np.testing.assert_array_equal(value, expected, err_msg=name)


def test_plans_name_the_patterns_and_refuse_parts_of_a_model() -> None:
    (note,) = isotrain.plan(spec(portable), backend="torch-ddp", replicas=2).notes
    assert note.startswith("per_replica: each replica keeps *hidden, *mean for itself")
    for strategy in ({"name": "sharded", "options": {"stage": 3}}, "pipeline", "parameter-server"):
        with pytest.raises(isotrain.UnsupportedError, match=r"per_replica: in .* runs"):
            isotrain.plan(spec(portable).with_strategy(strategy), backend="torch-ddp", replicas=2)
