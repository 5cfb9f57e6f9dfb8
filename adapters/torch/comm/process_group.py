"""torch's default process group, and collectives over process groups."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isotrain.adapters.common.wait_for_server import wait_for_rank_zero
from isotrain.adapters.torch.comm import recorded_group
from isotrain.adapters.torch.comm.base import Communicator, Wait
from isotrain.plugin import (
    RECORDED,
    BackendConfig,
    PeerLostError,
    PlanError,
    ProcessContext,
    ReduceOp,
)

_POLL_SECONDS = 0.001
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def start_process_group(backend_config: BackendConfig, context: ProcessContext) -> None:
    """Joins torch's default process group. Called by every process; a local run listens on loopback only.

    Rank 0 serves the store and has a connection to it besides, as the others: torch's caches may keep a
    process group and its connection, and must not keep the port.

    Raises:
        PlanError: The rendezvous port is in use.
    """
    wait_for_rank_zero(context, is_interrupted=_INTERRUPTED.is_set)
    host, port = context.rendezvous
    timeout = timedelta(seconds=backend_config.timeout)
    if host in ("127.0.0.1", "localhost"):
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    connect = functools.partial(
        dist.TCPStore,
        host,
        port,
        context.world_size,
        timeout=timedelta(seconds=context.join_seconds or backend_config.timeout),
        wait_for_workers=False,
    )
    if context.rank == 0:
        _STORES.append(connect(is_master=True, master_listen_fd=_listen(host, port)))
    store: dist.Store = connect(is_master=False)
    if context.join_seconds is not None:
        store = InterruptibleStore(store)
        _STORES.append(store)
    if backend_config.collective == RECORDED:
        recorded_group.register()
    dist.init_process_group(
        backend_config.collective,
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
    )


_INTERRUPTED = threading.Event()
"""Set while this process is to wait for no other member of its process group."""


_STORES: list[dist.Store] = []
"""Stores that live as long as the process group, which does not keep them.

Rank 0's server, and stores of Python, of which the group keeps the part in C++ alone.
"""


class InterruptibleStore(dist.Store):
    """Store of a process group that is formed while members may be lost: `interrupt` ends its waits."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Blocks until all keys are set.

        Raises:
            PeerLostError: A member is lost, or a key was not set in time.
        """
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while not self._store.check(keys):
            if _INTERRUPTED.is_set() or time.monotonic() > deadline:
                raise PeerLostError(f"a member of the process group is lost: no {', '.join(keys)}")
            time.sleep(_POLL_SECONDS)


def interrupt_process_group() -> None:
    """Ends the wait for other members while a process group is formed. Local; on any thread."""
    _INTERRUPTED.set()


def destroy_process_group() -> None:
    """Destroys torch's default process group; rank 0 stops listening. Local."""
    dist.destroy_process_group()
    _STORES.clear()


def abandon_process_group() -> None:
    """Destroys torch's default process group, without waiting for other members. Local."""
    if not dist.is_initialized():  # or only half: torch counts groups, and by this begins anew
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    destroy_process_group()
    _INTERRUPTED.clear()


def _listen(host: str, port: int) -> int:
    """Opens the TCPStore's listening socket on one address: torch itself would listen on all of them."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    )  # a previous run's connections may be in TIME_WAIT
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise PlanError(
            f"rank 0 cannot listen on {host}:{port}: {error.strerror}. Choose another"
            " port, or let isotrain choose one."
        ) from error
    return listener.detach()


def sends_by_host(device: torch.device) -> bool:
    """Whether point-to-point transfers go through host memory: Gloo cannot send tensors of a GPU."""
    return device.type != "cpu" and dist.get_backend() == dist.Backend.GLOO


class ProcessGroupCommunicator(Communicator):
    """Abstract communicator with `all_reduce` and `all_gather` over a torch process group."""

    _peers: Any = None
    """Process group of all replicas; None for torch's default group."""

    def all_reduce(self, value: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        result = value.clone()
        dist.all_reduce(result, _OPERATIONS[op], group=self._peers)
        return result.div_(self.replicas) if op == "mean" else result

    def all_reduce_async(self, value: torch.Tensor, op: ReduceOp) -> Wait:
        result = value.clone()
        work = dist.all_reduce(result, _OPERATIONS[op], group=self._peers, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return result.div_(self.replicas) if op == "mean" else result

        return wait

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        result = value.new_empty((self.replicas, *value.shape))
        dist.all_gather(list(result.unbind(0)), value.contiguous(), group=self._peers)
        return result

    def all_gather_async(self, value: torch.Tensor) -> Wait:
        result = value.new_empty((self.replicas, *value.shape))
        rows = list(result.unbind(0))
        work = dist.all_gather(rows, value.contiguous(), group=self._peers, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return result

        return wait
