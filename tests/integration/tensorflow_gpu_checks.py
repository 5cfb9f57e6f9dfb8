"""What TensorFlow is asked for on a machine with GPUs. The calls are recorded, for there is no GPU here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from isotrain.adapters.tensorflow import distribution
from isotrain.adapters.tensorflow.base import gpu
from isotrain.plugin import BackendConfig, PlanError, ProcessContext, ProcessInfo

ON_GPU = BackendConfig("nccl", "gpu", 1, {}, timeout=90)
Calls = list[tuple[Any, ...]]


def context(local_rank: int) -> ProcessContext:
    processes = tuple(ProcessInfo(rank, "a", rank, (rank,)) for rank in range(local_rank + 1))
    return ProcessContext(local_rank, len(processes), "", processes, (("a", 1),) * len(processes))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """TensorFlow on a machine with two GPUs, of which changes are recorded."""
    recorded: Calls = []
    growth = SimpleNamespace(set_memory_growth=lambda *call: recorded.append(("growth", *call)))
    config = SimpleNamespace(
        list_physical_devices=lambda kind: ["first", "second"],
        list_logical_devices=lambda kind: ["GPU:0"],
        set_visible_devices=lambda *call: recorded.append(("visible", *call)),
        experimental=growth,
    )
    synchronize = SimpleNamespace(sync_devices=lambda: recorded.append(("synchronize",)))
    test = SimpleNamespace(experimental=synchronize)
    monkeypatch.setattr(gpu, "tf", SimpleNamespace(config=config, test=test))
    return recorded


def test_a_process_sees_the_gpu_of_its_local_rank_alone(calls: Calls) -> None:
    """Memory grows on demand: else the process would take the whole GPU at its start."""
    gpu.use_local_gpu(ON_GPU, context(1))
    assert calls == [("visible", "second", "GPU"), ("growth", "second", True)]


def test_more_processes_than_gpus_are_refused(calls: Calls) -> None:
    with pytest.raises(
        PlanError, match="process 2 needs GPU 2 of its host, and TensorFlow sees only 2"
    ):
        gpu.use_local_gpu(ON_GPU, context(2))
    assert not calls


def test_a_worker_of_multi_worker_has_one_gpu_over_nccl(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolver(*_: Any, task_id: int, num_accelerators: dict[str, int], **__: Any) -> int:
        calls.append(("resolver", task_id, num_accelerators))
        return task_id

    def strategy(rank: int, options: Any) -> None:
        calls.append(("strategy", rank, options.implementation.name))

    monkeypatch.setattr(tf.distribute.cluster_resolver, "SimpleClusterResolver", resolver)
    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", strategy)
    for name in ("disable_heartbeat_timeout", "wait_for_rank_zero"):
        monkeypatch.setattr(distribution, name, lambda _: None)
    distribution.multi_worker_strategy(ON_GPU, context(1), 60)
    assert calls[-2:] == [("resolver", 1, {"GPU": 1}), ("strategy", 1, "NCCL")]
    assert calls[0] == ("visible", "second", "GPU"), "before the server starts"


def test_all_gpus_none_and_waiting(calls: Calls) -> None:
    gpu.use_all()
    gpu.use_none()
    gpu.synchronize()
    assert calls == [
        ("growth", "first", True),
        ("growth", "second", True),
        ("visible", [], "GPU"),
        ("synchronize",),
    ]
