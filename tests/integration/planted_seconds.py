"""Models, losses and updates that move a clock by planted seconds, and the profile of a pipeline of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import numpy as np

import isotrain
from isotrain.core.contracts.state import StateKind

STATE: tuple[StateKind, ...] = ("trainable", "optimizer")
LAYERS = {"first": (8, 1.0, 2.0), "second": (8, 4.0, 8.0), "third": (4, 16.0, 32.0)}
"""Width of each layer, and seconds of its forward and backward pass."""
OF_INPUT = 64.0
"""Seconds for the gradient of a layer's input."""
UNACCUMULATED = 1024.0
"""More seconds of torch's backward passes where there is no gradient to add to."""
LOSS = (128.0, 256.0)
"""Seconds of the loss, forward and backward."""
METRIC, UPDATE = 512.0, 96.0
"""Seconds of a metric and of an update."""
_now = 0.0


def spend(seconds: float) -> None:
    """Moves the clock."""
    global _now
    _now += seconds


def data() -> Any:
    generator = np.random.default_rng(3)
    return generator.standard_normal((8, 6)), generator.standard_normal((8, 4))


def torch_passing(tensor: Any, forward: float, backward: Callable[[], float]) -> Any:
    """The tensor, any shape; both passes take so many seconds."""
    import torch

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, given: Any) -> Any:
            spend(forward)
            return given.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            spend(backward())
            return gradient

    return Passing.apply(tensor)


def tensorflow_passing(tensor: Any, forward: float, backward: Callable[[], float]) -> Any:
    """The same in graphs of TensorFlow."""
    import tensorflow as tf

    def spending(given: Any, seconds: float) -> Any:
        def run(value: Any) -> Any:
            spend(seconds)
            return value

        passed = tf.numpy_function(run, [given], given.dtype)
        passed.set_shape(given.shape)
        return passed

    @tf.custom_gradient
    def both(given: Any) -> Any:
        return spending(given, forward), lambda gradient: spending(gradient, backward())

    return both(tensor)


def torch_model() -> Any:
    from torch import Tensor, nn

    class Planted(nn.Linear):
        def __init__(self, inputs: int, width: int, forward: float, backward: float) -> None:
            super().__init__(inputs, width)
            self.seconds = forward, backward

        def forward(self, inputs: Tensor) -> Any:
            def backward_seconds() -> float:
                return self.seconds[1] + (0 if self.weight.grad is not None else UNACCUMULATED)

            outputs = super().forward(torch_passing(inputs, 0.0, lambda: OF_INPUT))
            return torch_passing(outputs, self.seconds[0], backward_seconds)

    model, width = nn.Sequential(), 6
    for name, (outputs, *seconds) in LAYERS.items():
        model.add_module(name, Planted(width, outputs, *seconds))
        width = outputs
    return model


def tensorflow_model() -> Any:
    import keras

    class Planted(keras.layers.Dense):  # type: ignore[misc]
        def __init__(self, width: int, forward: float, backward: float, name: str) -> None:
            super().__init__(width, name=name)
            self.seconds = forward, backward

        def call(self, inputs: Any, training: bool | None = None) -> Any:
            outputs = super().call(tensorflow_passing(inputs, 0.0, lambda: OF_INPUT))
            return tensorflow_passing(outputs, self.seconds[0], lambda: self.seconds[1])

    layers = [Planted(*facts, name=name) for name, facts in LAYERS.items()]
    return keras.Sequential([keras.Input((6,)), *layers])


def torch_loss(predictions: Any, targets: Any) -> Any:
    predictions = torch_passing(predictions, LOSS[0], lambda: LOSS[1])
    return ((predictions - targets) ** 2).mean(1)


def tensorflow_loss(targets: Any, predictions: Any) -> Any:
    import tensorflow as tf

    predictions = tensorflow_passing(predictions, LOSS[0], lambda: LOSS[1])
    return tf.reduce_mean((predictions - targets) ** 2, 1)


def torch_metric(predictions: Any, targets: Any) -> Any:
    return torch_passing(predictions, METRIC, lambda: 0.0).mean(1)


def tensorflow_metric(targets: Any, predictions: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_mean(tensorflow_passing(predictions, METRIC, lambda: 0.0), 1)


def planted_update(framework: str) -> Any:
    """Context in which each update takes `UPDATE` seconds, too."""
    if framework == "torch":
        from isotrain.adapters.torch.trainer.native import NativeTrainer

        apply = NativeTrainer.apply

        def applying(trainer: NativeTrainer, norm: Any = None) -> None:
            spend(UPDATE)
            apply(trainer, norm)

        return mock.patch.object(NativeTrainer, "apply", applying)
    from isotrain.adapters.tensorflow.trainer.optimizer import WeightUpdate

    apply_shard = WeightUpdate.apply_shard

    def applying_shard(update: WeightUpdate, gradients: Any, norm: Any) -> None:
        first, *others = gradients
        apply_shard(update, [tensorflow_passing(first, UPDATE, lambda: 0.0), *others], norm)

    return mock.patch.object(WeightUpdate, "apply_shard", applying_shard)


def profiled(session: isotrain.Session) -> dict[str, Any]:
    """The profile by the planted clock, and whether weights, slots and metrics stayed as they were."""
    before, batch = session.read_state(STATE), next(session.batches())
    group: Any = session.group
    clock = mock.patch("time.perf_counter", side_effect=lambda: _now)
    with clock, planted_update(session.plan.framework):
        profile = group.profile_layers(batch)
    after = session.read_state(STATE)
    stayed = {name: np.array_equal(value, after[name]) for name, value in before.items()}
    return {
        "layers": [asdict(layer) for layer in profile.layers],
        "loss_seconds": profile.loss_seconds,
        "changed": [name for name, is_equal in stayed.items() if not is_equal],
        "metrics": session.metrics(),
    }
