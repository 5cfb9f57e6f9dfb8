"""What the conformance kit does not ask of the Horovod backends: options, ports, bits beside loops by hand.

All that processes do is done in one run of two processes for each backend, and one of three.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conformance.cases import THREADS

import isotrain
from isotrain.adapters.horovod import build_info
from isotrain.adapters.horovod.tf_adapter import HorovodTF
from isotrain.adapters.horovod.torch_adapter import HorovodTorch
from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.plan import BackendConfig
from isotrain.core.contracts.process import Peer, ProcessContext
from isotrain.core.errors import IsotrainError, PlanError, UnsupportedError
from isotrain.core.launching.processes.ports import Ports
from isotrain.core.spec.loading import load_spec
from isotrain.testing.backend import declarations
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, next_session
from isotrain.testing.file_exchange import FileExchange
from isotrain.testing.launching import try_run

ADAPTERS: dict[str, type[Adapter]] = {a.name: a for a in (HorovodTorch, HorovodTF)}
RUNS = [("horovod-torch", 2), ("horovod-torch", 3), ("horovod-tf", 2)]
"""horovod-tf with three: the same Horovod as the one, and the same program as the other."""
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


def tensorflow_module() -> Any:
    """Likewise."""
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
        (piece,) = batch.slices[0]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(piece.inputs), piece.targets).backward()
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
        (piece,) = batch.slices[0]
        step(piece.inputs, piece.targets)
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
    found["sockets"] = sorted(sockets)
    if session.replicas == 2 and session.plan.backend == "horovod-torch":
        found["refusals"] = refusals(session)
    return found


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
    peers = tuple(Peer(each, "here", "127.0.0.1", port, each, (each,)) for each in range(3))
    context = ProcessContext(rank, 3, "", peers)
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


@functools.cache
def ranks(backend: str, replicas: int) -> list[dict[str, Any]]:
    """What every process of a run saw; each run is made once for all tests."""
    run = try_run(work, SPEC, backend, replicas)
    assert run.failure is None, run.failure
    return run.returned


# --- the tests ---------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "replicas"), RUNS)
def test_bit_equal_to_loops_written_by_hand(backend: str, replicas: int) -> None:
    for rank in ranks(backend, replicas):
        names = set(rank) - {"sockets", "refusals", "losses", "sent", "start"}
        assert names >= set(BESIDE[backend])
        for name in names:
            for ours, theirs in rank[name]:
                if name.startswith(RECORDED):
                    assert_near(ours, theirs, name)
                else:
                    assert ours.tobytes() == theirs.tobytes(), name
                assert np.isfinite(ours).all()
                assert ours.any()


def assert_near(ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
    """Apart by rounding: each step adds to a weight at most the sums of a slice, each of a few roundings."""
    bound = SPEC["steps"] * SPEC["global_batch_size"] * np.finfo(ours.dtype).eps
    scale = np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound * scale, err_msg=what)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "replicas"), RUNS)
def test_losses_are_equal_on_every_process(backend: str, replicas: int) -> None:
    first, *others = ranks(backend, replicas)
    assert np.isfinite([*first["losses"].values()]).all()
    for other in others:
        assert other["losses"] == first["losses"]


@pytest.mark.kernels
@pytest.mark.slow
def test_the_loss_travels_with_the_last_gradients() -> None:
    """Where each gradient travels as soon as it is there; and it is what it is in one message with all."""
    for rank in ranks("horovod-torch", 2):
        for model, sent in rank["sent"].items():
            by_step = "".join(kind[0] for kind in sent).split("l")
            assert by_step[:4] == ["gggg"] * 4
            assert rank["losses"][f"{model}, each by itself"] == rank["losses"][model]


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("backend", ADAPTERS)
def test_native_weights_start_as_those_of_rank_0_and_stay_equal(backend: str) -> None:
    first, *others = ranks(backend, 2)
    for name in BESIDE[backend]:
        for other in others:
            for (own, _), (theirs, _) in zip(first[name], other[name], strict=True):
                assert own.tobytes() == theirs.tobytes(), name
    if backend == "horovod-tf":
        assert first["start"].any()
        assert all((other["start"] == first["start"]).all() for other in others)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "replicas"), RUNS)
def test_compression_rounds(backend: str, replicas: int) -> None:
    found, (*_, compressed) = ranks(backend, replicas)[0], BESIDE[backend]
    exact = found[compressed.removesuffix(", fp16")]
    for (rounded, _), (value, _) in zip(found[compressed], exact, strict=True):
        np.testing.assert_allclose(rounded, value, rtol=0, atol=2e-3)
        assert rounded.tobytes() != value.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "replicas"), RUNS)
def test_only_loopback_is_used(backend: str, replicas: int) -> None:
    found = ranks(backend, replicas)
    for rank in found:
        assert {entry.split()[1] for entry in rank["sockets"]} <= {"127.0.0.1", "::1"}
    assert any(entry.startswith("LISTEN") for entry in found[0]["sockets"])


def look_for_sockets(session: isotrain.Session) -> list[str]:
    with sockets_watched() as sockets:
        for batch in session.batches():
            session.step(batch)
    return sorted(sockets)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ADAPTERS)
def test_one_replica_opens_no_port(backend: str) -> None:
    run = try_run(look_for_sockets, SPEC, backend, 1)
    assert run.returned == [[]], run.failure


@pytest.mark.slow
def test_missing_peer_is_named() -> None:
    first, other = (rank["refusals"]["missing"] for rank in ranks("horovod-torch", 2))
    assert "rank 1 did not come within 3 s" in first
    assert "Rank 2 waited 3 s for rank 0" in other


@pytest.mark.slow
def test_port_in_use_is_named() -> None:
    said = ranks("horovod-torch", 2)[0]["refusals"]
    assert f"Port {said['port']} on 127.0.0.1 is already in use" in said["taken"]


# --- declarations ------------------------------------------------------------------------------


def fake_horovod(folder: Path, built_for: str | None) -> None:
    """A Horovod whose files say that it was built for no framework, or for torch of a version."""
    package = folder / "horovod"
    (package / "torch").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    if built_for is not None:
        (package / "torch" / "mpi_lib_v2.so.so").write_text("no library")
        (package / "metadata.json").write_text(f'{{"pytorch": "{built_for}"}}')


@pytest.mark.parametrize(
    ("built_for", "reason"), [(None, "built without torch"), ("1.0.0", "built for torch 1.0.0")]
)
def test_a_broken_build_is_told_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built_for: str | None, reason: str
) -> None:
    fake_horovod(tmp_path, built_for)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    build_info.installed.cache_clear()
    try:
        found = HorovodTorch().examine().backend
    finally:
        build_info.installed.cache_clear()
    assert not found.available
    assert reason in str(found.reason)
    assert found.hint


@pytest.mark.parametrize("backend", ADAPTERS)
def test_collectives_are_resolved_honestly(backend: str) -> None:
    adapter = ADAPTERS[backend]()
    for requested in (None, "auto", "gloo"):
        assert adapter.resolve_collective(requested, device="cpu", replicas=2) == "gloo"
    for requested, said in (("nccl", "cpu"), ("mpi", "mpi"), ("glo", "Did you mean 'gloo'")):
        with pytest.raises(UnsupportedError, match=said):
            adapter.resolve_collective(requested, device="cpu", replicas=2)
    with pytest.raises(UnsupportedError, match="gpu"):
        adapter.resolve_collective("gloo", device="gpu", replicas=2)


@pytest.mark.parametrize("backend", ADAPTERS)
def test_every_capability_is_declared(backend: str) -> None:
    adapter = ADAPTERS[backend]()
    declarations(adapter)
    assert adapter.availability().available


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compression": "fp8"}, "compression: expected one of none, fp16, received 'fp8'"),
        ({"groups": 0}, "groups"),
        ({"cycle_time_ms": -1}, "cycle_time_ms"),
        ({"fusion_threshold_mb": "much"}, "fusion_threshold_mb"),
        ({"fusion": 1}, "unknown option 'fusion'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    spec = load_spec({**SPEC, "backend_options": {"horovod-torch": options}})
    adapter = HorovodTorch()
    with pytest.raises(PlanError, match=said):
        adapter.check(spec, adapter.check_options(spec), replicas=2)


def test_compression_is_remarked() -> None:
    options = {"compression": "fp16"}
    spec = load_spec({**SPEC, "backend_options": {"horovod-tf": options}})
    assert "float16" in HorovodTF().check(spec, options, replicas=2)[0]
    assert HorovodTF().check(spec, options, replicas=1) == []


def test_declaring_imports_no_framework() -> None:
    code = (
        "import sys; from isotrain.adapters.horovod.tf_adapter import HorovodTF\n"
        "from isotrain.adapters.horovod.torch_adapter import HorovodTorch\n"
        "for a in (HorovodTorch(), HorovodTF()):\n"
        "    a.availability(); a.resolve_collective(None, device='cpu', replicas=2); a.accelerators()\n"
        "print({'torch', 'tensorflow', 'keras', 'horovod'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
