"""One process of a Horovod world under test; a script that test_horovod_group.py starts."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import psutil

from isotrain.adapters.horovod.adapter import HorovodTF, HorovodTorch
from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.group import ReplicaGroup
from isotrain.core.contracts.plan import Setting
from isotrain.core.contracts.process import ProcessContext, from_variables
from isotrain.core.contracts.replica import Parts, Replica
from isotrain.core.data.batches import Batch, Loader
from isotrain.core.data.sources import as_source
from isotrain.core.errors import IsotrainError
from isotrain.core.spec.training_spec import TrainingSpec

ADAPTERS: dict[str, type[Adapter]] = {a.name: a for a in (HorovodTorch, HorovodTF)}
RATE = 0.0625
STEPS = 4
TIMEOUT_S = 60.0
REFUSED = 9
Results = dict[str, np.ndarray]

# --- what is trained ---------------------------------------------------------------------------


def samples(precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Seventeen samples of five numbers, and one target each."""
    generator = np.random.Generator(np.random.PCG64(3))
    inputs = generator.normal(size=(17, 5))
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    return inputs.astype(precision), targets.astype(precision)


def portable_model(normalised: bool = False) -> Any:
    import keras

    layers = [
        keras.layers.Input((5,)),
        keras.layers.Dense(
            7, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.0078125)
        ),
        *([keras.layers.BatchNormalization()] if normalised else []),
        keras.layers.Dense(1),
    ]
    return keras.Sequential(layers)


def torch_model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def torch_model_of_another_rank() -> Any:
    """Other initial weights on every rank: only the broadcast makes them equal."""
    import torch

    context = from_variables(os.environ)
    assert context is not None
    torch.manual_seed(100 + context.rank)
    return torch_model()


ADAM = {"name": "adam", "lr": RATE, "beta_1": 0.875, "beta_2": 0.9375, "epsilon": 0.0078125}
CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.5}, "global_batch": 6},
    "uneven": {"optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.5}, "global_batch": 7},
    "sparse": {"optimizer": dict(ADAM), "global_batch": 2},
    "clipped": {
        "optimizer": dict(ADAM),
        "global_batch": 7,
        "accumulate": 2,
        "clip": {"global_norm": 0.125},
    },
}


def make_spec(**fields: Any) -> TrainingSpec:
    settled = {
        "model": portable_model,
        "data": samples,
        "loss": "mean_squared_error",
        "steps": STEPS,
    }
    return TrainingSpec(**{"precision": "float64", **settled, **fields})


def uneven(**fields: Any) -> TrainingSpec:
    """Seven samples a step, and three in the last of an epoch."""
    return make_spec(**{**CASES["uneven"], **fields})


def batches(spec: TrainingSpec, group: ReplicaGroup) -> list[Batch]:
    """All batches of a run, for the replicas of this process."""
    assert spec.global_batch is not None
    loader = Loader(
        as_source(samples("float64" if spec.precision == "float64" else "float32")),
        global_batch=spec.global_batch,
        replicas=group.replicas,
        local_replicas=group.local_replicas,
        seed=spec.seed,
        shuffle=True,
        drop_remainder=spec.drop_remainder,
        accumulate=spec.accumulate,
        steps=spec.steps,
        place=group.place,
    )
    return list(loader)


# --- one process of a world --------------------------------------------------------------------


@contextlib.contextmanager
def started(
    backend: str, spec: TrainingSpec, context: ProcessContext, **options: Any
) -> Iterator[ReplicaGroup]:
    timeout = float(os.environ.get("TEST_TIMEOUT_S", TIMEOUT_S))
    setting = Setting("gloo" if context.replicas > 1 else "none", "cpu", 1, options, timeout)
    group = ADAPTERS[backend]().start(spec, setting, context)
    yield group
    group.close()


def work(backend: str, context: ProcessContext) -> Results:
    """Everything one process does; what it saw is returned by name."""
    plain = uneven(optimizer={"name": "sgd", "lr": RATE})
    with sockets_watched() as sockets, started(backend, plain, context) as group:
        results = exchanged_by_strategy(group)
    results["sockets"] = np.array(sorted(sockets), dtype=np.str_)
    if context.replicas > 1:
        results |= collectives(backend, context)
        results |= bit_equality(backend, context)
    if context.replicas > 2:  # uneven slices, and replicas without samples
        results |= initial_weights(backend, context)
        results |= normalised_statistics(backend, context)
    for name, fields in CASES.items() if context.replicas != 2 else ():
        spec = make_spec(**fields)
        with started(backend, spec, context) as group:
            results |= train(name, spec, group)
    return results


def train(name: str, spec: TrainingSpec, group: ReplicaGroup) -> Results:
    losses = [float(group.synchronised_step(batch, RATE)) for batch in batches(spec, group)]
    for batch in batches(spec, group):
        group.evaluation_step(batch)
    return {
        f"{name}/loss": np.array(losses),
        f"{name}/evaluation": np.array(group.collect_metrics("evaluation")["loss"]),
        **{f"{name}/state/{key}": value for key, value in group.read_state().items()},
    }


def rank_values(rank: int, replicas: int) -> np.ndarray:
    """Shape `[2 * replicas, 3]`, other numbers on every rank."""
    return np.arange(6.0 * replicas).reshape(2 * replicas, 3) * (rank + 1) - 10.0 * rank


def gather(replica: Replica, tensor: Any) -> Any:
    return replica.all_gather(tensor)


def send(replica: Replica, tensor: Any, *, static: tuple[int, ...]) -> Any:
    return replica.send_receive(tensor, static)


def share(replica: Replica, tensor: Any, *, static: Parts) -> Any:
    return replica.broadcast_within(tensor, static)


def collectives(backend: str, context: ProcessContext) -> Results:
    rank, replicas = context.rank, context.replicas
    given = rank_values(rank, replicas)
    results: Results = {"given": given}
    with started(backend, uneven(), context) as group:
        value = [group.tensor(given)]
        for op in ("sum", "mean", "max"):
            results[f"all_reduce/{op}"] = group.numpy(group.all_reduce(value, op)[0])
        results["all_gather"] = group.numpy(group.compute(gather, value)[0])
        for shift in range(replicas):
            destinations = tuple((r + shift) % replicas for r in range(replicas))
            received = group.compute(send, value, static=destinations)
            results[f"send_receive/{shift}"] = group.numpy(received[0])
        pair = group.compute(share, value, static=((0, replicas - 1),))
        results["broadcast_within"] = group.numpy(pair[0])
        scalar = [group.tensor(np.array(rank + 1.0))]
        results["all_reduce/scalar"] = group.numpy(group.all_reduce(scalar, "sum")[0])
        results["all_gather/scalar"] = group.numpy(group.compute(gather, scalar)[0])
        results["untouched"] = group.numpy(value[0])
        results |= barrier_holds(group, rank)
    return results


def barrier_holds(group: ReplicaGroup, rank: int) -> Results:
    if rank == 0:
        time.sleep(0.3)
    arrived = time.monotonic()
    group.barrier()
    return {"barrier": np.array([arrived, time.monotonic()])}


def exchanged_by_strategy(group: ReplicaGroup) -> Results:
    """A strategy that averages the gradients itself, then local steps and an average."""
    first, second, third, _ = batches(uneven(), group)
    gradients, loss = group.gradients(first)
    mean = [group.all_reduce([gradient], "mean")[0] for gradient in gradients[0]]
    group.apply([mean], RATE)
    results = {"strategy/loss": np.array(float(loss))}
    trained = group.read_state(["trainable"])
    results |= {f"strategy/state/{name}": value for name, value in trained.items()}
    group.local_step(second, RATE)
    before = group.read_state(["trainable"])
    group.average_parameters()
    after = group.read_state(["trainable"])
    results |= {f"parted/{name}": value for name, value in before.items()}
    results |= {f"averaged/{name}": value for name, value in after.items()}
    results["after_local/loss"] = np.array(float(group.synchronised_step(third, RATE)))
    final = group.read_state(["trainable"])
    return results | {f"after_local/{name}": value for name, value in final.items()}


def normalised_statistics(backend: str, context: ProcessContext) -> Results:
    spec = uneven(model_args={"normalised": True})
    with started(backend, spec, context) as group:
        for batch in batches(spec, group):
            group.synchronised_step(batch, RATE)
        state = group.read_state()
    return {f"normalised/{name}": value for name, value in state.items()}


def initial_weights(backend: str, context: ProcessContext) -> Results:
    """Every rank builds other weights; they must become those of rank 0."""
    with started(backend, uneven(seed=context.rank), context) as group:
        state = group.read_state(["trainable"])
    return {f"initial/{name}": value for name, value in state.items()}


@contextlib.contextmanager
def sockets_watched() -> Iterator[set[str]]:
    """Collects state and own address of every socket that this process has meanwhile."""
    seen: set[str] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            for connection in psutil.Process().net_connections(kind="inet"):
                seen.add(f"{connection.status} {connection.laddr.ip}")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        ended.set()
        watcher.join()


def lose_a_peer(backend: str, context: ProcessContext) -> Results:
    """The last rank is killed amid the steps; the others must meet an error."""
    with started(backend, uneven(), context) as group:
        for batch in batches(uneven(), group):
            if batch.step == 2 and context.rank == context.replicas - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            group.synchronised_step(batch, RATE)
    return {}


# --- the same training, written by hand --------------------------------------------------------


def bit_equality(backend: str, context: ProcessContext) -> Results:
    """Trains by isotrain and by hand; with three replicas the sums need a fixed order."""
    options: dict[str, Any] = {} if context.replicas == 2 else {"groups": 1}
    sgd = {"name": "sgd", "lr": RATE, "momentum": 0.5}
    even = {"precision": "float32", "global_batch": 6, "drop_remainder": True}
    portable = make_spec(optimizer=sgd, **even)
    results = both_ways("portable", backend, portable, context, BY_HAND[backend], options)
    if backend == "horovod-tf":
        given = {**options, "compression": "fp16"}
        results |= both_ways("compressed", backend, portable, context, keras_tf_by_hand, given)
    if backend == "horovod-torch":
        native = make_spec(model=torch_model_of_another_rank, optimizer=sgd, **even)
        for compression in ("none", "fp16"):
            given = {**options, "compression": compression}
            name = f"native/{compression}"
            results |= both_ways(name, backend, native, context, torch_by_hand, given)
        if context.replicas == 2:
            with mock.patch("isotrain.adapters.horovod.torch_exchange.OVERLAP_BYTES", 0):
                name = "native/each by itself"
                results |= both_ways(name, backend, native, context, torch_by_hand, {})
    return results


def both_ways(
    name: str,
    backend: str,
    spec: TrainingSpec,
    context: ProcessContext,
    by_hand: Callable[..., list[np.ndarray]],
    options: dict[str, Any],
) -> Results:
    with started(backend, spec, context, **options) as group:
        data = batches(spec, group)
        for batch in data:
            group.synchronised_step(batch, RATE)
        ours = list(group.read_state(["trainable"]).values())
        group.barrier()
        theirs = by_hand(spec, data, **options)
    pairs = zip(ours, theirs, strict=True)
    return {f"bits/{name}/{i}": np.stack(pair) for i, pair in enumerate(pairs)}


def torch_by_hand(
    spec: TrainingSpec, data: list[Batch], compression: str = "none", groups: int | None = None
) -> list[np.ndarray]:
    import horovod.torch as hvd
    import torch

    model = torch_model_of_another_rank()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5),
        named_parameters=model.named_parameters(prefix="by_hand"),
        compression=getattr(hvd.Compression, compression),
        groups=groups,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for batch in data:
        (piece,) = batch.slices[0]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(piece.inputs), piece.targets).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def keras_torch_by_hand(
    spec: TrainingSpec, data: list[Batch], groups: int | None = None
) -> list[np.ndarray]:
    import horovod.torch as hvd
    import keras
    import torch

    from isotrain.adapters import portable

    model = portable.build_model(spec, "torch")
    optimizer = keras.optimizers.SGD(RATE, momentum=0.5)
    weights = [variable.value for variable in model.trainable_variables]
    for batch in data:
        (piece,) = batch.slices[0]
        for weight in weights:
            weight.grad = None
        predictions = model(piece.inputs, training=True)
        loss = keras.losses.MeanSquaredError()(piece.targets, predictions)
        (loss + sum(model.losses)).backward()
        gradients = hvd.grouped_allreduce([w.grad for w in weights], name="by_hand")
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)
    return [weight.detach().numpy() for weight in weights]


def keras_tf_by_hand(
    spec: TrainingSpec, data: list[Batch], compression: str = "none", groups: int | None = None
) -> list[np.ndarray]:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from isotrain.adapters import portable

    model = portable.build_model(spec, "tensorflow")
    optimizer = keras.optimizers.SGD(RATE, momentum=0.5)
    mean_squared_error = keras.losses.MeanSquaredError()

    @tf.function
    def step(inputs: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mean_squared_error(targets, model(inputs, training=True)) + sum(model.losses)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        if compression == "fp16":
            gradients = hvd.grouped_allreduce(gradients, compression=hvd.Compression.fp16)
        else:
            *gradients, loss = hvd.grouped_allreduce([*gradients, loss])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    for batch in data:
        (piece,) = batch.slices[0]
        step(piece.inputs, piece.targets)
    return [variable.numpy() for variable in model.trainable_variables]


BY_HAND = {"horovod-torch": keras_torch_by_hand, "horovod-tf": keras_tf_by_hand}
JOBS = {"work": work, "lose_a_peer": lose_a_peer}


def main() -> int:
    """Does a job; its place comes from the environment. Arguments: backend, job, result file."""
    backend, job, path = sys.argv[1:]
    context = from_variables(os.environ)
    assert context is not None
    try:
        results = JOBS[job](backend, context)
    except IsotrainError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return REFUSED
    np.savez(path, **results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
