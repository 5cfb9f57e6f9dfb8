"""Who this process is: asks every environment, and settles what several of them say."""

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

CHOICE_VARIABLE = "ISOTRAIN_ENVIRONMENT"
"""The one environment to ask, instead of all; `none`: no engine started this process."""
NONE = "none"
COORDINATOR_VARIABLE = "ISOTRAIN_COORDINATOR"
"""The host of rank 0, or `HOST:PORT`, where the engine does not tell it or tells another."""
JOB_VARIABLE = "ISOTRAIN_JOB"
"""A name of what was started, where the engine gives none."""
_COORDINATOR = re.compile(r"(?P<host>[^\s:]+)(?::(?P<port>[0-9]{1,5}))?")
_HIGHEST_PORT = 65535


@dataclass(frozen=True)
class _Asked:
    """What one environment answered: a place, or what is wrong with its variables, or neither."""

    environment: ClusterEnvironment
    place: ClusterInfo | None = None
    fault: ClusterInfoError | None = None


def cluster_info_of(variables: Mapping[str, str], host: PluginManager) -> ClusterInfo | None:
    """The place of the process that has these variables. A pure function of them.

    Args:
        variables: All of a process's.
        host: Knows the environments.

    Returns:
        None where no engine started it, as in an ordinary shell.

    Raises:
        ClusterInfoError: The variables of an engine are half set, or two engines claim the process of which
            neither runs inside the other.
        PluginError: An environment raised something else.
        IsotrainError: `ISOTRAIN_ENVIRONMENT` names none.
    """
    asked = {name: _ask(host, name, variables) for name in _to_ask(variables, host)}
    claims = {name: each.place for name, each in asked.items() if each.place is not None}
    inner = _innermost(asked, claims) if claims else None
    outer = asked[inner].environment.nested_in if inner else frozenset()
    for name, each in asked.items():
        if each.fault is not None and name not in outer:
            raise each.fault
    return _completed(inner, claims, variables) if inner else None


def claim(place: ClusterInfo) -> str:
    """Says in messages of a joined run why this process joins it, and how to have it stand alone."""
    return (
        f"Rank {place.rank} of {place.world_size} is what {', '.join(place.variables_read)} say"
        f" ({place.environment})."
        " If they are left over in its shell, or that is one of `srun --pty`,"
        f" {CHOICE_VARIABLE}={NONE} has it train alone."
    )


def _to_ask(variables: Mapping[str, str], host: PluginManager) -> list[str]:
    known = host.environments.names()
    chosen = variables.get(CHOICE_VARIABLE, "").strip()
    if not chosen:
        return known
    if chosen not in (NONE, *known):
        raise IsotrainError(
            f"{CHOICE_VARIABLE}: {unknown_name('environment', chosen, [NONE, *known])}"
        )
    return [name for name in known if name == chosen]


def _ask(host: PluginManager, name: str, variables: Mapping[str, str]) -> _Asked:
    environment = host.environment(name)
    try:
        return _Asked(environment, environment.cluster_info(variables))
    except ClusterInfoError as error:
        error.args = (
            f"{error} {CHOICE_VARIABLE}={NONE} says that no engine started this process, and"
            f" {CHOICE_VARIABLE}=NAME which one did.",
        )
        return _Asked(environment, fault=error)
    except Exception as error:  # an environment may be anyone's
        raise PluginError(
            f"the environment {name!r} failed: {type(error).__name__}: {error}. Repair or block the"
            " plugin that registers it."
        ) from error


def _innermost(asked: Mapping[str, _Asked], claims: Mapping[str, ClusterInfo]) -> str:
    """The one engine that all others that claim the process may have started."""
    for name in claims:
        if asked[name].environment.nested_in >= claims.keys() - {name}:
            return name
    told = "; ".join(
        f"{name} by {', '.join(place.variables_read)}" for name, place in claims.items()
    )
    raise ClusterInfoError(
        f"this process is claimed by {len(claims)} engines, and none of them is known to run inside of"
        f" the others: {told}. Unset the variables of those that did not start it, or name the one that"
        f" did: {CHOICE_VARIABLE}={next(iter(claims))}, or {CHOICE_VARIABLE}={NONE} where none did."
    )


def _completed(
    inner: str, claims: Mapping[str, ClusterInfo], variables: Mapping[str, str]
) -> ClusterInfo:
    """The inner engine's claim, with what it leaves open and others or the person say."""
    place = claims[inner]
    for other in claims.values():
        if (other.rank, other.world_size) == (place.rank, place.world_size):
            place = _with_what_is_open(place, other)
    if place.coordinator is None and place.local_world_size == place.world_size:
        place = replace(place, coordinator=LOCALHOST)
    place = replace(place, job=variables.get(JOB_VARIABLE) or place.job)
    said = variables.get(COORDINATOR_VARIABLE, "").strip()
    if not said:
        return place
    host, port = _host_and_port(said)
    return replace(place, coordinator=host, port=port)


def _host_and_port(text: str) -> tuple[str, int | None]:
    match = _COORDINATOR.fullmatch(text)
    port = int(match["port"]) if match and match["port"] else None
    if match is None or (port is not None and not 0 < port <= _HIGHEST_PORT):
        raise ClusterInfoError(
            f"{COORDINATOR_VARIABLE}: expected HOST or HOST:PORT of rank 0, such as node1:20000, received"
            f" {text!r}."
        )
    return match["host"], port


def _with_what_is_open(place: ClusterInfo, other: ClusterInfo) -> ClusterInfo:
    """Where two engines say the same of rank and number, one started the other's processes as they are."""
    is_open = [each.name for each in fields(place) if getattr(place, each.name) in (None, ())]
    return replace(place, **{name: getattr(other, name) for name in is_open})


def detect_cluster_info() -> ClusterInfo | None:
    """This process's place among others; None where it is alone, or belongs to a run already.

    Raises:
        ClusterInfoError: The variables of an engine are half set, or two engines claim the process.
    """
    if VARIABLE in os.environ:
        return None
    place = cluster_info_of(os.environ, plugin_manager())
    return place if place is not None and place.world_size > 1 else None


def require_single_process(what: str) -> None:
    """Refuses what is done once, for a run or for several, where an engine starts it on every rank.

    Raises:
        UnsupportedError: This process has a place among others.
    """
    place = detect_cluster_info()
    if place is not None:
        raise UnsupportedError(
            f"{what}: {place.environment} has started {place.world_size} processes, each of"
            " which would do all of"
            f" it for itself. Do it in one process: outside of {place.environment}, or with one task of it."
            f" {claim(place)}"
        )
