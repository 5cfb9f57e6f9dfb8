"""A process's part of a run whose groups are compared with one replica: models, batches, training."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import isotrain
from isotrain.core.contracts.process import from_variables
from isotrain.core.contracts.state import MODEL_STATE, StateKind
from isotrain.core.data.batch import Batch
from isotrain.core.data.dataset import as_dataset
from isotrain.core.data.loader import Loader
from isotrain.testing.check_context import assert_same
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, next_session
from isotrain.testing.file_exchange import FileExchange

RUNS = [("tf-mirrored", 2), ("tf-multiworker", 2)]
STATE: tuple[StateKind, ...] = (*MODEL_STATE, "loss-scale")
Found = dict[str, Any]
Work = Callable[[Any], Found]
Check = Callable[["Run"], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Makes a function one of the checks of every run."""
    CHECKS[function.__name__] = function
    return function


class Run:
    """Part of one process in a run, in which work is done on one group after the other.

    Attributes:
        session: The newest.
        alone: What one replica alone has found, by check and number of the comparison.
    """

    def __init__(self, session: isotrain.Session, alone: dict[str, Found]) -> None:
        self.session = session
        self.alone = alone
        self._check, self._groups, self._compared = "", 0, 0

    def begin(self, check: str) -> None:
        """Says which check is made from here on."""
        self._check, self._compared = check, 0

    def together(self, work: Work, **fields: Any) -> Found:
        """What work finds on a new group of all replicas; it is the same on all, to the bit."""
        self._groups += 1
        with next_session(self.session, str(self._groups), make_spec(**fields)) as session:
            self.session = session
            found, group = work(session.group), session.group
            board = FileExchange(session.run_directory, session.rank, len(session.plan.processes))
            rows = board.all_gather_rows([group.numpy(row) for row in group.compute(whole_state)])
            losses = board.all_gather({n: np.array(v) for n, v in found["losses"].items()})
            found["state"] = group.read_state(STATE)
        for replica, row in enumerate(rows):
            assert_same(row, rows[0], f"state of replica {replica}")
        for rank, own in enumerate(losses):
            assert_same(own, losses[0], f"losses of process {rank}")
        return found

    def assert_as_alone(self, found: Found, work: Work, tolerance: float, **fields: Any) -> None:
        """Compares with what the same work finds on one replica; process 0 does, for all are equal."""
        if self.session.rank > 0:
            return
        self._compared += 1
        name = f"{self._check} {self._compared}"
        if name not in self.alone:
            threads = len(self.session.group.local_replicas)  # of a process, set once
            spec, backend = make_spec(**fields, threads=threads), self.session.plan.backend
            with isotrain.open_session(spec, backend=backend, replicas=1) as alone:
                self.alone[name] = {**work(alone.group), "state": alone.read_state(STATE)}
        expected = self.alone[name]
        assert found.keys() == expected.keys()
        assert found["state"].keys() == expected["state"].keys()
        for kind, values in found.items():
            for part, value in values.items():
                np.testing.assert_allclose(
                    value, expected[kind][part], tolerance, tolerance, err_msg=f"{kind} {part}"
                )


def whole_state(replica: Any) -> Any:
    """A computation: all that the replica has, in one vector."""
    return replica.read(("trainable", "statistics", "momenta"))


def make_spec(**fields: Any) -> dict[str, Any]:
    """A spec of a small regression in float64, with some fields changed."""
    defaults: dict[str, Any] = {
        "model": dense_model,
        "data": regression,
        "loss": "mean_squared_error",
        "metrics": ["mean_absolute_error"],
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "global_batch_size": 8,
        "steps": 5,
        "precision": "float64",
        "threads": 1,
        "timeouts": LONG_TIMEOUTS,
    }
    return defaults | fields


def regression(samples: int = 21, dtype: str = "float64") -> Any:
    generator = np.random.default_rng(7)
    inputs = generator.standard_normal((samples, 4)).astype(dtype)
    return inputs, generator.standard_normal((samples, 3)).astype(dtype)


def tokens(samples: int = 21) -> Any:
    """Few distinct tokens, so that indices occur often in one batch and across replicas."""
    generator = np.random.default_rng(5)
    return (
        generator.integers(0, 3, (samples, 4)).astype("int64"),
        generator.standard_normal((samples, 3)),
    )


def dense_model() -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dense(3),
        ]
    )


def embedding_model() -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((4,), dtype="int64"),
            keras.layers.Embedding(6, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


def any_length_model() -> Any:
    import keras

    inputs = keras.Input((None, 4))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.ops.mean(inputs, axis=1)))


def tensorflow_module() -> Any:
    import tensorflow as tf

    class Affine(tf.Module):
        def __init__(self) -> None:
            super().__init__(name="affine")
            start = np.arange(12.0).reshape(4, 3) / 10
            self.weight = tf.Variable(start, name="weight")
            self.seen = tf.Variable(tf.zeros((), tf.float64), trainable=False, name="seen")

        def __call__(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign_add(tf.reduce_mean(inputs))
            return inputs @ self.weight

    return Affine()


def module_of_its_own() -> Any:
    """A module that is another one in each process, in variables of several types."""
    import tensorflow as tf

    place = from_variables(os.environ)
    assert place is not None
    module, number = tf.Module(), place.rank + 1
    module.weight = tf.Variable(tf.fill([4, 3], tf.constant(number / 3, tf.float64)))
    starts: list[Any] = [np.float32([-0.0, np.nan, 3e38]) / number, number, number == 1, []]
    module.others = [tf.Variable(start, trainable=False) for start in starts]
    module.__class__ = type("Own", (tf.Module,), {"__call__": lambda self, x: x @ self.weight})
    return module


def batches(
    group: Any, samples: Any, global_batch_size: int, gradient_accumulation_steps: int = 1
) -> list[Batch]:
    """The batches of two epochs for the replicas of this process."""
    loader = Loader(
        as_dataset(samples).train,
        global_batch_size=global_batch_size,
        replicas=group.replicas,
        local_replicas=group.local_replicas,
        seed=1,
        drop_remainder=False,
        gradient_accumulation_steps=gradient_accumulation_steps,
        epochs=2,
        to_device=group.to_device,
    )
    return list(loader)


def train(
    group: Any,
    samples: Callable[[], Any],
    global_batch_size: int,
    gradient_accumulation_steps: int = 1,
) -> Found:
    """Trains with a rate that changes; gives losses and metrics."""
    losses = {
        f"step {step}": float(group.synchronous_step(batch, 0.125 if step < 3 else 0.0625))
        for step, batch in enumerate(
            batches(group, samples(), global_batch_size, gradient_accumulation_steps)
        )
    }
    return {"losses": losses, "metrics": group.collect_metrics("train")}
