"""Detects this process's rank and world size: queries every cluster environment, and resolves conflicts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from isotrain.core.contracts.cluster_environment import ClusterEnvironment, ClusterInfo
from isotrain.core.contracts.process import LOCALHOST, VARIABLE
from isotrain.core.errors import (
    ClusterInfoError,
    IsotrainError,
    PluginError,
    UnsupportedError,
    unknown_name,
)
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.quantities import counted

CHOICE_VARIABLE = "ISOTRAIN_ENVIRONMENT"
"""Environment variable with the one cluster environment to query; `none`: this process stands alone."""
NONE = "none"
COORDINATOR_VARIABLE = "ISOTRAIN_COORDINATOR"
"""Environment variable with `HOST` or `HOST:PORT` of rank 0, in place of what the launcher sets."""
JOB_VARIABLE = "ISOTRAIN_JOB"
"""Environment variable with an id of the job, in place of what the launcher sets."""
_COORDINATOR = re.compile(r"(?P<host>[^\s:]+)(?::(?P<port>[0-9]{1,5}))?")
_HIGHEST_PORT = 65535


@dataclass(frozen=True)
class _Answer:
    """Answer of one cluster environment: cluster info, or the error in its variables, or neither."""

    environment: ClusterEnvironment
    info: ClusterInfo | None = None
    fault: ClusterInfoError | None = None


def cluster_info_of(variables: Mapping[str, str], host: PluginManager) -> ClusterInfo | None:
    """Detects the cluster info (rank, world size, coordinator ...) from environment variables alone.

    Args:
        variables: Complete environment of a process.
        host: Plugin manager with the cluster environments.

    Returns:
        Cluster info; None if no launcher or scheduler started the process, as in an ordinary shell.

    Raises:
        ClusterInfoError: The variables of an environment are incomplete, or two environments match of which
            neither runs inside the other.
        PluginError: An environment raised another error.
        IsotrainError: `ISOTRAIN_ENVIRONMENT` names an unknown environment.
    """
    answers = {
        name: _query(host, name, variables) for name in _environments_to_query(variables, host)
    }
    infos = {name: answer.info for name, answer in answers.items() if answer.info is not None}
    inner = _innermost(answers, infos) if infos else None
    outer = answers[inner].environment.nested_in if inner else frozenset()
    for name, answer in answers.items():
        if answer.fault is not None and name not in outer:
            raise answer.fault
    return _complete(inner, infos, variables) if inner else None


def explain_rank(info: ClusterInfo) -> str:
    """Sentences for messages: why this process is a rank of a larger run, and how to make it stand alone."""
    return (
        f"Rank {info.rank} of {info.world_size} is what {', '.join(info.variables_read)} say"
        f" ({info.environment}). If they are left over in its shell, or that is one of `srun --pty`,"
        f" {CHOICE_VARIABLE}={NONE} has it train alone."
    )


def _environments_to_query(variables: Mapping[str, str], host: PluginManager) -> list[str]:
    """Names of the environments to query: the chosen one, or all."""
    registered = host.environments.names()
    chosen = variables.get(CHOICE_VARIABLE, "").strip()
    if not chosen:
        return registered
    if chosen not in (NONE, *registered):
        raise IsotrainError(
            f"{CHOICE_VARIABLE}: {unknown_name('environment', chosen, [NONE, *registered])}"
        )
    return [name for name in registered if name == chosen]


def _query(host: PluginManager, name: str, variables: Mapping[str, str]) -> _Answer:
    environment = host.environment(name)
    try:
        return _Answer(environment, environment.cluster_info(variables))
    except ClusterInfoError as error:
        error.args = (
            f"{error} Set {CHOICE_VARIABLE}={NONE} if this process stands alone, or"
            f" {CHOICE_VARIABLE}=NAME to name what started it.",
        )
        return _Answer(environment, fault=error)
    except Exception as error:  # of a third party's plugin
        raise PluginError(
            f"the environment {name!r} failed: {type(error).__name__}: {error}. Repair or block the"
            " plugin that registers it."
        ) from error


def _innermost(answers: Mapping[str, _Answer], infos: Mapping[str, ClusterInfo]) -> str:
    """The matching environment that can run inside of all other matching ones."""
    for name in infos:
        if answers[name].environment.nested_in >= infos.keys() - {name}:
            return name
    matches = "; ".join(
        f"{name} by {', '.join(info.variables_read)}" for name, info in infos.items()
    )
    raise ClusterInfoError(
        f"this process is claimed by {len(infos)} cluster environments, and none of them is known to run"
        f" inside of the others: {matches}. Unset the variables of those that did not start it, or name the"
        f" one that did: {CHOICE_VARIABLE}={next(iter(infos))}, or {CHOICE_VARIABLE}={NONE} if none did."
    )


def _complete(
    inner: str, infos: Mapping[str, ClusterInfo], variables: Mapping[str, str]
) -> ClusterInfo:
    """The inner environment's info, completed by the others and by the user's variables."""
    info = infos[inner]
    for other in infos.values():
        if (other.rank, other.world_size) == (info.rank, info.world_size):
            info = _fill_missing(info, other)
    if info.coordinator is None and info.local_world_size == info.world_size:
        info = replace(info, coordinator=LOCALHOST)
    info = replace(info, job=variables.get(JOB_VARIABLE) or info.job)
    coordinator = variables.get(COORDINATOR_VARIABLE, "").strip()
    if not coordinator:
        return info
    host, port = _parse_address(coordinator)
    return replace(info, coordinator=host, port=port)


def _parse_address(text: str) -> tuple[str, int | None]:
    match = _COORDINATOR.fullmatch(text)
    port = int(match["port"]) if match and match["port"] else None
    if match is None or (port is not None and not 0 < port <= _HIGHEST_PORT):
        raise ClusterInfoError(
            f"{COORDINATOR_VARIABLE}: expected HOST or HOST:PORT of rank 0, such as node1:20000, received"
            f" {text!r}."
        )
    return match["host"], port


def _fill_missing(info: ClusterInfo, other: ClusterInfo) -> ClusterInfo:
    """Fills the empty fields of `info` from another environment's info with the same rank and world size."""
    missing = [each.name for each in fields(info) if getattr(info, each.name) in (None, ())]
    return replace(info, **{name: getattr(other, name) for name in missing})


def detect_cluster_info() -> ClusterInfo | None:
    """Cluster info of this process; None if it stands alone, or is a rank of a local run.

    Raises:
        ClusterInfoError: The variables of an environment are incomplete, or two environments conflict.
    """
    if VARIABLE in os.environ:
        return None
    info = cluster_info_of(os.environ, plugin_manager())
    return info if info is not None and info.world_size > 1 else None


def require_single_process(what: str) -> None:
    """Refuses an operation that must run in one process, if a launcher has started several.

    Args:
        what: Name of the operation, for the message.

    Raises:
        UnsupportedError: This process is one of several.
    """
    info = detect_cluster_info()
    if info is not None:
        raise UnsupportedError(
            f"{what}: {info.environment} has started {counted(info.world_size, 'process')}, each of"
            " which would do all of"
            f" it for itself. Do it in one process: outside of {info.environment}, or with one task of it."
            f" {explain_rank(info)}"
        )
