"""What texts on the command line stand for; each is a `type` of argparse."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any, Literal


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    return _whole_number(text, 1, None)


def non_negative_int(text: str) -> int:
    """A whole number of at least 0."""
    return _whole_number(text, 0, None)


def int_from_two(text: str) -> int:
    """A whole number of at least 2."""
    return _whole_number(text, 2, None)


def positive_ints(text: str) -> list[int]:
    """Whole numbers of at least 1, between commas."""
    return [positive_int(part) for part in comma_separated(text)]


def ranks(text: str) -> list[int] | Literal["all"]:
    """Whole numbers of at least 0, between commas; or `all`."""
    return "all" if text == "all" else [non_negative_int(part) for part in comma_separated(text)]


def comma_separated(text: str) -> list[str]:
    """Texts between commas."""
    return [part.strip() for part in text.split(",")]


def name_with_options(text: str) -> dict[str, Any]:
    """A strategy or logger, `NAME[,OPTION=VALUE...]`, as a spec has it; values are YAML."""
    name, *pairs = re.split(r",(?=\s*\w+\s*=)", text)
    if not re.fullmatch(r"[^\s,=]+", name):
        raise argparse.ArgumentTypeError(f"expected NAME[,OPTION=VALUE...], received {text!r}")
    options = (pair.partition("=") for pair in pairs)
    return {"name": name, "options": {o.strip(): _yaml(value) for o, _, value in options}}


def option(text: str) -> tuple[str, Any]:
    """`NAME=VALUE` of a launcher; the value is YAML, and a text where that has no other meaning."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, received {text!r}")
    return name.strip(), _yaml(value)


@dataclass(frozen=True)
class PlanTarget:
    """One side of `plan --diff`.

    Attributes:
        text: As it was given.
        backend: `NAME[:COLLECTIVE]`.
        replicas: None where it does not say.
        strategy: As `choice` gives it; None where it does not say.
    """

    text: str
    backend: str
    replicas: int | None
    strategy: dict[str, Any] | None


def target(text: str) -> PlanTarget:
    """`NAME[:COLLECTIVE][@REPLICAS][ STRATEGY]`, as `compare` calls its cells."""
    where, _, strategy = text.partition(" ")
    backend, at, replicas = where.partition("@")
    if at and not (replicas.isdecimal() and int(replicas)):
        raise argparse.ArgumentTypeError(
            "expected NAME[:COLLECTIVE][@REPLICAS][ STRATEGY] with REPLICAS of at least 1,"
            f" received {text!r}"
        )
    return PlanTarget(
        text,
        backend,
        int(replicas) if at else None,
        name_with_options(strategy) if strategy else None,
    )


def _yaml(text: str) -> Any:
    from isotrain.core.spec import yaml_loader

    try:
        return yaml_loader.load(text)
    except yaml_loader.TextError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not YAML: {error.reason}") from None


def port(text: str) -> int:
    """A port."""
    return _whole_number(text, 1, 65535)


def _whole_number(text: str, least: int, most: int | None) -> int:
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    value = int(text) if text.isdecimal() else least - 1
    if value < least or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, received {text!r}")
    return value
