"""What a check of strategies is given: one started run, in which every strategy has its turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from isotrain.core.contracts.strategy import Strategy
from isotrain.core.data.batch import Batch
from isotrain.core.data.dataset import DataSet
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.session.session import Session
from isotrain.testing.check_context import batches_in_order
from isotrain.testing.file_exchange import FileExchange
from isotrain.testing.reference.layers import BatchNormalization, Dense
from isotrain.testing.reference.losses_and_metrics import mean_squared_error
from isotrain.testing.reference.network import Branch, Network

RATE = 0.125
WIDTH = 192
IN_NUMPY = 48
"""Its width there, where no bytes are counted."""
SAMPLES = 44
STATE = ("trainable", "statistics")


def build_model() -> Any:
    """A regression with a hidden matrix that is worth compressing, and a batch normalisation."""
    import keras
    from keras import layers

    features = keras.Input((4,), name="features")
    x = layers.Dense(WIDTH, activation="tanh", name="first")(features)
    x = layers.Dense(WIDTH, activation="tanh", name="second")(x)
    outputs = {
        "prediction": layers.Dense(3, name="last")(x),
        "statistics": layers.BatchNormalization(center=False, scale=False)(features),
    }
    return keras.Model({"features": features}, outputs)


def objective(model: Any, batch: Any) -> Any:
    """The mean squared error of each sample."""
    from keras import ops

    inputs, targets = batch
    return ops.mean(ops.square(model(inputs)["prediction"] - targets), axis=-1)


def reference_model() -> Network:
    """The model of `build_model` for the reference backend."""
    first = Dense(4, IN_NUMPY, "tanh", name="first")
    hidden = [first, Dense(IN_NUMPY, IN_NUMPY, "tanh", name="second")]
    return Network(
        {
            "prediction": Branch("features", [*hidden, Dense(IN_NUMPY, 3, name="last")]),
            "statistics": Branch("features", [BatchNormalization(4, 0.99, name="statistics")]),
        }
    )


def reference_objective(network: Network, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The objective with its derivatives, for the reference backend."""
    inputs, targets = batch
    outputs = network(inputs)
    losses, slopes = mean_squared_error(targets, outputs["prediction"])
    return losses, outputs["prediction"], {"prediction": slopes}


def samples() -> tuple[dict[str, np.ndarray], np.ndarray]:
    generator = np.random.default_rng(5)
    features = generator.normal(size=(SAMPLES, 4))
    return {"features": features}, np.sin(features @ generator.normal(size=(4, 3)))


def data() -> DataSet:
    return DataSet(samples(), samples())


def spec(backend: str) -> dict[str, Any]:
    """Plain gradient descent in float64; under one backend a layer is computed again in the backward pass."""
    in_numpy = backend == "reference"
    return {
        "name": "strategies",
        "model": reference_model if in_numpy else build_model,
        "objective": reference_objective if in_numpy else objective,
        "data": data,
        "optimizer": {"name": "sgd", "lr": RATE},
        "global_batch_size": 8,
        "epochs": 1,
        "seed": 3,
        "precision": "float64",
        "threads": 1,
        "timeouts": {"progress": 60.0},
        "recompute": "first" if backend == "horovod-torch" else None,
    }


class StrategyCheckContext:
    """A session whose state can be put back, and strategies to run in it.

    Attributes:
        group: The session's.
        replicas: In the run.
        plan: The session's.
        board: For comparing notes over the processes.
    """

    def __init__(self, session: Session) -> None:
        self.group = session.group
        self.replicas = session.group.replicas
        self.plan = session.plan
        self.board = FileExchange(session.run_directory, session.rank, len(session.plan.processes))
        self._session = session
        self._start = self.board.all_gather(session.read_state())[0]

    @property
    def is_on_the_wire(self) -> bool:
        """Whether what replicas exchange leaves their process."""
        return len(self.plan.processes) == self.replicas > 1

    @property
    def is_traced(self) -> bool:
        """Whether the framework traces or compiles anew for each size of a slice."""
        return self.plan.framework in ("tensorflow", "jax")

    def restart(self) -> None:
        """Puts every replica to the start."""
        self._session.write_state(self._start)

    def batches(self, count: int, size: int) -> list[Batch]:
        """Global batches of `size` from the first `count` samples, in order."""
        inputs, targets = samples()
        first = ({"features": inputs["features"][:count]}, targets[:count])
        return batches_in_order(self.group, first, size)

    def strategy(self, name: str, **options: Any) -> Strategy:
        """A strategy at the start of a run of its own."""
        self.restart()
        made = plugin_manager().strategy(name, options)
        plan = replace(self.plan, strategy=name, strategy_options=options, total_steps=None)
        made.configure(self._session.spec, plan)
        made.started(self.group)
        return made

    def train(self, strategy: Strategy, batches: Sequence[Batch], repeats: int = 1) -> list[float]:
        """Steps on these batches over and over; the losses."""
        losses = []
        for number in range(repeats * len(batches)):
            batch = replace(batches[number % len(batches)], step=number)
            losses.append(float(strategy.step(self.group, batch, RATE)))
        return losses

    def trained(
        self, name: str, batches: Sequence[Batch], repeats: int = 1, **options: Any
    ) -> np.ndarray:
        """The weights and moving statistics of every replica after a whole run."""
        strategy = self.strategy(name, **options)
        self.train(strategy, batches, repeats)
        strategy.finished(self.group)
        return self.weights()

    def weights(self) -> np.ndarray:
        """Weights and moving statistics of every replica now: shape `[replicas, numbers]`."""
        own = [self.group.numpy(v) for v in self.group.compute(read_state)]
        return np.stack(self.board.all_gather_rows(own))

    def evaluation_loss(self, strategy: Strategy) -> float:
        """The loss as the session evaluates it."""
        self.group.collect_metrics("evaluation")
        with strategy.evaluating(self.group):
            for batch in self.batches(SAMPLES, SAMPLES):
                self.group.evaluation_step(batch)
        return self.group.collect_metrics("evaluation")["loss"]


def read_state(replica: Any) -> Any:
    return replica.read(STATE)
