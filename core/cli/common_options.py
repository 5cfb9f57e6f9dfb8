"""Arguments that many commands share: what to train, and on what."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import name_with_options, option, positive_int


def add_spec_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "spec",
        metavar="SPEC",
        help="what to train: a file (.yaml, .toml, .json), script.py:NAME of a spec in a script, or"
        " env:NAME of a variable that has one as JSON",
    )
    add_override_arguments(command)


def add_override_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the spec, such as optimizer.lr=0.05; values are YAML; may be repeated",
    )


def add_strategy_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--strategy",
        type=name_with_options,
        metavar="NAME[,OPTION=VALUE...]",
        help="how replicas cooperate, such as local-sgd,every=8; `isotrain strategies` lists all"
        " (default: the spec's)",
    )


def add_backend_arguments(
    command: argparse.ArgumentParser, *, required: bool, default: str | None = None
) -> None:
    command.add_argument(
        "--backend",
        required=required,
        metavar="NAME[:COLLECTIVE]",
        help="what to run on, such as tf-multiworker:ring; `isotrain backends` lists all",
    )
    add_strategy_argument(command)
    add_launcher_arguments(command, default)
    command.add_argument(
        "--replicas",
        type=positive_int,
        metavar="N",
        help="how many copies of the model train together"
        f" (default: {default or 'one per usable GPU, or one'})",
    )


def add_launcher_arguments(command: argparse.ArgumentParser, default: str | None = None) -> None:
    command.add_argument(
        "--launcher",
        default=None if default else "local",
        metavar="NAME",
        help=f"what starts the processes; `isotrain launchers` lists all (default: {default or 'local'})",
    )
    command.add_argument(
        "--launcher-option",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the launcher, such as nodes=2 of slurm; may be repeated",
    )
