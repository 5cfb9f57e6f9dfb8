"""The Horovod backends in real processes: collectives, steps, bit-equality, failures, doctor."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isotrain.adapters.horovod.adapter import HorovodTF, HorovodTorch
from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.testing.declarations import declarations

WORKER = Path(__file__).with_name("horovod_worker.py")
ADAPTERS: dict[str, type[Adapter]] = {a.name: a for a in (HorovodTorch, HorovodTF)}
CASES = ("sgd", "uneven", "sparse", "clipped")
DEADLINE_S = 240.0
REFUSED = 9

World = list[dict[str, np.ndarray]]


# --- starting worlds ---------------------------------------------------------------------------


def free_addresses(count: int) -> tuple[str, ...]:
    """Loopback addresses whose ports were free a moment ago."""
    listeners = [socket.socket() for _ in range(count)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
    addresses = tuple(f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners)
    for listener in listeners:
        listener.close()
    return addresses


def start_process(
    backend: str, job: str, rank: int, addresses: Sequence[str], folder: Path, **variables: str
) -> subprocess.Popen[str]:
    """Starts one rank of a world whose ranks meet at `addresses`."""
    replicas = len(addresses)
    context = ProcessContext(
        rank, replicas, rank, replicas, replicas, (rank,), tuple(addresses), str(folder)
    )
    own = ADAPTERS[backend]().environment(device="cpu", threads=1, replicas=replicas)
    return subprocess.Popen(
        [sys.executable, str(WORKER), backend, job, str(folder / f"{rank}.npz")],
        env=os.environ | own | context.to_variables() | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Waits for processes; gives exit status and standard error of each, and leaves none behind."""
    try:
        errors = [process.communicate(timeout=DEADLINE_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [(p.returncode, error) for p, error in zip(processes, errors, strict=True)]


@functools.cache
def world(backend: str, replicas: int) -> World:
    """What every rank of a world saw; each world runs once for all tests of this file."""
    with tempfile.TemporaryDirectory() as name:
        folder, addresses = Path(name), free_addresses(replicas)
        ranks = range(replicas)
        processes = [start_process(backend, "work", rank, addresses, folder) for rank in ranks]
        for rank, (status, error) in enumerate(finish(processes)):
            assert status == 0, f"rank {rank} of {backend} ended with {status}:\n{error[-4000:]}"
        results = []
        for rank in ranks:
            with np.load(folder / f"{rank}.npz") as saved:
                results.append(dict(saved))
        return results


SLOW = pytest.mark.slow
WORLDS = [
    pytest.param((backend, replicas), marks=SLOW) for backend in ADAPTERS for replicas in (2, 3)
]


@pytest.fixture(params=WORLDS, ids=lambda p: f"{p[0]}-{p[1]}")
def ranks(request: pytest.FixtureRequest) -> World:
    return world(*request.param)


@pytest.fixture(params=[pytest.param(backend, marks=SLOW) for backend in ADAPTERS])
def three(request: pytest.FixtureRequest) -> World:
    """What the ranks of a world of three saw, which alone makes the whole of the work."""
    return world(request.param, 3)


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    """What one replica of the same backend saw."""
    backend = next(name for name in ADAPTERS if name in request.node.name)
    return world(backend, 1)[0]


def stacked(ranks: World, name: str) -> np.ndarray:
    return np.stack([rank[name] for rank in ranks])


def named(results: dict[str, np.ndarray], prefix: str) -> list[str]:
    names = [name for name in results if name.startswith(prefix)]
    assert names, f"no rank reported {prefix}..."
    return names


# --- collectives -------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "reduce"), [("sum", np.sum), ("mean", np.mean), ("max", np.max)])
def test_reductions(ranks: World, op: str, reduce: Any) -> None:
    expected = reduce(stacked(ranks, "given"), axis=0)
    for rank in ranks:
        np.testing.assert_allclose(rank[f"all_reduce/{op}"], expected, rtol=1e-15)


def test_gather_and_broadcast(ranks: World) -> None:
    given = stacked(ranks, "given")
    expected = [*given[:-1], given[0]]
    for rank, value in zip(ranks, expected, strict=True):
        np.testing.assert_array_equal(rank["all_gather"], given)
        np.testing.assert_array_equal(rank["broadcast_within"], value)


def test_send_receive(ranks: World) -> None:
    given = stacked(ranks, "given")
    for index, rank in enumerate(ranks):
        for shift in range(len(ranks)):
            sender = (index - shift) % len(ranks)
            np.testing.assert_array_equal(rank[f"send_receive/{shift}"], given[sender])


def test_scalars_keep_their_shape(ranks: World) -> None:
    numbers = np.arange(1.0, len(ranks) + 1.0)
    for rank in ranks:
        np.testing.assert_array_equal(rank["all_reduce/scalar"], numbers.sum())
        np.testing.assert_array_equal(rank["all_gather/scalar"], numbers)


def test_collectives_leave_their_input_alone(ranks: World) -> None:
    for rank in ranks:
        np.testing.assert_array_equal(rank["untouched"], rank["given"])


def test_barrier_waits_for_the_last(ranks: World) -> None:
    arrived, left = stacked(ranks, "barrier").T
    assert left.min() >= arrived.max()


def test_only_loopback_is_used(ranks: World) -> None:
    for rank in ranks:
        addresses = {entry.split()[1] for entry in rank["sockets"]}
        assert addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert any(entry.startswith("LISTEN") for entry in ranks[0]["sockets"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ADAPTERS)
def test_one_replica_opens_no_port(backend: str) -> None:
    (alone,) = world(backend, 1)
    assert list(alone["sockets"]) == []


# --- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_one_replica(three: World, alone: dict[str, np.ndarray], case: str) -> None:
    assert len(set(alone[f"{case}/loss"])) > 1
    for name in named(alone, f"{case}/"):
        for rank in three:
            np.testing.assert_allclose(
                rank[name], alone[name], rtol=1e-12, atol=1e-12, err_msg=name
            )


def test_gradients_exchanged_by_a_strategy(ranks: World, alone: dict[str, np.ndarray]) -> None:
    for name in named(alone, "strategy/"):
        for rank in ranks:
            np.testing.assert_allclose(
                rank[name], alone[name], rtol=1e-12, atol=1e-12, err_msg=name
            )


def test_local_steps_and_average(ranks: World) -> None:
    for name in named(ranks[0], "parted/"):
        parted = stacked(ranks, name)
        assert not np.array_equal(parted[0], parted[1]), f"{name} did not part"
        averaged = stacked(ranks, name.replace("parted/", "averaged/"))
        np.testing.assert_allclose(averaged, [parted.mean(axis=0)] * len(ranks), rtol=1e-14)
    for name in named(ranks[0], "after_local/"):
        equal_on_all(ranks, name)


def test_moving_statistics_are_equal(three: World) -> None:
    names = named(three[0], "normalised/")
    assert any("moving_variance" in name for name in names)
    for name in names:
        equal_on_all(three, name)


def test_initial_weights_are_those_of_rank_0(three: World) -> None:
    kernels = [name for name in named(three[0], "initial/") if "kernel" in name]
    assert all(np.ptp(three[0][name]) > 0 for name in kernels)
    for name in named(three[0], "initial/"):
        equal_on_all(three, name)


def equal_on_all(ranks: World, name: str) -> None:
    for rank in ranks[1:]:
        np.testing.assert_array_equal(rank[name], ranks[0][name], err_msg=name)


def test_bit_equal_to_loops_written_by_hand(ranks: World) -> None:
    for name in named(ranks[0], "bits/"):
        for rank in ranks:
            ours, theirs = rank[name]
            assert ours.tobytes() == theirs.tobytes(), name
            assert np.isfinite(ours).all()
            assert ours.any()


def test_compression_rounds(ranks: World) -> None:
    if not any(name.startswith("bits/native/") for name in ranks[0]):
        ours = [name for name in ranks[0] if name.startswith("bits/compressed/")]
        exact = [name.replace("compressed", "portable") for name in ours]
    else:
        ours = named(ranks[0], "bits/native/fp16/")
        exact = [name.replace("fp16", "none") for name in ours]
    assert ours
    for name, other in zip(ours, exact, strict=True):
        np.testing.assert_allclose(ranks[0][name], ranks[0][other], rtol=0, atol=2e-3)
        assert ranks[0][name].tobytes() != ranks[0][other].tobytes()


# --- failures ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", ADAPTERS)
def test_killed_peer_is_an_error_for_the_others(backend: str, tmp_path: Path) -> None:
    addresses = free_addresses(2)
    processes = [start_process(backend, "lose_a_peer", r, addresses, tmp_path) for r in range(2)]
    (survivor, error), (killed, _) = finish(processes)
    assert killed == -9
    assert survivor == 1
    assert "Horovod has been shut down" in error


@pytest.mark.slow
def test_missing_peer_is_named(tmp_path: Path) -> None:
    addresses = free_addresses(3)
    present = (0, 2)
    processes = [
        start_process("horovod-torch", "work", r, addresses, tmp_path, TEST_TIMEOUT_S="15")
        for r in present
    ]
    (first, said), (other, _) = finish(processes)
    assert (first, other) == (REFUSED, REFUSED)
    assert "rank 1 did not come within 15 s" in said


@SLOW
def test_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        addresses = (f"127.0.0.1:{port}", *free_addresses(1))
        process = start_process("horovod-torch", "work", 0, addresses, tmp_path)
        ((status, said),) = finish([process])
    assert status == REFUSED
    assert f"PlanError: Port {port} on 127.0.0.1 is already in use" in said


# --- declarations ------------------------------------------------------------------------------


def examined(backend: str, *path: Path) -> dict[str, Any]:
    """Examines a backend in a process of its own, with folders put before the installed packages."""
    adapter = ADAPTERS[backend]
    code = (
        "import dataclasses, json, sys\n"
        f"from {adapter.__module__} import {adapter.__name__} as adapter\n"
        "print('\\n' + json.dumps(dataclasses.asdict(adapter().examine())))"
    )
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def tampered_horovod(folder: Path, extension: str | None, built_for: str | None) -> Path:
    """Copies Horovod's Python files; its compiled library is what `extension` says, or missing."""
    found = importlib.util.find_spec("horovod")
    assert found is not None
    assert found.submodule_search_locations is not None
    source = Path(found.submodule_search_locations[0])
    target = folder / "horovod"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if extension is not None:
        name = next((source / "torch").glob("*.so")).name
        (target / "torch" / name).write_text(extension)
    if built_for is not None:
        (target / "metadata.json").write_text(json.dumps({"pytorch": built_for}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("backend", ADAPTERS)
def test_examine_says_what_the_build_has(backend: str) -> None:
    found = examined(backend)
    assert found["backend"]["usable"], found["backend"]["reason"]
    assert found["collectives"]["gloo"]["usable"]
    assert not found["collectives"]["nccl"]["usable"]
    assert set(found["versions"]) == {"horovod", "keras", ADAPTERS[backend].framework}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extension", "built_for", "reason"),
    [
        (None, None, "built without torch"),
        ("no library", None, "cannot be loaded"),
        ("no library", "1.0.0", "built for torch 1.0.0"),
    ],
)
def test_examine_of_a_broken_build(
    tmp_path: Path, extension: str | None, built_for: str | None, reason: str
) -> None:
    found = examined("horovod-torch", tampered_horovod(tmp_path, extension, built_for))["backend"]
    assert not found["usable"]
    assert reason in found["reason"]
    assert found["hint"]


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
    assert adapter.usability().usable


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compression": "fp8"}, "compression: 'fp8'"),
        ({"groups": 0}, "groups"),
        ({"cycle_time_ms": -1}, "cycle_time_ms"),
        ({"fusion_threshold_mb": "much"}, "fusion_threshold_mb"),
        ({"fusion": 1}, "unknown option 'fusion'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    spec: Any = SimpleNamespace(backend_options={"horovod-torch": options})
    adapter = HorovodTorch()
    with pytest.raises(PlanError, match=said):
        adapter.check(spec, adapter.check_options(spec), replicas=2)


def test_compression_is_remarked() -> None:
    options = {"compression": "fp16"}
    spec: Any = SimpleNamespace(backend_options={"horovod-tf": options})
    assert "float16" in HorovodTF().check(spec, options, replicas=2)[0]
    assert HorovodTF().check(spec, options, replicas=1) == []


def test_declaring_imports_no_framework() -> None:
    code = (
        "import sys; from isotrain.adapters.horovod.adapter import HorovodTorch, HorovodTF\n"
        "for a in (HorovodTorch(), HorovodTF()):\n"
        "    a.usability(); a.resolve_collective(None, device='cpu', replicas=2); a.accelerators()\n"
        "print({'torch', 'tensorflow', 'keras', 'horovod'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
