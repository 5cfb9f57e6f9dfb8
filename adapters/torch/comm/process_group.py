"""torch's default process group, and collectives over process groups."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isotrain.adapters.common.wait_for_server import wait_for_rank_zero
from isotrain.adapters.torch.comm import recorded_group
from isotrain.adapters.torch.comm.base import Communicator
from isotrain.plugin import RECORDED, BackendConfig, PlanError, ProcessContext, ReduceOp

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def start_process_group(backend_config: BackendConfig, context: ProcessContext) -> None:
    """Joins torch's default process group. Called by every process; a local run listens on loopback only.

    Raises:
        PlanError: The rendezvous port is in use.
    """
    wait_for_rank_zero(context)
    host, port = context.rendezvous
    timeout = timedelta(seconds=backend_config.timeout)
    if host in ("127.0.0.1", "localhost"):
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    store = dist.TCPStore(
        host,
        port,
        context.world_size,
        is_master=context.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=_listen(host, port) if context.rank == 0 else None,
    )
    if backend_config.collective == RECORDED:
        recorded_group.register()
    dist.init_process_group(
        backend_config.collective,
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
    )


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

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        result = value.new_empty((self.replicas, *value.shape))
        dist.all_gather(list(result.unbind(0)), value.contiguous(), group=self._peers)
        return result
