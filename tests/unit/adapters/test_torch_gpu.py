"""What torch is asked for on a machine with GPUs. The calls are recorded, for there is no GPU here."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.isolated import run_isolated
from helpers.recorded_gpus import RecordedGPUs, keep_tensors_on_cpu, recorded_gpus
from helpers.stand_in_nvml import StandInNvml

import isotrain
from isotrain.adapters.torch.adapter import TorchDDP
from isotrain.adapters.torch.base import gpu
from isotrain.adapters.torch.base.no_grad import WithoutGradients
from isotrain.adapters.torch.comm import ddp, process_group
from isotrain.core.system import hardware
from isotrain.plugin import BackendConfig, PlanError, ProcessContext, ProcessInfo
from tests.unit.adapters import gpu_session

ON_GPU = BackendConfig("nccl", "gpu", 1, {}, timeout=90)


def context(local_rank: int, host: str = "127.0.0.1") -> ProcessContext:
    processes = tuple(ProcessInfo(rank, host, rank, (rank,)) for rank in range(local_rank + 1))
    return ProcessContext(local_rank, len(processes), "", processes, ((host, 1),) * len(processes))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> RecordedGPUs:
    return recorded_gpus(monkeypatch, 2)


def test_batches_are_copied_ahead_from_pinned_memory(tmp_path: Path) -> None:
    """Pinned on the replica's GPU: a thread starts on GPU 0, where each rank would take memory otherwise."""
    seen = run_isolated(
        gpu_session.recorded_session, gpu_session.SPEC, "torch-ddp", tmp_path / "run"
    )
    assert seen["first"] == "set_device cuda:0", "before anything is put on a GPU"
    once = ["device cuda:0", "pin_memory", "to cuda:0", "end of device"]
    assert seen["copies"] == 6 * once, "inputs and targets, of the next two batches too"
    assert seen["in_thread"], "while the step computes"
    assert seen["waits"] == 2, "after the first step and the last alone"


@pytest.mark.parametrize(
    ("collective", "gpus", "local_rank", "index"), [("nccl", 4, 3, 3), ("gloo", 2, 3, 1)]
)
def test_a_replica_has_the_gpu_of_its_local_rank(
    monkeypatch: pytest.MonkeyPatch, collective: str, gpus: int, local_rank: int, index: int
) -> None:
    recorded = recorded_gpus(monkeypatch, gpus)
    device = gpu.replica_device(replace(ON_GPU, collective=collective), context(local_rank))
    assert recorded.calls == [("set_device", device)]
    assert device == torch.device("cuda", index)


def test_processes_share_no_gpu_over_nccl(two_gpus: RecordedGPUs) -> None:
    """NCCL would refuse it late, and without saying which GPU is missing."""
    with pytest.raises(PlanError, match="process 2 needs GPU 2 of its host, and torch sees only 2"):
        gpu.replica_device(ON_GPU, context(2))
    assert not two_gpus.calls


@pytest.mark.parametrize(
    "mask",
    [
        None,
        "",
        "-1",
        "1",
        "0,2",
        "1,7,0",
        "0,0",
        "GPU-1",
        "GPU-21,GPU-1",
        "GPU-2",
        "GPU-9",
        "GPU-1,GPU-1",
    ],
)
def test_as_many_gpus_are_planned_as_torch_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mask: str | None
) -> None:
    """Both read the NVML that stands in for NVIDIA's."""
    machine = "gpu 0 GPU-1 81559\ngpu 0 GPU-21 81559\ngpu 0 GPU-22 81559\n"
    StandInNvml(monkeypatch, tmp_path).becomes(machine)
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert hardware.visible_gpus() == torch.cuda._device_count_nvml()


def test_a_gpu_that_is_lost_between_two_runs_is_planned_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(TorchDDP, "accelerators", lambda _: hardware.visible_gpus())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine, spec = StandInNvml(monkeypatch, tmp_path), {**gpu_session.SPEC, "device": "gpu"}
    machine.becomes("gpu 0 GPU-1 81559\ngpu 0 GPU-2 81559\n")
    plan = isotrain.plan(spec, backend="torch-ddp", replicas=2)
    assert (plan.device, plan.collective) == ("gpu", "nccl")
    machine.becomes("gpu 0 GPU-1 81559\ngpu 15 GPU-2 81559\n")
    refusal = r"'torch-ddp' can use 1 GPU here \(GPU 1: GPU is lost\)"
    with pytest.raises(PlanError, match=refusal):
        isotrain.plan(spec, backend="torch-ddp", replicas=2)
    with pytest.raises(PlanError, match="takes 2 GPUs on a host; a process sees 1"):
        isotrain.plan(spec, backend="torch-ddp", replicas=2, launcher="mpi")


def test_ddp_has_the_gpu_of_the_local_rank(
    monkeypatch: pytest.MonkeyPatch, two_gpus: RecordedGPUs
) -> None:
    class Trainer:
        loss_module = torch.nn.Linear(1, 1)
        trainable: dict[str, Any] = {}
        may_ignore_padding = False

        def tensors(self) -> list[torch.Tensor]:
            return []

    keep_tensors_on_cpu(monkeypatch, two_gpus)
    options: dict[str, Any] = {}

    def wrap(self: torch.nn.Module, module: Any, **given: Any) -> None:
        torch.nn.Module.__init__(self)
        options.update(given)

    monkeypatch.setattr(ddp.DistributedDataParallel, "__init__", wrap)
    monkeypatch.setattr(ddp, "start_process_group", lambda *_: None)
    monkeypatch.setattr(ddp, "broadcast_initial_values", lambda *_: None)
    ddp.DDPCommunicator(ON_GPU, context(1)).wrap(Trainer())  # type: ignore[arg-type]
    assert options["device_ids"] == [torch.device("cuda", 1)]


@pytest.mark.parametrize(("host", "interface"), [("127.0.0.1", "lo"), ("node-7", None)])
def test_nccl_listens_on_loopback_in_local_runs_and_has_the_timeout(
    monkeypatch: pytest.MonkeyPatch, host: str, interface: str | None
) -> None:
    started: dict[str, Any] = {}

    def init_process_group(backend: str, **options: Any) -> None:
        started.update(options, backend=backend)

    environment: dict[str, str] = {}
    monkeypatch.setattr(process_group.os, "environ", environment)
    monkeypatch.setattr(process_group, "wait_for_rank_zero", lambda *_, **__: None)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    process_group.start_process_group(ON_GPU, context(1, host))
    assert (started["backend"], started["timeout"]) == ("nccl", timedelta(seconds=90))
    assert (started["rank"], started["world_size"]) == (1, 2)
    assert environment.get("NCCL_SOCKET_IFNAME") == interface


def test_random_states_of_the_current_gpu_are_restored(two_gpus: RecordedGPUs) -> None:
    """The call that needs gradients is repeated with the numbers of the first, on CPU and GPU."""
    two_gpus.set_device(torch.device("cuda", 1))
    drawn = []

    def penalty(weight: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(1).item())
        return torch.autograd.grad(weight.square().sum(), weight)[0]

    WithoutGradients()(penalty, torch.ones(1, requires_grad=True))
    assert drawn[0] == drawn[1]
    assert two_gpus.calls[-1] == ("set_rng_state", 1, torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("cuda", "hip", "accelerator", "reason"),
    [
        ("12.8", None, "cuda", "Found no NVIDIA driver"),
        (None, "6.3", "cuda", "accelerator here, ROCm, is not supported"),
        (None, None, "xpu", "accelerator here, xpu, is not supported"),
        (None, None, "mps", "accelerator here, mps, is not supported"),
    ],
)
def test_other_accelerators_are_not_taken_for_nvidias(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    hip: str | None,
    accelerator: str,
    reason: str,
) -> None:
    recorded_gpus(monkeypatch, 0 if cuda else 4)
    accelerators = SimpleNamespace(current_accelerator=lambda **_: torch.device(accelerator))
    monkeypatch.setattr(gpu, "accelerator", accelerators)
    monkeypatch.setattr(gpu, "version", SimpleNamespace(cuda=cuda, hip=hip))
    assert gpu.count() == 0
    with pytest.raises(PlanError, match=reason):
        gpu.replica_device(ON_GPU, context(0))


def test_keras_computes_on_the_cpu_in_runs_on_cpus() -> None:
    """Keras would choose any accelerator that torch has."""
    variables = TorchDDP().environment_variables(device="cpu", threads=1, replicas=1)
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["KERAS_TORCH_DEVICE"]) == ("", "cpu")
    on_gpu = TorchDDP().environment_variables(device="gpu", threads=1, replicas=1)
    assert not {"CUDA_VISIBLE_DEVICES", "KERAS_TORCH_DEVICE"} & set(on_gpu)
