"""Consistency checks of the rendezvous: configuration, hosts and file systems of all processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.core.checkpoints.folder import checkpoint_at
from isotrain.core.contracts.cluster_environment import ClusterInfo
from isotrain.core.contracts.plan import plain_differences
from isotrain.core.errors import IsotrainError, PlanError
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.rendezvous.interfaces import is_loopback
from isotrain.core.rendezvous.rendezvous import Facts, Rendezvous
from isotrain.core.system import hardware
from isotrain.core.system.files import is_url

_MAX_DIFFERENCES_SHOWN = 8
_MARKER_BYTES = 8


def plugins_of(host: PluginManager) -> dict[str, Any]:
    """Versions, states and registrations of all plugins, by plugin name."""
    return {
        plugin.candidate.name: {
            "version": plugin.candidate.version,
            "status": plugin.status,
            "registered": {kind: list(names) for kind, names in plugin.registered.items()},
        }
        for plugin in host.loaded
    }


def local_facts(cluster_info: ClusterInfo, address: str, port: int) -> dict[str, Any]:
    """Host, address, port, CPUs and GPUs of this process."""
    return {
        "host": cluster_info.host or socket.gethostname(),
        "local_rank": cluster_info.local_rank,
        "address": address,
        "port": port,
        "cpus": sorted(os.sched_getaffinity(0)),
        "gpus": hardware.visible_gpus(),
    }


def require_equal(rendezvous: Rendezvous, parts: Mapping[str, Any]) -> None:
    """Checks that all processes have the same configuration: JSON values by name. Collective.

    Raises:
        PlanError: The parts differ; names the ranks and the fields.
    """
    digests = {name: _digest(part) for name, part in parts.items()}
    host = rendezvous.cluster_info.host or socket.gethostname()
    decision = rendezvous.agree({"host": host, **digests}, _differing_parts)
    if decision["differing"]:
        differing = {name: parts[name] for name in decision["differing"]}
        rendezvous.agree({"host": host, **differing}, _raise_differences)


def _digest(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True, default=str).encode()).hexdigest()


def _differing_parts(facts: Sequence[Facts]) -> dict[str, Any]:
    names = [name for name in facts[0] if name != "host"]
    return {"differing": [n for n in names if any(each[n] != facts[0][n] for each in facts)]}


def _raise_differences(facts: Sequence[Facts]) -> dict[str, Any]:
    lines = []
    for rank, each in enumerate(facts):
        for name in each:
            if name != "host" and each[name] != facts[0][name]:
                lines += _difference_lines(rank, name, facts[0][name], each[name])
    raise PlanError(
        "the processes of the run do not agree:\n"
        + "\n".join(f"  {line}" for line in lines[:_MAX_DIFFERENCES_SHOWN])
        + ("\n  ..." if len(lines) > _MAX_DIFFERENCES_SHOWN else "")
        + f"\nRank 0 is on {facts[0]['host']}. Give every process the same command, files and packages."
    )


def _difference_lines(rank: int, name: str, rank_zero: Any, other: Any) -> list[str]:
    return [
        f"rank {rank}: {field} is {value!r:.120}, on rank 0 {expected!r:.120}"
        for field, expected, value in plain_differences({name: rank_zero}, {name: other})
    ]


class LocalRankAssignment:
    """Decision function: assigns local ranks, addresses, cores and GPUs from the facts of all processes."""

    def __init__(self, rank_zero_address: Callable[[Sequence[Facts]], str]) -> None:
        """Keeps the function by which rank 0 finds its own address."""
        self._rank_zero_address = rank_zero_address

    def __call__(self, facts: Sequence[Facts]) -> dict[str, Any]:
        hosts: dict[str, list[int]] = defaultdict(list)
        for rank, each in enumerate(facts):
            hosts[each["host"]].append(rank)
        local_ranks = {
            rank: local_rank
            for ranks in hosts.values()
            for rank, local_rank in _local_ranks(ranks, facts)
        }
        first = self._rank_zero_address(facts)
        processes = [
            {
                "host": each["host"],
                "local_rank": local_ranks[rank],
                "address": first
                if _has_first_address(rank, facts, len(hosts))
                else each["address"],
                "port": each["port"],
            }
            for rank, each in enumerate(facts)
        ]
        cores = min(_cores(ranks, facts) for ranks in hosts.values())
        gpus = min(each["gpus"] for each in facts)
        return {"processes": processes, "cores": cores, "gpus": gpus}


def _cores(ranks: Sequence[int], facts: Sequence[Facts]) -> int:
    """CPU cores for each process of a host, whether its processes share all CPUs or have separate ones."""
    cpus = {cpu for rank in ranks for cpu in facts[rank]["cpus"]}
    return max(1, len(cpus) // len(ranks))


def _local_ranks(ranks: Sequence[int], facts: Sequence[Facts]) -> list[tuple[int, int]]:
    """Pairs of rank and local rank: the launcher's if they are 0..n-1, else in the order of the ranks."""
    local_ranks = [facts[rank]["local_rank"] for rank in ranks]
    if set(local_ranks) == set(range(len(ranks))):
        return list(zip(ranks, local_ranks, strict=True))
    return [(rank, index) for index, rank in enumerate(ranks)]


def _has_first_address(rank: int, facts: Sequence[Facts], hosts: int) -> bool:
    """Whether a process has rank 0's address; on rank 0's host it may have connected over loopback."""
    each, first = facts[rank], facts[0]
    return rank == 0 or (
        each["host"] == first["host"] and (hosts == 1 or is_loopback(each["address"]))
    )


@contextlib.contextmanager
def marker_file(folder: Path) -> Iterator[str]:
    """Context in which a folder has a uniquely named file: who sees it, sees this folder. Yields its path."""
    marker = folder.absolute() / f".seen-{secrets.token_hex(_MARKER_BYTES)}"
    marker.touch()
    try:
        yield str(marker)
    finally:
        marker.unlink(missing_ok=True)


def checkpoint_token(location: str | None) -> str | None:
    """Token that identifies a checkpoint; None: it is not visible here.

    Without a location ("None") and for a URL, which is the same everywhere, the token is the text itself.
    """
    if location is None or is_url(location):
        return str(location)
    try:
        return checkpoint_at(location).token
    except (IsotrainError, OSError):
        return None
