"""Arguments that several commands share: the spec, backend, strategy, launcher and replicas."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import name_with_options, option, positive_int


def add_spec_arguments(command: argparse.ArgumentParser) -> None:
    """Adds SPEC and `--set`."""
    command.add_argument(
        "spec",
        metavar="SPEC",
        help="what to train: a file (.yaml, .toml, .json), script.py:NAME of a spec in a script, or"
        " env:NAME of an environment variable that holds a spec as JSON",
    )
    add_override_arguments(command)


def add_override_arguments(command: argparse.ArgumentParser) -> None:
    """Adds `--set`."""
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the spec, such as optimizer.lr=0.05; values are YAML; may be repeated",
    )


def add_strategy_argument(command: argparse.ArgumentParser) -> None:
    """Adds `--strategy`."""
    command.add_argument(
        "--strategy",
        type=name_with_options,
        metavar="NAME[,OPTION=VALUE...]",
        help="how replicas cooperate, such as local-sgd,every=8; `isotrain strategies` lists all"
        " (default: the spec's)",
    )


def add_backend_arguments(command: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Adds `--backend`, `--strategy`, `--launcher`, `--launcher-option` and `--replicas`."""
    command.add_argument(
        "-b",
        "--backend",
        metavar="NAME[:COLLECTIVE]",
        help="backend to run on; `isotrain backends` lists all (default: that"
        " of the run or spec, or auto: the first that is available here)",
    )
    add_strategy_argument(command)
    add_launcher_arguments(command, default)
    command.add_argument(
        "-n",
        "--replicas",
        type=positive_int,
        metavar="N",
        help="number of replicas (copies of the model that train together)"
        f" (default: {default or 'one per usable GPU, or one'})",
    )


def add_launcher_arguments(command: argparse.ArgumentParser, default: str | None = None) -> None:
    """Adds `--launcher` and `--launcher-option`."""
    command.add_argument(
        "--launcher",
        default=None if default else "local",
        metavar="NAME",
        help="launcher that starts the processes; `isotrain launchers` lists all"
        f" (default: {default or 'local'})",
    )
    command.add_argument(
        "--launcher-option",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the launcher, such as nodes=2 of slurm; may be repeated",
    )
