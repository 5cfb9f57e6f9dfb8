"""What layers carry from step to step and is no weight: in checkpoints, and untouched by trials."""

from __future__ import annotations

import functools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = pytest.mark.features

REPLICAS = 2
LOSSES = [1.1923488133, 1.0431361893, 1.2020399925, 1.0827072326, 1.1117208447, 1.1137764910]
"""Of the portable model on TensorFlow, whose steps, with nothing between them, are Keras' own."""


def carrying() -> Any:
    """A stateful LSTM, and a layer that hides its variable from Keras."""
    import keras

    class Total(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            total = keras.Variable(0.0, trainable=False, name="total", dtype=self.variable_dtype)
            vars(self)["held"] = (total,)
            super().build(shape)

        def call(self, inputs: Any) -> Any:
            (total,) = self.held
            total.assign(total + keras.ops.mean(inputs))
            return inputs * (1 + keras.ops.convert_to_tensor(total))

    inputs = keras.Input((3, 4), batch_size=4)
    hidden = Total(name="total")(keras.layers.LSTM(5, stateful=True, name="lstm")(inputs))
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


def remembering() -> Any:
    """A recurrent cell whose state is a pair in an attribute, and a count that is a number."""
    import torch
    from torch import nn

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(4, 5), nn.Linear(5, 3)
            self.state: Any = None
            self.calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for inputs_now in inputs.unbind(1):
                self.state = self.cell(inputs_now, self.state)
            self.state = tuple(each.detach() for each in self.state)
            self.calls += 1
            return self.head(self.state[0] / self.calls + self.cell(inputs[:, 0])[0])

    return Remembering()


class Bank:
    """An object of no library, in an attribute of a module."""

    def __init__(self) -> None:
        self.sum: Any = 0.0
        self.calls = 0


def noting() -> Any:
    """A module whose state is in NumPy's arrays, numbers and generators, and behind an object."""
    import torch
    from torch import nn

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)
            self.changed, self.replaced = np.zeros(4), np.zeros(4)
            self.number: Any = np.float64(0)
            self.bank, self.counts = Bank(), Counter()
            self.hidden = torch.zeros(())  # a float32, and a float64 from the first call on
            draws = random.Random(3), np.random.default_rng(3), np.random.RandomState(3)
            self.python, self.numpy, self.legacy = draws

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            mean = inputs.detach().mean((0, 1))
            self.changed += mean.numpy()
            self.replaced = self.replaced - mean.numpy()
            self.number = self.number + np.float64(mean.sum().item())
            self.bank.sum = self.bank.sum + mean
            self.bank.calls += 1
            self.counts["calls"] += 1
            self.hidden = self.hidden + mean.sum() / 3
            drawn = self.python.random() + self.numpy.random() + self.legacy.uniform()
            arrays = torch.from_numpy(self.changed - self.replaced / 2) + self.bank.sum
            factor = drawn + float(self.number) + self.hidden / (self.bank.calls + 1)
            return self.head(inputs.mean(1) * (1 + arrays) * (factor + 0.1 * self.counts["calls"]))

    return Noting()


def samples() -> isotrain.DataSet:
    draw = np.random.default_rng(1)
    both = [(draw.standard_normal((n, 3, 4)) + 0.5, np.arange(n) % 3) for n in (24, 8)]
    return isotrain.DataSet(*both)


def middle(targets: Any, predictions: Any) -> Any:
    return predictions.mean(-1) if hasattr(predictions, "mean") else predictions[:, 0]


def spec(model: Any, **changes: Any) -> dict[str, Any]:
    loss = {"name": "sparse_categorical_crossentropy", "from_logits": True}
    return {
        "model": model,
        "data": samples,
        "loss": loss,
        "optimizer": {"name": "sgd", "lr": 0.25, "momentum": 0.5},
        "precision": "float64",
        "global_batch_size": 8,
        "epochs": 2,
        "seed": 3,
        **changes,
    }


def trained(session: isotrain.Session, name: str, *, folder: Path) -> Any:
    """Losses by the case: of steps alone; with trials between them; until saved; after that."""
    kind, _, source = name.partition(" ")
    if kind == "resumed":
        session.restore(folder / source)
    found = []
    for batch in session.batches():
        if kind == "tried":
            session.step_notes()
            session.try_metrics(batch)
        found.append(float(session.step(batch)))
        if kind == "tried":
            session.evaluate()
            session.predict()
        if kind == "saved" and session.steps_done == 3:
            session.save(folder / source)
            break
    return found


def cases(model: Any, source: str, *others: str) -> dict[str, dict[str, Any]]:
    fields = spec(model)
    names = [f"plain {source}", f"saved {source}", f"resumed {source}", *others]
    tried = {f"tried {source}": {**fields, "metrics": [middle]}}
    return {**dict.fromkeys(names, fields), **tried}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses of rank 0, by backend and case."""
    folder = tmp_path_factory.mktemp("carried")
    work = functools.partial(trained, folder=folder)
    on_tf = cases(carrying, "tf")
    portable = cases(carrying, "torch", "resumed tf")
    unrecorded = {"plain unrecorded": spec(carrying, capture=False)}
    native = cases({"torch": remembering}, "native")
    on_torch = portable | unrecorded | native | cases({"torch": noting}, "noting")
    first = launched_in_turn(on_tf, work, "tf-mirrored", REPLICAS)[0]
    return {"tf": first, "torch": launched_in_turn(on_torch, work, "torch-ddp", REPLICAS)[0]}


WHERE = [("tf", "tf"), ("torch", "torch"), ("torch", "native"), ("torch", "noting")]


@pytest.mark.parametrize(("where", "kind"), WHERE)
def test_other_passes_change_no_step(found: dict[str, Any], where: str, kind: str) -> None:
    of = found[where]
    assert of[f"tried {kind}"] == of[f"plain {kind}"]


@pytest.mark.parametrize(("where", "kind"), WHERE)
def test_checkpoints_have_layer_state(found: dict[str, Any], where: str, kind: str) -> None:
    of = found[where]
    assert of[f"saved {kind}"] + of[f"resumed {kind}"] == of[f"plain {kind}"]


def test_frameworks_agree_with_and_without_capture(found: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["tf"]["plain tf"], LOSSES, rtol=1e-6)
    np.testing.assert_allclose(found["torch"]["plain torch"], LOSSES, rtol=1e-6)
    np.testing.assert_allclose(found["torch"]["plain unrecorded"], LOSSES, rtol=1e-6)
    np.testing.assert_allclose(found["torch"]["resumed tf"], LOSSES[3:], rtol=1e-6)
