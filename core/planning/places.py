"""Who this process is: asks every environment, and settles what several of them say."""

from __future__ import annotations

from collections.abc import Mapping

from isotrain.core.contracts.environment import Environment, Place
from isotrain.core.errors import IsotrainError, PlaceError, PluginError, unknown_name
from isotrain.core.plugins.host import PluginHost

CHOICE_VARIABLE = "ISOTRAIN_ENVIRONMENT"
"""The one environment to ask, instead of all; `none`: no engine started this process."""
NONE = "none"


def place_of(variables: Mapping[str, str], host: PluginHost) -> Place | None:
    """The place of the process that has these variables. A pure function of them.

    Args:
        variables: All of a process's.
        host: Knows the environments.

    Returns:
        None where no engine started it, as in an ordinary shell.

    Raises:
        PlaceError: The variables of an engine are half set, or two engines claim the process of which
            neither runs inside the other.
        PluginError: An environment raised something else.
        IsotrainError: `ISOTRAIN_ENVIRONMENT` names none.
    """
    claims = {}
    for name in _asked(variables, host):
        environment = host.environment(name)
        place = _place(environment, name, variables)
        if place is not None:
            claims[name] = (environment, place)
    return _innermost(claims) if claims else None


def _asked(variables: Mapping[str, str], host: PluginHost) -> list[str]:
    known = host.environments.names()
    chosen = variables.get(CHOICE_VARIABLE, "").strip()
    if not chosen:
        return known
    if chosen not in (NONE, *known):
        raise IsotrainError(
            f"{CHOICE_VARIABLE}: {unknown_name('environment', chosen, [NONE, *known])}"
        )
    return [name for name in known if name == chosen]


def _place(environment: Environment, name: str, variables: Mapping[str, str]) -> Place | None:
    try:
        return environment.place(variables)
    except IsotrainError as error:
        error.args = (
            f"{error} {CHOICE_VARIABLE}={NONE} says that no engine started this process, and"
            f" {CHOICE_VARIABLE}=NAME which one did.",
        )
        raise
    except Exception as error:  # an environment may be anyone's
        raise PluginError(
            f"the environment {name!r} failed: {type(error).__name__}: {error}. Repair or block the"
            " plugin that registers it."
        ) from error


def _innermost(claims: Mapping[str, tuple[Environment, Place]]) -> Place:
    """The claim of the one engine that all others that claim the process may have started."""
    for name, (environment, place) in claims.items():
        if environment.inside >= claims.keys() - {name}:
            return place
    told = "; ".join(f"{name} by {', '.join(p.told_by)}" for name, (_, p) in claims.items())
    raise PlaceError(
        f"this process is claimed by {len(claims)} engines, and none of them is known to run inside of"
        f" the others: {told}. Unset the variables of those that did not start it, or name the one that"
        f" did: {CHOICE_VARIABLE}={next(iter(claims))}."
    )
