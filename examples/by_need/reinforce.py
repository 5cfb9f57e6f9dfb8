"""How do I train a policy by reinforcement learning (REINFORCE)?

The spec has no data: the loop makes each batch by `session.batch`, of the episodes that this process has
played with `session.call`. The gradient is the mean over the rows of all processes.

    python examples/by_need/reinforce.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

EPISODES, LENGTH, STEPS = 8, 5, 6


def policy() -> Any:
    """Logits of going left and right, for a place on a line."""
    import keras

    return keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
    )


def objective(model: Any, batch: Any) -> Any:
    """Losses of the actions, shape `[rows]`: their log-probabilities times the returns."""
    from keras import ops

    states, (actions, returns) = batch
    log_probabilities = ops.log_softmax(model(states))
    chosen = ops.sum(ops.one_hot(actions, 2, dtype=log_probabilities.dtype) * log_probabilities, -1)
    return -chosen * returns


def play(ask: Any, step: int, episodes: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States `[rows, 2]`, actions `[rows]` and returns `[rows]` of some episodes.

    The walker is rewarded for each step to the right of where it began.
    """
    states, actions, returns = [], [], []
    for episode in episodes:
        random, place = np.random.default_rng([step, episode]), 0.0
        rewards = []
        for time in range(LENGTH):
            states.append([place, time / LENGTH])
            logits = ask(np.array(states[-1:]))[0]
            goes_right = random.random() < 1 / (1 + np.exp(logits[0] - logits[1]))
            place += 0.5 if goes_right else -0.5
            actions.append(int(goes_right))
            rewards.append(float(place > 0))
        returns += [sum(rewards[time:]) for time in range(LENGTH)]
    shape = (-1,)
    return np.reshape(states, (-1, 2)), np.reshape(actions, shape), np.reshape(returns, shape)


def train(session: isotrain.Session) -> None:
    """Plays this process's episodes, and steps on them."""
    episodes = session.local_rows(range(EPISODES))
    while not session.is_done:
        states, actions, returns = play(session.call, session.steps_done, episodes)
        session.step(session.batch(states, (actions, returns)))


spec = isotrain.TrainingSpec(
    name="reinforce",
    model=policy,
    objective=objective,
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=EPISODES * LENGTH,
    steps=STEPS,
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
