"""What the processes of a joined run tell each other before it begins, and what must be the same."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.contracts.plan import plain_differences
from isotrain.core.errors import PlanError
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.rendezvous.interfaces import is_loopback
from isotrain.core.rendezvous.rendezvous import Facts, Rendezvous
from isotrain.core.system import hardware

_MOST_SHOWN = 8


def plugins_of(host: PluginManager) -> dict[str, Any]:
    """What is known of every plugin that must be the same everywhere, by name."""
    return {
        each.candidate.name: {
            "version": each.candidate.version,
            "status": each.status,
            "registered": {kind: list(names) for kind, names in each.registered.items()},
        }
        for each in host.loaded
    }


def local_facts(place: ClusterInfo, address: str, port: int) -> dict[str, Any]:
    """Where this process is, and what it has there."""
    return {
        "host": place.host or socket.gethostname(),
        "local_rank": place.local_rank,
        "address": address,
        "port": port,
        "cpus": sorted(os.sched_getaffinity(0)),
        "gpus": hardware.visible_gpus(),
    }


def require_equal(meeting: Rendezvous, parts: Mapping[str, Any]) -> None:
    """Sees that all processes have the same of each part. Called by all.

    Args:
        meeting: Of the processes.
        parts: Name to JSON values.

    Raises:
        PlanError: Names the rank and what differs.
    """
    digests = {name: _digest(part) for name, part in parts.items()}
    host = meeting.place.host or socket.gethostname()
    found = meeting.agree({"host": host, **digests}, _differing)
    if found["differing"]:
        own = {name: parts[name] for name in found["differing"]}
        meeting.agree({"host": host, **own}, _refuse)


def _digest(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()


def _differing(told: Sequence[Facts]) -> dict[str, Any]:
    names = [name for name in told[0] if name != "host"]
    return {"differing": [n for n in names if any(each[n] != told[0][n] for each in told)]}


def _refuse(told: Sequence[Facts]) -> dict[str, Any]:
    lines = []
    for rank, each in enumerate(told):
        for name in each:
            if name != "host" and each[name] != told[0][name]:
                lines += _lines(rank, name, told[0][name], each[name])
    raise PlanError(
        "the processes of the run do not agree:\n"
        + "\n".join(f"  {line}" for line in lines[:_MOST_SHOWN])
        + ("\n  ..." if len(lines) > _MOST_SHOWN else "")
        + f"\nRank 0 is on {told[0]['host']}. Give every process the same command, files and packages."
    )


def _lines(rank: int, name: str, first: Any, other: Any) -> list[str]:
    one, two = ({name: part} for part in (first, other))
    return [
        f"rank {rank}: {field} is {mine!r:.120}, on rank 0 {his!r:.120}"
        for field, his, mine in plain_differences(one, two)
    ]


class LocalRankAssignment:
    """Judges where everybody is, from what all have told."""

    def __init__(self, first_address: Callable[[Sequence[Facts]], str]) -> None:
        """Takes how rank 0 finds out its own address."""
        self._first_address = first_address

    def __call__(self, told: Sequence[Facts]) -> dict[str, Any]:
        hosts: dict[str, list[int]] = defaultdict(list)
        for rank, each in enumerate(told):
            hosts[each["host"]].append(rank)
        local = {rank: own for ranks in hosts.values() for rank, own in _local_ranks(ranks, told)}
        here = self._first_address(told)
        seats = [
            {
                "host": each["host"],
                "local_rank": local[rank],
                "address": here if _is_beside(rank, told, len(hosts)) else each["address"],
                "port": each["port"],
            }
            for rank, each in enumerate(told)
        ]
        cores = min(_cores(ranks, told) for ranks in hosts.values())
        gpus = min(each["gpus"] for each in told)
        return {"processes": seats, "cores": cores, "gpus": gpus}


def _cores(ranks: Sequence[int], told: Sequence[Facts]) -> int:
    """That each process of a host may use: they may share all, or have their own."""
    together = {cpu for rank in ranks for cpu in told[rank]["cpus"]}
    return max(1, len(together) // len(ranks))


def _local_ranks(ranks: Sequence[int], told: Sequence[Facts]) -> list[tuple[int, int]]:
    """Those that the engine told, where they make sense; else in the order of the ranks."""
    given = [told[rank]["local_rank"] for rank in ranks]
    if set(given) == set(range(len(ranks))):
        return list(zip(ranks, given, strict=True))
    return [(rank, place) for place, rank in enumerate(ranks)]


def _is_beside(rank: int, told: Sequence[Facts], hosts: int) -> bool:
    """Whether a process is reached as rank 0 is; one on its host may have called by the loopback address."""
    each, first = told[rank], told[0]
    return rank == 0 or (
        each["host"] == first["host"] and (hosts == 1 or is_loopback(each["address"]))
    )
