"""Models and objectives that differentiate by themselves, and what a plain program makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

LR = 2.0**-4
SAMPLES = np.random.default_rng(7).normal(size=(14, 3)).astype("float32")
TARGETS = np.tanh(SAMPLES[:, ::-1]).copy()
TRAIN, ROWS = 8, [slice(0, 4), slice(4, 8)]


def forces() -> isotrain.DataSet:
    """Two global batches of 4; and 6 samples to evaluate on, in one of 4 and one of 2."""
    return isotrain.DataSet((SAMPLES[:TRAIN], TARGETS[:TRAIN]), (SAMPLES[TRAIN:], TARGETS[TRAIN:]))


def potential() -> Any:
    """Gives the forces of an energy, which is what it learns."""
    import torch
    from torch import nn

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))

        def forward(self, positions: torch.Tensor) -> torch.Tensor:
            positions = positions.detach().requires_grad_()
            energy = self.energy(positions).sum()
            (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
            return -gradient

    return Forces()


def net() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def layers() -> Any:
    import keras

    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )


def penalised(model: Any, batch: Any) -> Any:
    """A loss of each sample: of its predictions, and of their sum's gradient by the inputs."""
    import keras

    inputs, targets = batch
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(inputs)
            predictions = model(inputs)
            total = tf.reduce_sum(predictions)
        gradient = tape.gradient(total, inputs)
    else:
        import torch

        inputs = inputs.detach().requires_grad_()
        predictions = model(inputs)
        (gradient,) = torch.autograd.grad(predictions.sum(), inputs, create_graph=True)
    losses = ((predictions - targets) ** 2 + gradient**2) @ keras.ops.ones((3, 1))
    return losses[:, 0], predictions


def with_forces(model: Any, batch: Any) -> Any:
    """The loss `mse` of the forces."""
    inputs, targets = batch
    predictions = model(inputs)
    return ((predictions - targets) ** 2).mean(1), predictions


def slopes(targets: Any, predictions: Any) -> Any:
    """A metric that differentiates: twice the mean absolute error."""
    if "torch" not in str(type(predictions)):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(predictions)
            total = tf.reduce_sum((predictions - targets) ** 2)
        return tf.reduce_mean(tf.abs(tape.gradient(total, predictions)), 1)
    import torch

    predictions = predictions.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(((predictions - targets) ** 2).sum(), predictions)
    return gradient.abs().mean(1)


COMMON: dict[str, Any] = {
    "data": forces,
    "metrics": ["mean_absolute_error"],
    "optimizer": {"name": "sgd", "lr": LR},
    "global_batch_size": 4,
    "shuffle": False,
    "epochs": 1,
    "threads": 1,
}
NATIVE: dict[str, dict[str, Any]] = {
    "forces": {
        **COMMON,
        "model": {"torch": potential},
        "loss": "mse",
        "metrics": ["mean_absolute_error", slopes],
    },
    "penalty": {**COMMON, "model": {"torch": net}, "objective": penalised},
}
PORTABLE: dict[str, dict[str, Any]] = {
    "recorded": {
        **COMMON,
        "model": layers,
        "objective": penalised,
        "epochs": 3,
        "metrics": ["mean_absolute_error", "r2_score", slopes],  # R2 makes its sums late
    },
    "eager": {
        **COMMON,
        "model": layers,
        "objective": penalised,
        "capture": False,
        "metrics": ["mean_absolute_error", slopes],
    },
}


def worked(session: isotrain.Session, name: str) -> dict[str, Any]:
    """Trains, evaluates and predicts."""
    before = session.read_state(["trainable"])
    for batch in session.batches():
        session.try_metrics(batch)
        session.step(batch)
    plain = None if name in PORTABLE else by_torch(before, name)
    if name == "eager" and session.plan.framework == "torch":
        assert_summed_once(session)
    return {
        "before": before,
        "after": session.read_state(["trainable"]),
        "evaluated": session.evaluate(),
        "predicted": session.predict(),
        "plain": plain,
    }


def by_torch(given: dict[str, np.ndarray], name: str) -> dict[str, Any]:
    """What a plain loop makes of the same weights."""
    import torch

    chosen = NATIVE[name]
    model = chosen["model"]["torch"]()
    model.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in given.items()})
    objective = chosen.get("objective", with_forces)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    inputs, targets = torch.from_numpy(SAMPLES), torch.from_numpy(TARGETS)
    for rows in ROWS:
        optimizer.zero_grad()
        objective(model, (inputs[rows], targets[rows]))[0].mean().backward()
        optimizer.step()
    losses, predictions = objective(model, (inputs[TRAIN:], targets[TRAIN:]))
    error = float((predictions - targets[TRAIN:]).abs().mean())
    return {
        "loss": float(losses.mean()),
        "mean_absolute_error": error,
        "slopes": 2 * error,
        "predicted": predictions.detach().numpy(),
        "after": {key: value.numpy() for key, value in model.state_dict().items()},
    }


def assert_summed_once(session: isotrain.Session) -> None:
    """A portable metric that adds before it differentiates adds once, and its sums keep no graph."""
    import keras
    import torch

    from isotrain.adapters.torch.metrics.keras import KerasMetric

    class Slopes(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="slopes")
            self.count = self.add_variable((), "zeros", name="count")
            self.total = self.add_variable((), "zeros", name="total")

        def update_state(self, targets: Any, predictions: Any, weights: Any = None) -> None:
            self.count.assign_add(1.0)
            slope = torch.autograd.grad((predictions**2).sum(), predictions, create_graph=True)[0]
            self.total.assign_add(slope.sum())

        def result(self) -> Any:
            return self.total / self.count

    metric = Slopes()
    wrapped = KerasMetric(metric)
    predictions = torch.ones(4, 1, requires_grad=True)
    for _ in range(3):
        with torch.no_grad():
            wrapped.update(torch.zeros(4, 1), predictions, 4)
    assert wrapped.named_results() == {"slopes": 8.0}
    assert [float(each.value) for each in metric.variables] == [3.0, 24.0]
    assert all(each.value.grad_fn is None for each in metric.variables)
