"""Rendezvous of processes that are threads here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.errors import IsotrainError
from isotrain.core.launching.processes.ports import Ports
from isotrain.core.rendezvous.rendezvous import Rendezvous, RendezvousClient, RendezvousHost
from isotrain.core.rendezvous.shared_secret import RunKey
from isotrain.core.transport.channel import Channel
from isotrain.core.transport.encryption import EncryptionOffer
from isotrain.core.transport.rank_zero_server import RankZeroServer, connect_to_rank_zero

LOCAL = "127.0.0.1"
LONG = 30.0
PLAIN = EncryptionOffer()
Part = Callable[[Rendezvous], Any]


def place(rank: int, size: int, job: str = "job") -> ClusterInfo:
    return ClusterInfo("torchrun", ("RANK",), rank, size, job, host=f"n{rank}")


def key(job: str = "job", number: int = 0, own: bytes = b"own") -> RunKey:
    return RunKey.of(place(0, 2, job), own, number)


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    with contextlib.closing(Ports()) as ports:
        yield ports.take(1)[0]


def meet(
    parts: Mapping[int, Part],
    size: int,
    *,
    seconds: float = LONG,
    folders: Mapping[int, str] | None = None,
) -> dict[int, Any]:
    """Results or errors of every rank, each on a thread.

    Args:
        parts: Function of each rank; ranks without one never connect.
        size: World size of the run.
        seconds: Time limit of each step.
        folders: Certificate folder of each rank that encrypts.
    """
    found: dict[int, Any] = {}
    offers = {rank: EncryptionOffer.from_folder((folders or {}).get(rank, "")) for rank in parts}

    def run_rank(rank: int, port: int) -> None:
        own = key()
        try:
            with contextlib.closing(
                opened(rank, size, own, port, seconds, offers[rank])
            ) as rendezvous:
                found[rank] = parts[rank](rendezvous)
        except IsotrainError as error:
            found[rank] = error

    with free_port() as port:
        threads = [threading.Thread(target=run_rank, args=(rank, port)) for rank in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def opened(
    rank: int, size: int, own: RunKey, port: int, seconds: float, offer: EncryptionOffer = PLAIN
) -> Rendezvous:
    if rank == 0:
        return RendezvousHost(
            place(0, size), own, seconds, RankZeroServer(LOCAL, [port], own.secret, offer)
        )
    connection = connect_to_rank_zero(LOCAL, [port], own.secret, rank, seconds, offer)
    return RendezvousClient(place(rank, size), own, seconds, Channel(connection))


def settling(judge: Any = lambda told: {"ranks": [each["rank"] for each in told]}) -> Part:
    def part(rendezvous: Rendezvous) -> Any:
        with rendezvous.broadcasting_errors():
            rank = rendezvous.cluster_info.rank
            return rendezvous.agree({"rank": rank, "host": f"n{rank}"}, judge)

    return part
