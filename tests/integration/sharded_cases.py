"""Sessions, one after the other in the same processes, in which sharded runs are compared with others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from conformance import tcp_counters
from integration.checkpoint_reads import restore_own
from integration.recomputed_models import most_bytes, peak_of_tensorflow

from isotrain.core.contracts.state import MODEL_STATE, StateKind
from isotrain.core.data.dataset import DataSet
from isotrain.core.session.session import Session
from isotrain.testing import reference_model
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, next_session
from isotrain.testing.file_exchange import FileExchange

PARALLEL = {"name": "data-parallel"}
ALIKE: tuple[StateKind, ...] = (*MODEL_STATE, "random", "metrics")
"""What such runs have in common: of how they exchange, each keeps its own."""
SAVED = 4
"""Steps after which a run saves: at the end of its first epoch, whose last batch leaves replicas empty."""
BY_NORMS = "adam, by norms"
LAST = "adamw, clipped, accumulated"
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {  # to record takes longest: the last is
    "momentum": {
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "capture": False,
        "epochs": 1,
    },
    BY_NORMS: {
        "optimizer": {"name": "adam", "lr": 0.0625},
        "clip": {"norm": 0.25},
        "capture": False,
        "epochs": 1,
    },
    LAST: {
        "optimizer": {"name": "adamw", "lr": 0.0625, "weight_decay": 0.125},
        "clip": {"global_norm": 0.25},
        "gradient_accumulation_steps": 2,
    },
}
Tried = Mapping[str, Sequence[str]]
"""The kinds of sharded runs that are tried, by optimizer."""
NATIVE = "native"
MEASURED = "measured"
WHOLE = "lamb, recomputed"
OF_MODULES: Mapping[str, Mapping[str, Any]] = {
    **OPTIMIZERS,
    WHOLE: {
        "optimizer": {"name": "lamb", "lr": 0.0625, "weight_decay": 0.125},
        "clip": {"global_norm": 0.25},
        "gradient_accumulation_steps": 2,
        "recompute": ["*"],
    },
}
"""Those, and what looks at all of a weight or computes modules again."""
LAYERS, WIDTH = 8, 64


def native_model() -> Any:
    """Layers of one size, so that buckets and shares are easily told."""
    from torch import nn

    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def native_of_tensorflow(layers: int = LAYERS // 2) -> Any:
    """The like of tf.Modules."""
    import tensorflow as tf

    class Layer(tf.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            drawn = tf.random.stateless_uniform((WIDTH, WIDTH), (seed, 1), -0.25, 0.25, tf.float64)
            self.kernel = tf.Variable(drawn)

        def __call__(self, inputs: Any) -> Any:
            return tf.tanh(inputs @ self.kernel)

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [Layer(place) for place in range(layers)]

        def __call__(self, inputs: Any) -> Any:
            for layer in self.layers:
                inputs = layer(inputs)
            return inputs

    return Net()


IN_ORDER: Mapping[str, Any] = {
    "model_args": {"layers": 2},
    "optimizer": {"name": "sgd", "lr": 0.125},
    "metrics": [],
    "shuffle": False,
    "epochs": 1,
}


def of_tensorflow_by_hand() -> dict[str, Any]:
    """What `native_of_tensorflow` comes to on one replica, by a loop of one's own."""
    import tensorflow as tf

    model, losses = native_of_tensorflow(**IN_ORDER["model_args"]), []
    weights, rate = model.trainable_variables, IN_ORDER["optimizer"]["lr"]
    pairs = [np.split(each, range(7, len(each), 7)) for each in native_batches().train]
    for inputs, targets in zip(*pairs, strict=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(rate * gradient)
        losses.append(float(loss))
    return {"losses": losses, "weights": [weight.numpy() for weight in weights]}


def portable_model() -> Any:
    """The same of Keras."""
    import keras

    layers = [
        keras.layers.Dense(WIDTH, activation="tanh", use_bias=False, name=f"layer{number}")
        for number in range(LAYERS)
    ]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def uneven_model() -> Any:
    """Weights with fewer rows than replicas, or a number that these do not divide."""
    from torch import nn

    ends = nn.Linear(WIDTH, 5), nn.Linear(1, WIDTH)
    return nn.Sequential(
        ends[0], nn.LayerNorm(5), nn.Sequential(nn.Tanh(), nn.Linear(5, 1)), ends[1]
    )


def unusual_model() -> Any:
    """Weights that are read past their modules, from lists, several times, and by what keeps them."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Any, weight: Any) -> Any:
            ctx.save_for_backward(inputs, weight)
            return inputs @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            inputs, weight = ctx.saved_tensors
            return gradient @ weight.T, inputs.flatten(0, 1).T @ gradient.flatten(0, 1)

    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 16, batch_first=True)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.places = nn.Embedding(4, 16, sparse=True)
            self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(16, 4))
            self.tied = nn.Linear(4, 16)
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.25)
            self.listed = [nn.Parameter(torch.eye(16)), nn.Parameter(torch.eye(16))]
            self.one, self.other = self.listed

        def forward(self, inputs: Any) -> Any:
            hidden, _ = self.lstm(inputs.reshape(-1, 4, 16))
            hidden = hidden + self.attention(hidden, hidden, hidden)[0]
            hidden = hidden + self.places(torch.arange(4))
            hidden = checkpoint(self._listed, self.norm(hidden), use_reentrant=False)
            hidden = self.drop(Product.apply(hidden, self.other))
            hidden = self.tied(torch.tanh(hidden @ self.tied.weight) + self.scaled(hidden))
            return (hidden @ self.one.data).flatten(1)

        def _listed(self, hidden: Any) -> Any:
            return torch.tanh(hidden @ self.listed[0].T)

    return Unusual()


UNEVEN: Mapping[str, Any] = {
    "model": {"torch": uneven_model},
    "initial_weights": {"freeze": ["0.bias"]},
}


def native_data() -> DataSet:
    """Vectors, and where they lead."""
    generator = np.random.default_rng(9)
    inputs = generator.normal(size=(22, WIDTH))
    return DataSet((inputs, np.sin(inputs)), (inputs[:5], np.sin(inputs[:5])))


def full_batches() -> DataSet:
    """The conformance kit's, of which all global batches have one size, for which TensorFlow traces once."""
    return DataSet(reference_model.samples(21), reference_model.samples(13))


def native_batches() -> DataSet:
    """The like, of which all global batches have one size, for which TensorFlow traces once."""
    (inputs, targets), evaluated = native_data().train, native_data().validation
    return DataSet((inputs[:21], targets[:21]), evaluated)


def native(**changes: Any) -> dict[str, Any]:
    """The spec of a run of torch's own model and optimizers."""
    return {
        "name": "native",
        "model": {"torch": native_model, "tensorflow": native_of_tensorflow},
        "data": native_data,
        "loss": "mean_squared_error",
        "metrics": ["mean_absolute_error"],
        "optimizer": {"name": "adam", "lr": 0.0625},
        "global_batch_size": 7,
        "epochs": 2,
        "precision": "float64",
        "threads": 1,
        **changes,
    }


def sharded(stage: int, **options: Any) -> dict[str, Any]:
    """The strategy, with buckets so small that there are several."""
    return {"name": "sharded", "options": {"stage": stage, "bucket_megabytes": 2e-4, **options}}


def spec(strategy: Mapping[str, Any], base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Of a run."""
    return {**base, "strategy": strategy, "timeouts": LONG_TIMEOUTS, **changes}


HOST = 2
"""Replicas that count as a host."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    **{f"stage {stage}": sharded(stage) for stage in (1, 2, 3)},
    **{f"hybrid {stage}": sharded(stage, hybrid=True, host_size=HOST) for stage in (1, 2, 3)},
    "few units": sharded(3, hybrid=True, host_size=HOST, bucket_megabytes=8e-3),
}
"""Strategies; the hybrid ones of several hosts where there are more replicas than one has."""


def compared(
    base: Mapping[str, Any], tried: Tried, recomputed: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Specs of runs with some optimizers: one data-parallel, others of some kinds.

    Args:
        base: What all have.
        tried: The optimizers, and the kinds.
        recomputed: Optimizers with which sharded runs compute all layers again in the backward pass.
    """
    found = {
        f"{name}: {kind}": spec(strategy, base, **OF_MODULES[name])
        for name, kinds in tried.items()
        for kind, strategy in {"parallel": PARALLEL, **{k: KINDS[k] for k in kinds}}.items()
    }
    for name in recomputed:
        for kind in tried.get(name, ()):
            found[f"{name}: {kind}"]["recompute"] = "*"
    return found


def measured(kinds: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Specs of runs of which it is looked at what they take and send."""
    bucket = {"bucket_megabytes": 8e-6 * WIDTH * WIDTH}
    strategies = {kind: KINDS[kind]["options"] | bucket for kind in kinds}
    return {
        f"{MEASURED}: {kind}": spec({"name": "sharded", "options": options}, native())
        for kind, options in strategies.items()
    }


UNUSUAL = "unusual"
UNUSUAL_NATIVE: Mapping[str, Any] = {"model": {"torch": unusual_model}, **OF_MODULES[WHOLE]}


def unusual() -> dict[str, dict[str, Any]]:
    """The spec of a run that goes on in parts; the last one, as others follow it."""
    return {UNUSUAL: spec(PARALLEL, native(**UNUSUAL_NATIVE))}


def trained_or_passed_on(session: Session, name: str, *, folder: str) -> dict[str, Any]:
    """As `trained`; or of a native model, which goes on in parts and then as a whole again."""
    if name != UNUSUAL:
        return trained(session, name)
    whole, parts = f"{folder}/whole", f"{folder}/parts"
    stopped(session, 2 * SAVED - 2)
    session.save(whole)
    found = {"parallel": trained(session)}
    strategy = KINDS["few units"]
    with next_session(session, "parts", spec(strategy, native(**UNUSUAL_NATIVE))) as session:
        restore_own(session, Path(whole))
        session.save(parts)
        found["in parts"] = trained(session)
    with next_session(session, "whole", spec(PARALLEL, native(**UNUSUAL_NATIVE))) as session:
        found["whole again"] = gone_on(session, folder=parts)
    return found


def of_native(name: str, kinds: Sequence[str], **changes: Any) -> dict[str, dict[str, Any]]:
    """Specs of runs of native models, whose weights are so many that little else is kept or travels."""
    base = native(data=native_batches, epochs=1, **changes)
    strategies = {"parallel": PARALLEL, **{kind: KINDS[kind] for kind in kinds}}
    return {f"{name}: {kind}": spec(strategy, base) for kind, strategy in strategies.items()}


def trained(session: Session, name: str = "") -> dict[str, Any]:
    """Trains to the end.

    TensorFlow does not evaluate: it would trace that in each session, and has all weights in each process.
    """
    losses, metrics = [], []
    for batch in session.batches():
        losses.append(float(session.step(batch)))
        if batch.is_last_of_epoch:
            metrics.append(session.metrics())
    evaluation = session.evaluate() if session.plan.framework != "tensorflow" else {}
    weights = session.read_state(("trainable", "non-trainable"))
    described = session.group.describe_state(("optimizer",))
    parts = {n: info.nbytes for n, info in described.items() if info.offset is not None}
    counted = {}
    if name.startswith(NATIVE):
        session.seek(0)
        counted = _sent(session, 3 if name.endswith("stage 3") else 6)
        counted["held"] = _described(session, ("trainable",))
        counted["names"] = sorted(session.group.describe_state(("trainable", "optimizer")))
        if name.endswith("stage 3") and session.plan.framework == "torch":
            counted |= _taken(session)
    return {
        **counted,
        "losses": losses,
        "metrics": metrics,
        "evaluation": evaluation,
        "weights": weights,
        "parts": parts,
        "keeps gradients": session.group.keep_gradients(),
        "slots": sum(info.nbytes for info in described.values() if info.shape),
    }


def passed_on(
    session: Session,
    base: Mapping[str, Any],
    folder: str,
    kind: str,
    measures: bool,
) -> dict[str, Any]:
    """Saves in the middle under each strategy, and goes on from there; a whole one is but restored.

    What it has then is what it had when it saved: from there on it is a run like any other.

    Args:
        session: Of a data-parallel run.
        base: Of the specs.
        folder: With a folder of checkpoints for each strategy.
        kind: Of the sharded runs.
        measures: Whether to look besides what a TensorFlow process of a run in stage 3 takes.
    """
    changes = OPTIMIZERS[LAST]
    found = {"parallel": _saved(session, f"{folder}/parallel")}
    with next_session(session, "sharded", spec(KINDS[kind], base, **changes)) as session:
        found["sharded"] = _saved(session, f"{folder}/sharded")
        found["parallel to sharded"] = gone_on(session, folder=f"{folder}/parallel")
        found["sharded to sharded"] = gone_on(session, folder=f"{folder}/sharded")
    with next_session(session, "parallel", spec(PARALLEL, base, **changes)) as session:
        restore_own(session, Path(f"{folder}/sharded"))
        found["restored"] = {"steps": session.steps_done, "saved": session.read_state(ALIKE)}
    if measures:
        fields = native(data=native_batches, **IN_ORDER)
        with next_session(session, "modules", spec(KINDS[kind], fields)) as session:
            modules = trained(session)
            found["modules"] = {**modules, "weights": list(modules["weights"].values())}
        found["by hand"] = of_tensorflow_by_hand()
        strategy = sharded(3, bucket_megabytes=8e-6 * WIDE * WIDE)
        with next_session(session, "measured", spec(strategy, native(**PARTED))) as session:
            found["measured"] = _joined_by_layers(session)
    return found


def _saved(session: Session, folder: str) -> dict[str, Any]:
    """Trains to the end, and saves in the middle."""
    stopped(session)
    session.save(folder)
    saved = session.read_state(ALIKE)
    return {"saved": saved, **trained(session)}


def stopped(session: Session, steps: int = SAVED) -> None:
    """Trains for as long as a run does that saves."""
    for batch in session.batches():
        session.step(batch)
        if batch.step + 1 == steps:
            return


def gone_on(session: Session, name: str = "", *, folder: str) -> dict[str, Any]:
    """Goes on from what other processes have saved."""
    restore_own(session, Path(folder))
    return trained(session)


def saved_in_parts(session: Session, fields: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """What a data-parallel run finds; and saves a hybrid one in stage 3, which keeps its port."""
    found = trained(session)
    with next_session(session, "saved", spec(KINDS["hybrid 3"], fields)) as session:
        stopped(session)
        described = session.group.describe_state(("trainable", "optimizer")).items()
        held = {name: [*(info.offset or ()), *(info.shard_shape or ())] for name, info in described}
        session.save(folder)
        session.evaluate()  # brings all weights together, which go again in the next step
        session.save(f"{folder}-whole")
        session.step(next(session.batches()))
    return {"parallel": found, "held": held}


def trained_or_measured(session: Session, name: str) -> dict[str, Any]:
    """As `trained`; or what it takes and sends: sizes of live tensors, bytes on the wire in a step."""
    if name.startswith(MEASURED):
        return {**_memory(session), **_sent(session)}
    return trained(session)


def _memory(session: Session) -> dict[str, Any]:
    """The tensors that live while a step reduces its gradients."""
    import weakref

    from isotrain.strategies import sharded as module

    group, reduce = session.group, module.reduce_bucket
    program: Any = group.trainer  # type: ignore[attr-defined]
    kept: list[Any] = []
    peaks = []

    def noting(replica: Any, gradients: Any, *, static: Any) -> Any:
        waiting = (weight.grad for weight in program.trainable.values())
        held = [*gradients, *(gradient for gradient in waiting if gradient is not None)]
        held += [tensor for reference in kept if (tensor := reference()) is not None]
        peaks.append(_bytes(held))
        results = reduce(replica, gradients, static=static)
        kept.extend(map(weakref.ref, results))
        return results

    module.reduce_bucket = noting
    try:
        session.step(next(session.batches()))
    finally:
        module.reduce_bucket = reduce
    slots = [slot for own in program.optimizer.state.values() for slot in own.values()]
    weights = [*program.trainable.values(), *program.frozen.values()]
    assert session.plan.state_bytes is not None
    return {
        "found": [_bytes(weights), max(peaks), _bytes(slots)],
        "planned": list(asdict(session.plan.state_bytes).values()),
    }


def _bytes(tensors: Sequence[Any]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


WIDE, BRANCHES = 2 * WIDTH, 4


def wide_batches() -> DataSet:
    """Three batches so small that what goes through layers is little beside their weights."""
    inputs = np.random.default_rng(9).normal(size=(12, WIDE))
    return DataSet((inputs, np.sin(inputs)))


def branched_model() -> Any:
    """Some of the layers beside each other."""
    import keras

    outputs = inputs = keras.Input((WIDE,))
    for number in range(0, LAYERS, BRANCHES):
        layers = [
            keras.layers.Dense(WIDE, activation="tanh", use_bias=False, name=f"layer{number + own}")
            for own in range(BRANCHES)
        ]
        outputs = keras.layers.average([layer(outputs) for layer in layers])
    return keras.Model(inputs, outputs)


PARTED: Mapping[str, Any] = {
    "model": branched_model,
    "data": wide_batches,
    "global_batch_size": 4,
    "clip": {"global_norm": 0.25},
    "epochs": 1,
}
"""Layers that are joined one after the other, and gradients that all wait for their norm."""


def _joined_by_layers(session: Session) -> dict[str, Any]:
    """What a TensorFlow process keeps, takes besides and sends in a step; and what layers it serves."""
    from integration import sharded_layers, sharded_modules

    group, state = session.group, session.plan.state_bytes
    assert state is not None
    first, second, _ = session.batches()
    session.step(first)
    found = {
        "held": _described(session, ("trainable", "optimizer")),
        "besides": min(
            peak_of_tensorflow(session, second) for _ in range(3)
        ),  # what is sent may stay
        "planned": [state.weights, state.gradients, state.slots],
        **_sent(session),
        "predicted in parts": group.predict([second.slices[0][0].inputs])[0].numpy(),
    }
    group.unshard_weights()
    found["gathered"] = _described(session, ("trainable",))
    found["predicted"] = group.predict([second.slices[0][0].inputs])[0].numpy()
    name, whole = next(iter(group.read_state(("trainable",)).items()))
    group.write_state({name: whole + 1})
    group.reshard_weights()
    (info,) = [i for n, i in group.describe_state(("trainable",)).items() if n == name]
    rows = slice(info.offset[0], info.offset[0] + info.shard_shape[0])
    found["set"] = group.read_state(("trainable",))[name] - whole[rows]
    if session.rank:
        return found
    return {
        **found,
        "unusual": sharded_layers.unusual(session.spec),
        "refusals": sharded_layers.refusals(session.spec),
        "in bfloat16": sharded_layers.in_bfloat16(session.spec),
        "modules, unusual": sharded_modules.unusual(session.spec),
        "modules, refusals": sharded_modules.refusals(),
    }


def _described(session: Session, kinds: Sequence[StateKind]) -> int:
    return sum(info.nbytes for info in session.group.describe_state(kinds).values())


def trained_and_sent(session: Session, name: str) -> dict[str, Any]:
    """As `trained`; and what another step sends, and what a replica holds of the weights after it."""
    if name == "portable":
        return _portable_in_parts(session)
    found = trained(session)
    session.seek(0)
    return {**found, **_in_parts(session)}


def _portable_in_parts(session: Session) -> dict[str, Any]:
    """What a step sends, what a replica holds when, and what is refused."""
    found = {**_in_parts(session), "between": _placeholders(session)}
    session.evaluate()
    found["evaluated"] = _placeholders(session)
    session.step(next(session.batches()))
    found |= {"again": _placeholders(session), **_taken(session)}
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
    return {**_sent(session), "held": sum(info.nbytes for info in held)}


def _taken(session: Session) -> dict[str, Any]:
    """The most bytes that live in a step, and what the plan says of them."""
    from isotrain.adapters.torch.base.tensors import local_shard

    group: Any = session.group
    batch, sections = next(session.batches()), group.trainer.sections()
    kinds = sections["trainable"], sections["optimizer"]
    held = [local_shard(each) for section in kinds for each in section.read().values()]
    step = partial(session.strategy.step, group, batch, 0.0)
    assert session.plan.state_bytes is not None
    with _met_after_each_exchange(group.communicator):
        taken = most_bytes(step, besides=held)
    return {
        "taken": _bytes(held) + taken,
        "to be taken": session.plan.state_bytes.total,
    }


@contextlib.contextmanager
def _met_after_each_exchange(exchange: Any) -> Iterator[None]:
    """Within it replicas wait until Horovod's own thread, too, has let go what it has exchanged."""

    def met(exchanged: Any) -> Any:
        def exchange_and_meet(*given: Any) -> Any:
            found = exchanged(*given)
            exchange.barrier()
            return found

        return exchange_and_meet

    names = ("all_gather_shards", "reduce_scatter")
    for name in names:
        setattr(exchange, name, met(getattr(exchange, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(exchange, name)


def _placeholders(session: Session) -> int:
    """What the model's own parameters take."""
    program: Any = session.group.trainer  # type: ignore[attr-defined]
    return _bytes(list(program.trainable.values()))


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
        program = ShardedKerasTrainer(session.spec, model)
        try:
            program.shard_weights(SingleReplicaCommunicator(), DeviceMesh({SHARD: 1}), 1)
            program.loss_module(torch.ones(1, 2), torch.ones(1, 2))
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
        program = ShardedNativeTrainer(session.spec, model, torch.device("cpu"))
        try:
            program.shard_weights(SingleReplicaCommunicator(), DeviceMesh({SHARD: 1}), 1)
            program.loss_module(torch.ones(1, 2).double(), torch.ones(1, 2).double())
            program.sharded_weights.free_gathered()
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

    from isotrain.adapters.torch.replica.handle import TorchReplica
    from isotrain.plugin import IsotrainError

    own = torch.full((1, 4), 1.0 - 2.0 * session.rank)
    found = []
    for layer in _choosing():
        program = _taken_apart(session, layer)
        found.append(_said(IsotrainError, partial(program.loss_module, own, own)))
    weights = program.sharded_weights
    replica = TorchReplica(program, session.group.communicator)  # type: ignore[attr-defined]
    (unit, _), gradients = weights.reduction.statics, [torch.ones(4, 4)]
    work = (
        lambda: weights.reduction.reduce(replica, gradients, static=unit),
        lambda: weights.read(1, torch.float32),
    )
    return [*found, _said(IsotrainError, work[session.rank])]


def _taken_apart(session: Session, layer: Any) -> Any:
    """The program of a model of one layer, each of whose weights is joined by itself."""
    import keras

    from isotrain.adapters.torch.sharded.keras import ShardedKerasTrainer
    from isotrain.plugin import SHARD, DeviceMesh

    group: Any = session.group
    program = ShardedKerasTrainer(session.spec, keras.Sequential([keras.Input((4,)), layer]))
    program.shard_weights(group.communicator, DeviceMesh({SHARD: session.replicas}), 1)
    return program


def _departing(session: Session) -> dict[str, Any]:
    """What comes of steps that go as the one before, or otherwise on all replicas, or on one of them."""
    import torch

    from isotrain.adapters.torch.replica.handle import TorchReplica
    from isotrain.plugin import IsotrainError

    layer, one = _choosing()[0], torch.ones(1, 4)
    kernels = [np.arange(16.0).reshape(4, 4) + shift for shift in (0, 1)]
    for dense, kernel in zip((layer.one, layer.other), kernels, strict=True):
        dense.kernel.assign(kernel)
    program = _taken_apart(session, layer)
    weights, replica = program.sharded_weights, TorchReplica(program, session.group.communicator)  # type: ignore[attr-defined]

    def summed(unit: Any) -> float:
        gradients = [weights.local_shards[0].new_full((4, 4), 1.0 + session.rank)]
        (own,) = weights.reduction.reduce(replica, gradients, static=unit)
        return float(own.mean())

    far: list[float] = []
    for place in (0, 0, 1, 1):
        inputs = one * (1 - 2 * place)
        outputs = program.loss_module(inputs, inputs)[1].detach().numpy()
        far += [float(abs(outputs - inputs.numpy() @ kernels[place]).max())]
        far += [summed(unit) - 1.5 for unit in weights.reduction.statics]
    own = one * (1 - 2 * session.rank)
    said = [_said(IsotrainError, partial(program.loss_module, own, own))]
    program.loss_module(-one, -one)
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
    joined: list[Any] = []
    join = weights.read

    def noted(place: int, dtype: Any) -> Any:
        whole = join(place, dtype)
        joined.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    weights.read = noted  # type: ignore[method-assign]
    found = {}
    for name, way in ways.items():
        joined.clear()
        with gather_on_read(weights, variables):
            result = way().sum()
        weights.free_gathered()
        let_go = name == "view" or all(whole.expired() for whole in joined)
        equal = torch.equal(torch.autograd.grad(result, one.value)[0], expected[name][0])
        found[name] = let_go and equal
    return found


def _said(kind: type[Exception], work: Any) -> str:
    try:
        work()
    except kind as error:
        return str(error)
    return ""


def _sent(session: Session, steps: int = 3) -> dict[str, Any]:
    """Bytes that this process sends in a step, in all and to each other."""
    batch, processes = next(session.batches()), len(session.plan.processes)
    board = FileExchange(session.run_directory, session.rank, processes)
    session.barrier()
    before, to_each = tcp_counters.bytes_sent(), tcp_counters.sent_to(board, processes)
    for _ in range(steps):
        session.strategy.step(session.group, batch, 0.0)
    session.group.synchronize_device()
    sent = tcp_counters.bytes_sent() - before
    return {
        "sent": sent / steps,
        "to each": (tcp_counters.sent_to(board, processes) - to_each) / steps,
        "to be sent": session.plan.exchanged_bytes_per_step,
    }
