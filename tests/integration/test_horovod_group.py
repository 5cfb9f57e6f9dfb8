"""What the conformance kit does not ask of the Horovod backends: options, ports, bits beside loops by hand.

All that processes do is done in one run of two processes for each backend, and one of three.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.horovod_runs import (
    ADAPTERS,
    BESIDE,
    RECORDED,
    SPEC,
    sockets_watched,
    work,
)

import isotrain
from isotrain.adapters.horovod import build_info
from isotrain.adapters.horovod.tf_adapter import HorovodTF
from isotrain.adapters.horovod.torch_adapter import HorovodTorch
from isotrain.core.contracts.backend.capabilities import Availability
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.spec.loading import load_spec
from isotrain.testing.backend import declarations
from isotrain.testing.launching import try_run

RUNS = [("horovod-torch", 2), ("horovod-torch", 3), ("horovod-tf", 2)]
"""horovod-tf with three: the same Horovod as the one, and the same program as the other."""


@functools.cache
def ranks(backend: str, replicas: int) -> list[dict[str, Any]]:
    """What every process of a run saw; each run is made once for all tests."""
    run = try_run(work, SPEC, backend, replicas)
    assert run.failure is None, run.failure
    return run.returned


# --- the tests ---------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.features
@pytest.mark.parametrize(("backend", "replicas"), RUNS)
def test_bit_equal_to_loops_written_by_hand(backend: str, replicas: int) -> None:
    for rank in ranks(backend, replicas):
        names = set(rank) - {"sockets", "refusals", "losses", "sent", "start", "groups", "unused"}
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


@pytest.mark.features
@pytest.mark.parametrize(("backend", "replicas"), RUNS)
def test_losses_are_equal_on_every_process(backend: str, replicas: int) -> None:
    first, *others = ranks(backend, replicas)
    assert np.isfinite([*first["losses"].values()]).all()
    for other in others:
        assert other["losses"] == first["losses"]


@pytest.mark.kernels
@pytest.mark.features
def test_the_loss_is_reduced_with_the_last_gradients() -> None:
    """Where each gradient travels by itself, the loss is equal to that of one message with all."""
    for rank in ranks("horovod-torch", 2):
        for model, sent in rank["sent"].items():
            by_step = "".join(kind[0] for kind in sent).split("l")
            assert by_step[:4] == ["gggg"] * 4
            assert rank["losses"][f"{model}, each by itself"] == rank["losses"][model]


@pytest.mark.kernels
@pytest.mark.features
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


@pytest.mark.features
def test_gradients_of_unused_weights_are_zero() -> None:
    """Weights that no rank uses stay; those that one rank uses change, equally on all ranks."""
    first, other = (rank["unused"] for rank in ranks("horovod-torch", 2))
    assert len(first) == 2, "gradients in one message, and each by itself"
    for name, (before, after) in first.items():
        for weight, value in after.items():
            assert value.tobytes() == other[name][1][weight].tobytes(), weight
            is_unused = "unused" in weight
            assert (value.tobytes() == before[weight].tobytes()) == is_unused, (name, weight)


@pytest.mark.features
def test_groups_of_gradients_are_as_many_as_the_option_says() -> None:
    for rank in ranks("horovod-tf", 2):
        assert rank["groups"] == [[6], [3, 3], [2, 2, 2], [1] * 6]


@pytest.mark.features
@pytest.mark.parametrize(("backend", "replicas"), RUNS)
def test_compression_rounds_to_float16(backend: str, replicas: int) -> None:
    found, (*_, compressed) = ranks(backend, replicas)[0], BESIDE[backend]
    exact = found[compressed.removesuffix(", fp16")]
    for (rounded, _), (value, _) in zip(found[compressed], exact, strict=True):
        np.testing.assert_allclose(rounded, value, rtol=0, atol=2e-3)
        assert rounded.tobytes() != value.tobytes()


@pytest.mark.features
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


@pytest.mark.features
@pytest.mark.parametrize("backend", ADAPTERS)
def test_one_replica_opens_no_port(backend: str) -> None:
    run = try_run(look_for_sockets, SPEC, backend, 1)
    assert run.returned == [[]], run.failure


@pytest.mark.features
def test_a_missing_peer_is_named() -> None:
    first, other = (rank["refusals"]["missing"] for rank in ranks("horovod-torch", 2))
    assert "rank 1 did not come within 3 s" in first
    assert "Rank 2 waited 3 s for rank 0" in other


@pytest.mark.features
def test_a_port_in_use_is_named() -> None:
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
def test_a_broken_build_is_recognised_by_its_files(
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


@pytest.mark.parametrize(
    ("built_for", "version", "fits"),
    [
        ("2.13.0+cu130", "2.13.0", True),  # torch for CUDA, and what its metadata says
        ("2.13.0+cu130", "2.13.0+cpu", False),
        ("2.13.0", "2.13.1", False),
        ("2.1", "2.13.0", False),
    ],
)
def test_a_build_is_for_one_version(
    monkeypatch: pytest.MonkeyPatch, built_for: str, version: str, fits: bool
) -> None:
    adapter = HorovodTorch()
    monkeypatch.setattr(adapter, "framework_availability", lambda: Availability(True, version))
    build = build_info.Build("0.28.1", Path(__file__), built_for)
    monkeypatch.setattr(build_info, "installed", lambda _: build)
    assert adapter.availability().available == fits


@pytest.mark.parametrize("backend", ADAPTERS)
def test_collectives_are_resolved_by_the_build(backend: str) -> None:
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


def test_compression_is_noted() -> None:
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
