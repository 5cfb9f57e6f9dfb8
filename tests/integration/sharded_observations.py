"""What a replica of a fully sharded run holds, sends and refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from integration.sharded_cases import trained
from integration.sharded_measurements import bytes_sent, bytes_taken, placeholder_bytes

from isotrain.core.session.session import Session


def trained_and_sent(session: Session, name: str) -> dict[str, Any]:
    """As `trained`; also bytes sent in another step, and bytes of weights held after it."""
    if name == "portable":
        return _portable_in_parts(session)
    found = trained(session)
    session.seek(0)
    return {**found, **_in_parts(session)}


def _portable_in_parts(session: Session) -> dict[str, Any]:
    """What a step sends, what a replica holds when, and what is refused."""
    found = {**_in_parts(session), "between": placeholder_bytes(session)}
    session.evaluate()
    found["evaluated"] = placeholder_bytes(session)
    session.step(next(session.batches()))
    found |= {"again": placeholder_bytes(session), **bytes_taken(session)}
    return {
        **found,
        "refusals": _refusals(session) | _refusals_of_native(session),
        "apart": _apart(session),
        "departing": _departing(session),
        "unusual": _unusual(),
    }


def _in_parts(session: Session) -> dict[str, Any]:
    session.step(next(session.batches()))
    held = session.group.describe_state(("trainable",)).values()
    return {**bytes_sent(session), "held": sum(info.nbytes for info in held)}


def _refusals(session: Session) -> dict[str, str]:
    """What is said of weights that are not taken apart, and of a layer that sets its own as it computes."""
    import keras
    import torch

    from isotrain.adapters.torch.comm.base import SingleReplicaCommunicator
    from isotrain.adapters.torch.sharded.keras import ShardedKerasTrainer
    from isotrain.plugin import SHARD, DeviceMesh, IsotrainError

    class Setting(keras.layers.Dense):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            self.kernel.assign(self.kernel / 2)
            return super().call(inputs)

    class Scaling(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(), name="scale")

    class Functional(keras.layers.Dense):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return torch.func.grad(lambda each: (each @ self.kernel).sum())(inputs)

    made = {
        "constraint": keras.layers.Dense(2, kernel_constraint="non_neg"),
        "number": Scaling(),
        "set": Setting(2),
        "functional": Functional(2),
        "module": keras.layers.TorchModuleWrapper(torch.nn.Linear(2, 2), name="wrapped"),
    }
    found = {}
    for name, layer in made.items():
        model = keras.Sequential([keras.Input((2,)), layer])
        trainer = ShardedKerasTrainer(session.spec, model, {})
        try:
            trainer.shard_weights(SingleReplicaCommunicator(), DeviceMesh({SHARD: 1}), 1)
            trainer.loss_module(torch.ones(1, 2), torch.ones(1, 2))
        except IsotrainError as error:
            found[name] = str(error)
    return found


def _refusals_of_native(session: Session) -> dict[str, str]:
    """What is said of torch's own modules that set their weights, or have them used in ways unseen."""
    import torch
    from torch import nn

    from isotrain.adapters.torch.comm.base import SingleReplicaCommunicator
    from isotrain.adapters.torch.sharded.native import ShardedNativeTrainer
    from isotrain.plugin import SHARD, DeviceMesh, IsotrainError

    class Used(nn.Linear):
        def __init__(self, way: Any) -> None:
            super().__init__(2, 2)
            self.way = way

        def forward(self, inputs: Any) -> Any:
            with torch.no_grad():
                self.way(self.weight)
            return super().forward(inputs)

    def set_data(weight: Any) -> None:
        weight.data = 2 * weight

    def differentiated(weight: Any) -> None:
        torch.func.grad(lambda each: (each @ weight).sum())(torch.ones(1, 2).double())

    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number = nn.Parameter(torch.ones(()))

    models = {
        "native, clamped": Used(lambda weight: weight.clamp_(-1, 1)),
        "native, of data": Used(lambda weight: weight.data.mul_(2)),
        "native, data": Used(set_data),
        "native, functional": Used(differentiated),
        "native, number": Number(),
    }
    found = {}
    for name, model in models.items():
        trainer = ShardedNativeTrainer(session.spec, model, torch.device("cpu"), {})
        try:
            trainer.shard_weights(SingleReplicaCommunicator(), DeviceMesh({SHARD: 1}), 1)
            trainer.loss_module(torch.ones(1, 2).double(), torch.ones(1, 2).double())
            trainer.sharded_weights.free_gathered()
        except IsotrainError as error:
            found[name] = str(error)
    return found


def _choosing() -> list[Any]:
    """Layers that read weights by what they compute with: the one or the other, or only the one."""
    import keras

    class Chosen(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="choice")
            self.one, self.other = (keras.layers.Dense(4, use_bias=False, name=n) for n in "ab")
            self.one.build((None, 4))
            self.other.build((None, 4))

        def call(self, inputs: Any) -> Any:
            chosen = keras.ops.mean(inputs) > 0
            return keras.ops.cond(chosen, lambda: self.one(inputs), lambda: self.other(inputs))

    class Skipped(Chosen):
        def call(self, inputs: Any) -> Any:
            outputs, skipped = self.one(inputs), keras.ops.mean(inputs) > 0
            return keras.ops.cond(skipped, lambda: outputs, lambda: self.other(outputs))

    return [Chosen(), Skipped()]


def _apart(session: Session) -> list[str]:
    """What is said where replicas read other weights of equal size, one reads more, or takes gradients."""
    import torch

    from isotrain.adapters.torch.replica.replica import TorchReplica
    from isotrain.plugin import IsotrainError

    own = torch.full((1, 4), 1.0 - 2.0 * session.rank)
    found = []
    for layer in _choosing():
        trainer = _taken_apart(session, layer)
        found.append(_said(IsotrainError, partial(trainer.loss_module, own, own)))
    weights = trainer.sharded_weights
    replica = TorchReplica(trainer, session.group.communicator)  # type: ignore[attr-defined]
    (unit, _), gradients = weights.reduction.statics, [torch.ones(4, 4)]
    work = (
        lambda: weights.reduction.reduce(replica, gradients, static=unit),
        lambda: weights.read(1, torch.float32),
    )
    return [*found, _said(IsotrainError, work[session.rank])]


def _taken_apart(session: Session, layer: Any) -> Any:
    """Trainer of a model of one layer, each of whose weights is unsharded by itself."""
    import keras

    from isotrain.adapters.torch.sharded.keras import ShardedKerasTrainer
    from isotrain.plugin import SHARD, DeviceMesh

    group: Any = session.group
    trainer = ShardedKerasTrainer(session.spec, keras.Sequential([keras.Input((4,)), layer]), {})
    trainer.shard_weights(group.communicator, DeviceMesh({SHARD: session.replicas}), 1)
    return trainer


def _departing(session: Session) -> dict[str, Any]:
    """What comes of steps that go as the one before, or otherwise on all replicas, or on one of them."""
    import torch

    from isotrain.adapters.torch.replica.replica import TorchReplica
    from isotrain.plugin import IsotrainError

    layer, one = _choosing()[0], torch.ones(1, 4)
    kernels = [np.arange(16.0).reshape(4, 4) + shift for shift in (0, 1)]
    for dense, kernel in zip((layer.one, layer.other), kernels, strict=True):
        dense.kernel.assign(kernel)
    trainer = _taken_apart(session, layer)
    weights, replica = trainer.sharded_weights, TorchReplica(trainer, session.group.communicator)  # type: ignore[attr-defined]

    def summed(unit: Any) -> float:
        gradients = [weights.local_shards[0].new_full((4, 4), 1.0 + session.rank)]
        (own,) = weights.reduction.reduce(replica, gradients, static=unit)
        return float(own.mean())

    far: list[float] = []
    for place in (0, 0, 1, 1):
        inputs = one * (1 - 2 * place)
        outputs = trainer.loss_module(inputs, inputs)[1].detach().numpy()
        far += [float(abs(outputs - inputs.numpy() @ kernels[place]).max())]
        far += [summed(unit) - 1.5 for unit in weights.reduction.statics]
    own = one * (1 - 2 * session.rank)
    said = [_said(IsotrainError, partial(trainer.loss_module, own, own))]
    trainer.loss_module(-one, -one)
    work = (
        lambda: summed(weights.reduction.statics[0]),
        lambda: weights.read(0, torch.float32),
    )
    return {"said": [*said, _said(IsotrainError, work[session.rank])], "far": max(far)}


def _unusual() -> dict[str, bool]:
    """Whether what sees weights in other ways has the gradients of whole ones, and keeps none."""
    import keras
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from isotrain.adapters.torch.comm.base import SingleReplicaCommunicator
    from isotrain.adapters.torch.sharded.keras import gather_on_read
    from isotrain.adapters.torch.sharded.weights import ShardedWeights
    from isotrain.plugin import SHARD, DeviceMesh

    one, other = variables = [
        keras.Variable([[1.0, 2.0], [3.0, 5.0]], dtype="float64") for _ in range(2)
    ]
    parameters = {str(place): each.value for place, each in enumerate(variables)}
    read = keras.ops.convert_to_tensor
    inputs = torch.tensor([[0.25, -1.0], [0.5, 2.0]], dtype=torch.float64, requires_grad=True)

    def of_a_view() -> Any:
        numbers = torch.view_as_complex(read(one))
        return (numbers * numbers.conj()).real

    def twice() -> Any:
        outputs = torch.tanh(torch.tanh(inputs @ read(one)) @ read(other))
        (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return gradient**2

    ways: dict[str, Any] = {
        "view": of_a_view,
        "sparse": lambda: (
            torch.sparse.mm(torch.eye(2, dtype=torch.float64).to_sparse(), read(one)) ** 2
        ),
        "mapped": lambda: keras.ops.vectorized_map(lambda each: each @ read(one), inputs) ** 2,
        "twice": twice,
    }
    expected = {name: torch.autograd.grad(way().sum(), one.value) for name, way in ways.items()}
    weights = ShardedWeights(
        parameters, [[0], [1]], SingleReplicaCommunicator(), DeviceMesh({SHARD: 1})
    )
    unsharded: list[Any] = []
    join = weights.read

    def noted(place: int, dtype: Any) -> Any:
        whole = join(place, dtype)
        unsharded.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    weights.read = noted  # type: ignore[method-assign]
    found = {}
    for name, way in ways.items():
        unsharded.clear()
        with gather_on_read(weights, variables):
            result = way().sum()
        weights.free_gathered()
        let_go = name == "view" or all(whole.expired() for whole in unsharded)
        equal = torch.equal(torch.autograd.grad(result, one.value)[0], expected[name][0])
        found[name] = let_go and equal
    return found


def _said(kind: type[Exception], work: Any) -> str:
    try:
        work()
    except kind as error:
        return str(error)
    return ""
