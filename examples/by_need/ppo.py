"""How do I train with several passes over what was played (PPO)?

The loop plays with the present policy, and then makes several steps on the same rows: each a batch by
`session.batch`. The old log-probabilities travel with the targets.

    python examples/by_need/ppo.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

EPISODES, LENGTH, STEPS = 8, 5, 3


PASSES, CLIP = 3, 0.25


def policy() -> Any:
    """Logits of going left and right, for a place on a line."""
    import keras

    return keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
    )


def objective(model: Any, batch: Any) -> Any:
    """Clipped losses of the actions, shape `[rows]` (Schulman et al. 2017)."""
    from keras import ops

    states, (actions, advantages, old) = batch
    log_probabilities = ops.log_softmax(model(states))
    chosen = ops.sum(ops.one_hot(actions, 2, dtype=log_probabilities.dtype) * log_probabilities, -1)
    ratio = ops.exp(chosen - old)
    clipped = ops.clip(ratio, 1 - CLIP, 1 + CLIP)
    return -ops.minimum(ratio * advantages, clipped * advantages)


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


def log_probability(logits: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Log-probabilities of the actions, shape `[rows]`, by logits `[rows, 2]`."""
    chosen: np.ndarray = logits[np.arange(len(actions)), actions]
    return chosen - np.log(np.exp(logits).sum(-1))


def train(session: isotrain.Session) -> None:
    """Plays this process's episodes, then takes several steps on them."""
    episodes = session.local_rows(range(EPISODES))
    while not session.is_done:
        states, actions, returns = play(session.call, session.steps_done, episodes)
        old = log_probability(session.call(states), actions)
        for _ in range(PASSES):
            session.step(session.batch(states, (actions, returns - LENGTH / 4, old)))
        session.save_if_due()  # not between passes: a run that resumes begins by playing


spec = isotrain.TrainingSpec(
    name="ppo",
    model=policy,
    objective=objective,
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=EPISODES * LENGTH,
    steps=STEPS * PASSES,
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
