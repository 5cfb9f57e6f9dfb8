"""Collectives that plans for GPUs count on Horovod and TensorFlow, against those of runs on CPUs."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
from integration import collective_counts, step_memory
from integration.collective_counts import SPEC, Counts

from isotrain.core import api
from isotrain.core.errors import IsotrainError
from isotrain.core.planning.gpu_plan import Collective
from isotrain.testing.consecutive_sessions import launched_in_turn
from isotrain.testing.launching import try_run

pytestmark = [pytest.mark.slow, pytest.mark.features]

SHARDED = {"strategy": {"name": "sharded", "options": {"stage": 2}}}
FULLY = {"strategy": {"name": "sharded", "options": {"stage": 3, "bucket_megabytes": 0.2}}}
LOCAL = {"strategy": {"name": "local-sgd", "options": {"every": 3}}}
GOSSIP = {"strategy": {"name": "gossip", "options": {"graph": "ring"}}}
UPDATES = {
    "updates": {
        "first": {"weights": "*/first/*", "every": 2},
        "rest": {"weights": ["*/second/*", "*/norm/*", "*/last/*"]},
    }
}
SERVED = {"strategy": "parameter-server"}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "horovod-torch": {
        "data-parallel": {"gradient_accumulation_steps": 2},
        "groups": {"backend_options": {"horovod-torch": {"groups": 2, "compression": "fp16"}}},
        "local": LOCAL,
        "sharded": SHARDED,
        "fully": FULLY,
        "updates": UPDATES,
    },
    "horovod-tf": {"data-parallel": {}, "gossip": GOSSIP, "sharded": SHARDED, "updates": UPDATES},
    "tf-multiworker": {
        "data-parallel": {},
        "local": LOCAL,
        "sharded": SHARDED,
        "fully": FULLY,
        "updates": UPDATES,
    },
}
_OF_HOROVOD = {
    "all-reduce": "ALLREDUCE",
    "all-gather": "ALLGATHER",
    "all-to-all": "ALLTOALL",
    "broadcast": "BROADCAST",
}


def planned(backend: str, replicas: int, **fields: Any) -> list[Collective]:
    plan = api.gpu_plan(
        {**SPEC, **fields}, hosts=1, gpus_per_host=replicas, backend=backend, quiet=True
    )
    assert plan.collectives is not None, plan.why_not_counted
    return list(plan.collectives)


def ran(backend: str, replicas: int, names: tuple[str, ...]) -> dict[str, Any]:
    """What rank 0 of real runs found, by case."""
    specs = {name: {**SPEC, **CASES[backend][name]} for name in names}
    work = (
        collective_counts.of_horovod
        if backend.startswith("horovod")
        else collective_counts.of_tensorflow
    )
    return launched_in_turn(specs, work, backend, replicas)[0]


ran_once = functools.cache(ran)


def counts_of_horovod(found: list[Collective], as_sends: str) -> Counts:
    """The counts of a plan by what Horovod calls them; `as_sends` is how it makes transfers."""
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for each in found:
        kind = _OF_HOROVOD.get(each.kind, as_sends)
        counts[kind] += each.count  # type: ignore[assignment]
        if kind != "ALLTOALL":
            nbytes[kind] += each.nbytes  # type: ignore[assignment]
    return {kind: [counts[kind], nbytes[kind]] for kind in counts}


@pytest.mark.parametrize(
    ("backend", "name"),
    [(each, name) for each in ("horovod-torch", "horovod-tf") for name in CASES[each]],
)
def test_horovod_does_what_is_counted(
    monkeypatch: pytest.MonkeyPatch, backend: str, name: str
) -> None:
    """By its timeline; what it may fuse is counted by tensor."""
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    found = ran_once(backend, 2, tuple(CASES[backend]))[name]
    counted = counts_of_horovod(planned(backend, 2, **CASES[backend][name]), "ALLTOALL")
    assert counted == found


@pytest.mark.parametrize("name", CASES["tf-multiworker"])
def test_tensorflow_does_what_is_counted(name: str) -> None:
    """By counters in its functions; the kernel sees the bytes, of which there are more: those of gRPC."""
    counts, sent = ran_once("tf-multiworker", 2, tuple(CASES["tf-multiworker"]))[name]
    found = planned("tf-multiworker", 2, **CASES["tf-multiworker"][name])
    counted: Counter[str] = Counter()
    for each in found:
        counted[each.kind] += each.count  # type: ignore[assignment]
    assert counted == counts
    to_be_sent = sum(each.sent_bytes for each in found)
    assert to_be_sent < sent < 1.1 * to_be_sent + 8192


@pytest.mark.parametrize("backend", ["horovod-torch", "horovod-tf", "tf-multiworker"])
def test_four_replicas_do_what_is_counted(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    found = ran(backend, 4, ("data-parallel",))["data-parallel"]
    counted = planned(backend, 4)
    if backend.startswith("horovod"):
        assert counts_of_horovod(counted, "ALLTOALL") == found
        return
    (all_reduce,) = counted
    assert found[0] == {"all-reduce": all_reduce.count}
    assert all_reduce.sent_bytes < found[1] < 1.1 * all_reduce.sent_bytes + 8192


def test_a_parameter_server_sends_what_is_counted() -> None:
    """To each of 2 workers the weights and its slice; the kernel sees more, by the headers."""
    (to_workers,) = planned("torch-ddp", 3, **SERVED)  # one GPU is the coordinator's
    spec = {**SPEC, **SERVED}
    run = try_run(collective_counts.sent_to_workers, spec, "torch-ddp", 2)
    assert run.failure is None, run.failure
    slices, weights = 64 * (64 * 4 + 8), 4 * (65 * 512 + 513 * 512 + 4 * 512 + 513 * 10)
    assert (to_workers.kind, to_workers.count) == ("send", 2)
    assert to_workers.nbytes == slices + 2 * weights
    assert to_workers.nbytes < run.returned[0] < to_workers.nbytes + 2048


@pytest.mark.parametrize("servers", [1, 2])
def test_gradients_that_servers_get_are_counted(servers: int) -> None:
    """And the slices that workers get; the kernel sees more, by the calls of functions on these."""
    options = {"strategy": {"name": "parameter-server", "options": {"servers": servers}}}
    (sent,) = planned("tf-multiworker", 3 + servers, **options)  # a GPU for each process
    run = try_run(collective_counts.sent_to_workers, {**SPEC, **options}, "tf-multiworker", 2)
    assert run.failure is None, run.failure
    slices, weights = 64 * (64 * 4 + 8), 4 * (65 * 512 + 513 * 512 + 4 * 512 + 513 * 10)
    assert (sent.kind, sent.count, sent.nbytes) == ("send", 2 + servers, slices + weights)
    assert sent.nbytes < run.returned[0] < sent.nbytes + 24_576


def counting_module() -> Any:
    """A tf.Module with a weight that is not trained, which it may update in its forward pass."""
    import tensorflow as tf

    class Module(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(tf.zeros((64, 10)))
            self.calls = tf.Variable(0.0, trainable=False)

        def __call__(self, inputs: Any) -> Any:
            return inputs @ self.weight

    return Module()


def test_what_a_run_with_servers_refuses_is_not_counted() -> None:
    spec = step_memory.spec({"tensorflow": counting_module}, **SERVED)
    refusal = "this tf.Module has weights that are not trained"
    with pytest.raises(IsotrainError, match=refusal):
        api.run(spec, backend="tf-multiworker", replicas=2, quiet=True)
    plan = api.gpu_plan(spec, hosts=1, gpus_per_host=4, backend="tf-multiworker", quiet=True)
    assert plan.collectives is None
    assert refusal in str(plan.why_not_counted)


def test_replicas_of_one_process_send_what_those_of_several_do() -> None:
    assert planned("tf-mirrored", 4) == planned("tf-multiworker", 4)


@pytest.mark.parametrize(
    ("schedule", "backends"),
    [("1f1b", tuple(CASES)), ("pipedream", tuple(CASES))],
)
def test_the_first_stage_sends_activations(schedule: str, backends: tuple[str, ...]) -> None:
    """Of each micro-batch, 8 of 64 samples at a replica of 2; and it gets their gradients."""
    strategy = {"name": "pipeline", "options": {"stages": 2, "schedule": schedule}}
    for backend in backends:
        found = planned(backend, 4, strategy=strategy, gradient_accumulation_steps=4)
        (transfers,) = (each for each in found if each.kind == "send")
        assert (transfers.processes, transfers.count) == (2, 4)
