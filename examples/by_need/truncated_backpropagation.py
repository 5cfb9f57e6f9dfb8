"""How do I carry a hidden state over batches (truncated backpropagation through time)?

The state is an input and an output of the model. The loop keeps the rows of its sequences: `session.call`
gives the state after a chunk, without gradient, and the next batch begins with it.

    python examples/by_need/truncated_backpropagation.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

SEQUENCES, CHUNKS, LENGTH, UNITS = 5, 6, 4, 3


def model() -> Any:
    """The next value at each time of a chunk, and the state at its end."""
    import keras

    values, state = keras.Input((LENGTH, 1)), keras.Input((UNITS,))
    cells = keras.layers.SimpleRNN(UNITS, return_sequences=True, return_state=True)
    hidden, last = cells(values, initial_state=[state])
    return keras.Model([values, state], [keras.layers.Dense(1)(hidden), last])


def sequences() -> np.ndarray:
    """Noisy waves, shape `[sequences, times, 1]`."""
    random = np.random.default_rng(0)
    times = np.arange(CHUNKS * LENGTH + 1)
    waves = np.sin(0.5 * times + random.uniform(0, 6, size=(SEQUENCES, 1)))
    return np.expand_dims(waves + 0.125 * random.normal(size=waves.shape), -1)


def objective(model: Any, batch: Any) -> Any:
    """Mean squared errors of the predicted values, shape `[rows]`."""
    from keras import ops

    (values, state), targets = batch
    predicted, _ = model([values, state])
    return ops.mean((predicted - targets) ** 2, (1, 2))


def train(session: isotrain.Session) -> None:
    """Goes through this process's sequences chunk by chunk."""
    waves = sequences()[session.rank :: len(session.plan.processes)]
    state = np.zeros((len(waves), UNITS))
    for start in range(0, CHUNKS * LENGTH, LENGTH):
        values, targets = waves[:, start : start + LENGTH], waves[:, start + 1 : start + LENGTH + 1]
        batch = session.batch((values, state), targets)
        _, state = session.call((values, state))
        session.step(batch)


spec = isotrain.TrainingSpec(
    name="truncated-backpropagation",
    model=model,
    objective=objective,
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=SEQUENCES,
    steps=CHUNKS,
)

if __name__ == "__main__":
    isotrain.launch(train, spec, backend="torch-ddp", replicas=2)
