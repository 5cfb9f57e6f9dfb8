"""Starts the hand-written loops: plain processes with the variables that each framework documents.

They are forked from a process that has imported the framework, which takes longer than the loops.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from conformance import trained_cases

import isotrain
from isotrain.core.launching.processes.ports import Ports

SCRIPTS = Path(__file__).parent / "handwritten"


def by_hand(
    script: str, backend: str, replicas: int, case: str, start: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Final weights of a hand-written loop.

    Args:
        script: Its file, without the ending.
        backend: The backend that it is compared with: says how many processes and threads.
        replicas: In all.
        case: Whose optimizer.
        start: The weights to start from, by name.
    """
    spec = trained_cases.SPECS[case]
    plan = isotrain.plan(spec, backend=backend, replicas=replicas)
    with tempfile.TemporaryDirectory(prefix="isotrain-by-hand-") as folder:
        job = Path(folder) / "job.json"
        np.savez(Path(folder) / "start.npz", **start)  # type: ignore[arg-type]
        fields = {
            "optimizer": spec["optimizer"],
            "model": getattr(spec["model"], "__name__", None),
            "drop_remainder": spec.get("drop_remainder", False),
            "start": f"{folder}/start.npz",
            "result": f"{folder}/result.npz",
            "replicas": replicas,
            "threads": plan.threads,
            "tensorflow_threads": plan.environment_variables.get("TF_NUM_INTRAOP_THREADS", "1"),
        }
        job.write_text(json.dumps(fields), encoding="utf-8")
        _start(
            SCRIPTS / f"{script}.py", job, backend, len(plan.processes), plan.environment_variables
        )
        with np.load(f"{folder}/result.npz") as archive:
            return dict(archive)


def _start(script: Path, job: Path, backend: str, world: int, variables: Mapping[str, str]) -> None:
    """Runs a script on every rank, and raises with their output when one fails."""
    with ExitStack() as stack:
        logs = [job.with_name(f"{rank}.log") for rank in range(world)]
        order = {
            "script": str(script),
            "job": str(job),
            "variables": [{**variables, **own} for own in _variables(backend, world, stack)],
            "logs": list(map(str, logs)),
        }
        host = _host(variables["KERAS_BACKEND"])
        assert host.stdin is not None
        assert host.stdout is not None
        print(json.dumps(order), file=host.stdin, flush=True)
        codes = json.loads(host.stdout.readline())
    if any(codes):
        told = [log.read_text()[-3000:] for log in logs]
        raise AssertionError(f"{script.name} ended with {codes}:\n" + "\n".join(told))


@functools.cache
def _host(framework: str) -> subprocess.Popen[str]:
    """A process of which ranks with this framework are forked; it ends with this one."""
    own = {"KERAS_BACKEND": framework, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    host = subprocess.Popen(
        [sys.executable, "-m", "conformance.handwritten.fork_server", "keras", framework],
        env={**os.environ, **own},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(host.kill)
    return host


def _variables(backend: str, world: int, stack: ExitStack) -> list[dict[str, str]]:
    """What a launcher of the framework would set for each rank."""
    if backend == "torch-ddp":
        (port,) = map(str, _own_ports(1, stack))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
        return [{**common, "RANK": str(rank)} for rank in range(world)]
    if backend == "tf-multiworker":
        cluster = {"worker": [f"127.0.0.1:{port}" for port in _own_ports(world, stack)]}
        configs = [
            {"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(world)
        ]
        return [{"TF_CONFIG": json.dumps(c), "RANK": str(r)} for r, c in enumerate(configs)]
    if backend.startswith("horovod"):
        return _horovod_variables(world, stack)
    return [{}]


def _horovod_variables(world: int, stack: ExitStack) -> list[dict[str, str]]:
    """What `horovodrun` sets, with its rendezvous server in this process."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer(verbose=0)
    port = server.start()
    stack.callback(server._httpd.server_close)  # which its own stop forgets
    stack.callback(server.stop)
    assignments = get_host_assignments(parse_hosts(f"127.0.0.1:{world}"), world)
    server.init(assignments)
    common = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_HOSTNAME": "127.0.0.1",
    }
    return [
        {
            **common,
            "RANK": str(slot.rank),
            "HOROVOD_RANK": str(slot.rank),
            "HOROVOD_SIZE": str(slot.size),
            "HOROVOD_LOCAL_RANK": str(slot.local_rank),
            "HOROVOD_LOCAL_SIZE": str(slot.local_size),
            "HOROVOD_CROSS_RANK": str(slot.cross_rank),
            "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        }
        for slot in assignments
    ]


def _own_ports(count: int, stack: ExitStack) -> tuple[int, ...]:
    """Ports that no other test and no run takes as long as the stack is open."""
    return stack.enter_context(closing(Ports())).take(count)
