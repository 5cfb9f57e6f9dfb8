"""How do I carry a hidden state over batches (truncated backpropagation through time)?

The state is an input and an output of the model. `session.predict` gives the state of all sequences after a
chunk, without gradient, and the next batch begins with it. Checkpoints hold it as one of the session's notes.

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
    """Goes through the sequences chunk by chunk; this process trains on its rows."""
    waves = sequences()
    state = np.array(session.notes.get("state", np.zeros((SEQUENCES, UNITS))))
    rows = session.local_rows(range(SEQUENCES))
    while not session.is_done:
        start = session.steps_done * LENGTH
        values, targets = waves[:, start : start + LENGTH], waves[:, start + 1 : start + LENGTH + 1]
        batch = session.batch((values[rows], state[rows]), targets[rows])
        _, state = session.predict(((values, state), targets))
        session.notes["state"] = state.tolist()
        session.step(batch)
        session.save_if_due()


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
