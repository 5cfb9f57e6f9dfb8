"""Parsers of argument values; each is a `type` of argparse and raises `ArgumentTypeError`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any, Literal

RUN_HELP = "the run: its directory, its name in the runs folder, or `last`"
"""Help of an argument of the type `run_location`."""


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
    """Comma-separated whole numbers of at least 1."""
    return [positive_int(part) for part in comma_separated(text)]


def ranks(text: str) -> list[int] | Literal["all"]:
    """Comma-separated whole numbers of at least 0; or `all`."""
    return "all" if text == "all" else [non_negative_int(part) for part in comma_separated(text)]


def comma_separated(text: str) -> list[str]:
    """Comma-separated texts, without spaces around them."""
    return [part.strip() for part in text.split(",")]


def name_with_options(text: str) -> dict[str, Any]:
    """A strategy or logger, `NAME[,OPTION=VALUE...]`, as the mapping of a spec; values are YAML."""
    name, *pairs = re.split(r",(?=\s*\w+\s*=)", text)
    if not re.fullmatch(r"[^\s,=]+", name):
        raise argparse.ArgumentTypeError(f"expected NAME[,OPTION=VALUE...], received {text!r}")
    options = (pair.partition("=") for pair in pairs)
    return {"name": name, "options": {key.strip(): _yaml(value) for key, _, value in options}}


def run_location(text: str) -> str:
    """The path or URL of a run or checkpoint, from a path, a bare name of a run, or `last`."""
    from isotrain.core.launching.run_directory.run_directory import locate_run

    return locate_run(text)


def option(text: str) -> tuple[str, Any]:
    """An option, `NAME=VALUE`; the value is YAML, so a text unless it reads as a number or the like."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, received {text!r}")
    return name.strip(), _yaml(value)


@dataclass(frozen=True)
class PlanTarget:
    """One side of `plan --diff`.

    Attributes:
        text: The argument itself.
        backend: `NAME[:COLLECTIVE]`.
        replicas: Number of replicas; None for the default.
        strategy: Strategy as from `name_with_options`; None for the spec's.
    """

    text: str
    backend: str
    replicas: int | None
    strategy: dict[str, Any] | None


def target(text: str) -> PlanTarget:
    """`NAME[:COLLECTIVE][@REPLICAS][ STRATEGY]`, as `compare` names its cells."""
    cell, _, strategy = text.partition(" ")
    backend, at, replicas = cell.partition("@")
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
    """A TCP port, from 1 to 65535."""
    return _whole_number(text, 1, 65535)


def _whole_number(text: str, minimum: int, maximum: int | None) -> int:
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    value = int(text) if text.isdecimal() else minimum - 1
    if value < minimum or (maximum is not None and value > maximum):
        raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, received {text!r}")
    return value
