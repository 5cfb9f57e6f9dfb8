"""Seconds of a step of what `sharded_work` has, in processes that isotrain starts, and in torch's."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import isotrain
from benchmarks.sharded_work import BATCH, RATE, REPLICAS, STEPS, inputs, model, timed

Step = Callable[[int], object]


def data() -> isotrain.DataSet:
    """Noise."""
    return isotrain.DataSet((inputs(), inputs()))


def of_session(session: isotrain.Session) -> float:
    """A run's work."""
    return timed(functools.partial(session.step, batch) for batch in session.batches())


def by_isotrain(replicas: int, strategy: Any, backend: str = "torch-ddp", **changes: Any) -> float:
    """The slowest process's seconds; isotrain chooses its ports itself.

    Args:
        replicas: Number of replicas.
        strategy: Strategy as in a spec.
        backend: Name of the backend.
        changes: Other fields of the spec.
    """
    spec = {
        "model": {"torch": model},
        "data": data,
        "loss": "mean_squared_error",
        "optimizer": {"name": "adam", "lr": RATE},
        "global_batch_size": BATCH,
        "steps": STEPS,
        "threads": 1,
        "strategy": strategy,
        "evaluation": {"every_epochs": 0},
        **changes,
    }
    return float(max(isotrain.launch(of_session, spec, backend=backend, replicas=replicas)))


def by_hand(step_of: Callable[[int, str], Step], way: str, port: int) -> float:
    """The slowest process's seconds, of two that torch starts and that meet over Gloo.

    Args:
        step_of: Function of a module from a rank and a way to the step, called after the rendezvous.
        way: Name of the way that is measured.
        port: Port of the rendezvous.
    """
    found = mp.get_context("spawn").Manager().dict()
    mp.spawn(_process, (step_of, way, port, found), nprocs=REPLICAS)
    return float(max(found.values()))


def _process(
    rank: int, step_of: Callable[[int, str], Step], way: str, port: int, found: Any
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=REPLICAS)
    step = step_of(rank, way)
    found[rank] = timed(functools.partial(step, number) for number in range(STEPS))
    dist.barrier()
