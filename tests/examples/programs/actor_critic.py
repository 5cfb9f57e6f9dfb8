"""An actor and a critic: two updates with clipping and a moving average, on batches of uneven parts."""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

SIZES = (7, 4, 9, 5, 8, 3)
"""Rows of the batch of each step, of which the last replica has two."""


def model() -> Any:
    """A trunk with a policy of 3 actions, and a network of values, of 4 features."""
    import keras

    class Agent(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            hidden = keras.layers.Dense(8, activation="tanh")
            self.policy = keras.Sequential(
                [keras.Input((4,)), hidden, keras.layers.Dense(3)], name="policy"
            )
            self.value = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)],
                name="value",
            )
            self.built = True

    return Agent()


def rows(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States, actions and returns of a step."""
    random, size = np.random.default_rng(step), SIZES[step]
    return random.normal(size=(size, 4)), random.integers(3, size=size), random.normal(size=size)


def critic(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    states, (_, returns) = batch
    return (model.value(states)[:, 0] - returns) ** 2


def actor(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """Policy gradient with advantages that have mean 0 over the global batch, and an entropy bonus."""
    from keras import ops

    states, (actions, returns) = batch
    log_probabilities = ops.log_softmax(model.policy(states))
    one_hot = ops.one_hot(actions, 3, dtype=log_probabilities.dtype)
    advantages = ops.stop_gradient(returns - model.value(states)[:, 0])
    advantages = advantages - step.mean(ops.mean(advantages))
    entropy = -ops.sum(ops.exp(log_probabilities) * log_probabilities, -1)
    return -ops.sum(one_hot * log_probabilities, -1) * advantages - step.values["entropy"] * entropy


def train(session: isotrain.Session) -> None:
    """Steps the critic, then the actor, on the rows of this process."""
    while not session.is_done:
        step = session.steps_done
        states, actions, returns = rows(step)
        bounds = [0, SIZES[step] - 2, SIZES[step]] if session.replicas == 2 else [0, SIZES[step]]
        local = session.group.local_replicas
        part = slice(bounds[local[0]], bounds[local[-1] + 1])
        batch = session.batch(states[part], (actions[part], returns[part]))
        session.step(batch, "critic")
        session.step(batch, "actor", values={"entropy": 0.125 / 2**step})


spec = isotrain.TrainingSpec(
    name="actor-critic",
    model=model,
    updates={
        "critic": {
            "objective": critic,
            "weights": "value/*",
            "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
            "clip": {"global_norm": 0.25},
        },
        "actor": {
            "objective": actor,
            "weights": "policy/*",
            "optimizer": {"name": "sgd", "lr": 0.25, "momentum": 0.75},
            "clip": {"global_norm": 0.125},
        },
    },
    values={"entropy": 0.0},
    ema=0.75,
    global_batch_size=8,
    steps=len(SIZES),
)
