"""What processes of a Horovod run train, by isotrain and by loops written by hand."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from conformance.cases import THREADS

import isotrain
from isotrain.adapters.horovod.tf_adapter import HorovodTF
from isotrain.adapters.horovod.torch_adapter import HorovodTorch
from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.plan import BackendConfig
from isotrain.core.contracts.process import ProcessContext, ProcessInfo
from isotrain.core.errors import IsotrainError
from isotrain.core.launching.processes.ports import Ports
from isotrain.core.spec.loading import load_spec
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, next_session
from isotrain.testing.file_exchange import FileExchange

ADAPTERS: dict[str, type[Adapter]] = {a.name: a for a in (HorovodTorch, HorovodTF)}
RATE = 0.0625
RECORDED = "portable, recorded"
"""Trains by other operations than a loop by hand with Keras: the replay joins some, and the update adds up
in another order."""
Results = dict[str, np.ndarray]


# --- what is trained ---------------------------------------------------------------------------


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Seventeen samples of five numbers, and one target each."""
    inputs = np.random.Generator(np.random.PCG64(3)).normal(size=(17, 5)).astype("float32")
    return inputs, np.sin(inputs.sum(axis=1, keepdims=True))


def portable_model() -> Any:
    import keras

    regularizer = keras.regularizers.L2(0.0078125)
    hidden = keras.layers.Dense(7, activation="tanh", kernel_regularizer=regularizer)
    return keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(1)])


def torch_model() -> Any:
    """Other initial weights on every rank: only the broadcast makes them equal."""
    import torch
    from torch import nn

    torch.manual_seed(100 + os.getpid())
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def model_with_unused_layers() -> Any:
    """A model with one layer that no rank uses, and one that only rank 0 uses."""
    import horovod.torch as hvd
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.rank_0, self.unused = (nn.Linear(5, 1) for _ in range(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = self.used(inputs)
            return outputs + self.rank_0(inputs) if hvd.rank() == 0 else outputs

    return Net()


def tensorflow_module() -> Any:
    """A module with other initial weights on every rank: only the broadcast makes them equal."""
    import tensorflow as tf

    class Linear(tf.Module):
        def __call__(self, inputs: Any) -> Any:
            return inputs @ self.weight

    module: Any = Linear()
    module.weight = tf.Variable(tf.fill([5, 1], 1 / os.getpid()))
    return module


SPEC: dict[str, Any] = {
    "model": portable_model,
    "data": samples,
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": RATE, "momentum": 0.5},
    "global_batch_size": 6,
    "drop_remainder": True,
    "steps": 4,
    "threads": THREADS,
    "timeouts": LONG_TIMEOUTS,
}


# --- the same training, written by hand --------------------------------------------------------


def torch_by_hand(batches: list[Any], compression: str = "none", groups: int | None = None) -> Any:
    import horovod.torch as hvd
    import torch

    model = torch_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5),
        named_parameters=model.named_parameters(prefix="by_hand"),
        compression=getattr(hvd.Compression, compression),
        groups=groups,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for batch in batches:
        (micro_batch,) = batch.slices[0]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(micro_batch.inputs), micro_batch.targets).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def keras_torch_by_hand(batches: list[Any], groups: int | None = None) -> Any:
    import horovod.torch as hvd
    import keras
    import torch

    from isotrain.adapters.keras import model as keras_model

    model = keras_model.build_model(load_spec(SPEC), "torch")
    optimizer = keras.optimizers.SGD(RATE, momentum=0.5)
    weights = [variable.value for variable in model.trainable_variables]
    for batch in batches:
        (micro_batch,) = batch.slices[0]
        for weight in weights:
            weight.grad = None
        predictions = model(micro_batch.inputs, training=True)
        loss = keras.losses.MeanSquaredError()(micro_batch.targets, predictions)
        (loss + sum(model.losses)).backward()
        gradients = hvd.grouped_allreduce([w.grad for w in weights], name="by_hand")
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)
    return [weight.detach().numpy() for weight in weights]


def keras_tf_by_hand(
    batches: list[Any], compression: str = "none", groups: int | None = None
) -> Any:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from isotrain.adapters.keras import model as keras_model

    model = keras_model.build_model(load_spec(SPEC), "tensorflow")
    optimizer = keras.optimizers.SGD(RATE, momentum=0.5)
    mean_squared_error = keras.losses.MeanSquaredError()

    @tf.function(autograph=False)
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

    for batch in batches:
        (micro_batch,) = batch.slices[0]
        step(micro_batch.inputs, micro_batch.targets)
    return [variable.numpy() for variable in model.trainable_variables]


NATIVE = {"model": {"torch": torch_model}}
FP16 = {"compression": "fp16"}
EAGER = {"capture": False}
BESIDE: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any], Callable[..., Any]]]] = {
    "horovod-torch": {
        "portable": (EAGER, {}, keras_torch_by_hand),
        RECORDED: ({}, {}, keras_torch_by_hand),
        "native": (NATIVE, {}, torch_by_hand),
        "native, fp16": (NATIVE, FP16, torch_by_hand),
    },
    "horovod-tf": {
        "portable": ({}, {}, keras_tf_by_hand),
        "portable, fp16": ({}, FP16, keras_tf_by_hand),
    },
}
"""By backend and name: fields of the spec, options of the backend, and the loop by hand."""


# --- what the processes of a run do ------------------------------------------------------------


def work(session: isotrain.Session) -> dict[str, Any]:
    """Everything one process does; what it saw, by name."""
    with sockets_watched() as sockets:
        found: dict[str, Any] = {}
        for name, (fields, options, by_hand) in BESIDE[session.plan.backend].items():
            session = trained_both_ways(session, name, fields, options, by_hand, found)
        if session.replicas == 2 and session.plan.backend == "horovod-torch":
            at_once = mock.patch("isotrain.adapters.horovod.torch_comm.OVERLAP_BYTES", 0)
            session = trained_with_unused_layers(session, "unused", found)
            with at_once:
                session = trained_with_unused_layers(session, "unused, each by itself", found)
            found["sent"] = {}
            for model in ("native", RECORDED):
                fields, options, by_hand = BESIDE["horovod-torch"][model]
                name = f"{model}, each by itself"
                with at_once, sends_noted() as found["sent"][model]:
                    session = trained_both_ways(session, name, fields, options, by_hand, found)
        if session.plan.backend == "horovod-tf":
            spec = {**SPEC, "model": {"tensorflow": tensorflow_module}}
            with next_session(session, "module", spec) as session:
                found["start"] = next(iter(session.read_state(("trainable",)).values()))
                found["groups"] = [group_lengths(session.group, groups) for groups in (1, 2, 3, 9)]
    found["sockets"] = sorted(sockets)
    if session.replicas == 2 and session.plan.backend == "horovod-torch":
        found["refusals"] = refusals(session)
    return found


def group_lengths(group: Any, groups: int) -> list[int]:
    """Number of gradients in each group that is all-reduced, of six gradients."""
    lengths = []

    def reduce_group(tensors: list[Any], *options: Any) -> list[Any]:
        lengths.append(len(tensors))
        return tensors

    communicator = mock.patch.object(group._communicator, "reduce_group", reduce_group)
    with mock.patch.object(group, "_groups", groups), communicator:
        assert group._all_reduce_in_groups(range(6)) == [*range(6)]
    return lengths


@contextlib.contextmanager
def sends_noted() -> Iterator[list[str]]:
    """Notes what Horovod is given to exchange by itself, in place: gradients, and the loss."""
    import horovod.torch as hvd
    from horovod.torch import optimizer

    noted: list[str] = []

    def noting(kind: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            noted.append(kind)
            return right(*given, **options)

        return call

    gradients = noting("gradient", optimizer.allreduce_async_)
    loss = noting("loss", hvd.allreduce_async_)
    with (
        mock.patch.object(optimizer, "allreduce_async_", gradients),
        mock.patch.object(hvd, "allreduce_async_", loss),
    ):
        yield noted


def trained_both_ways(
    before: isotrain.Session,
    name: str,
    fields: dict[str, Any],
    options: dict[str, Any],
    by_hand: Callable[..., Any],
    found: dict[str, Any],
) -> isotrain.Session:
    """Trains in a new session, and by hand beside it; with three replicas the sums need a fixed order."""
    options = {**options, **({"groups": 1} if before.replicas > 2 else {})}
    spec = {**SPEC, **fields, "backend_options": {before.plan.backend: options}}
    with next_session(before, name, spec) as session:
        batches = list(session.batches())
        losses = [float(session.step(batch)) for batch in batches]
        found.setdefault("losses", {})[name] = losses
        ours = list(session.read_state(("trainable",)).values())
        session.group.barrier()
        theirs = by_hand(batches, **options)
        found[name] = [[a, np.asarray(b)] for a, b in zip(ours, theirs, strict=True)]
    return session


def trained_with_unused_layers(
    before: isotrain.Session, name: str, found: dict[str, Any]
) -> isotrain.Session:
    """Trains a model with unused layers in a new session; finds its weights before and after."""
    spec = {**SPEC, "model": {"torch": model_with_unused_layers}}
    with next_session(before, name, spec) as session:
        first = session.read_state(("trainable",))
        for batch in session.batches():
            session.step(batch)
        found.setdefault("unused", {})[name] = first, session.read_state(("trainable",))
    return session


def refusals(session: isotrain.Session) -> dict[str, str]:
    """What two of three processes say when the other never comes, and one whose port is taken."""
    session.close()
    folder = session.run_directory / "refusals"
    folder.mkdir(exist_ok=True)
    with contextlib.closing(Ports()) as ports:
        shown = FileExchange(folder, session.rank, 2).all_gather(
            {"port": np.array(ports.take(1)[0])}
        )
        port = int(shown[0]["port"])
        found = {"missing": refusal(port, 0 if session.rank == 0 else 2, seconds=3.0)}
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        found["taken"] = refusal(taken, 0, seconds=3.0)
    return {**found, "port": str(taken)}


def refusal(port: int, rank: int, seconds: float) -> str:
    processes = tuple(ProcessInfo(each, "here", each, (each,)) for each in range(3))
    context = ProcessContext(rank, 3, "", processes, (("127.0.0.1", port),) * 3)
    backend_config = BackendConfig("gloo", "cpu", 1, {}, seconds)
    try:
        HorovodTorch().start(load_spec(SPEC), backend_config, context)
    except IsotrainError as error:
        return str(error)
    return "nothing"


@contextlib.contextmanager
def sockets_watched() -> Iterator[set[str]]:
    """Collects state and own address of every internet socket that this process has meanwhile."""
    seen: set[str] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            seen.update(filter(None, map(address_of, os.listdir("/proc/self/fd"))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        ended.set()
        watcher.join()


def address_of(descriptor: str) -> str | None:
    """State and own address of a socket that has a port; None of all else, and of what is closed by now.

    The kernel is asked about this socket alone: its table of all connections takes it 10 ms to read.
    """
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(int(descriptor))) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            address, port, *_ = copy.getsockname()
            listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return f"{'LISTEN' if listens else 'OTHER'} {address}" if port else None
    except OSError:
        return None
