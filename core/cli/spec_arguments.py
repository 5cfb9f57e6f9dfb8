"""Arguments that many commands share: what to train, and on what."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import choice, count, option


def describe_spec(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "spec",
        metavar="SPEC",
        help="what to train: a file (.yaml, .toml, .json), script.py:NAME of a spec in a script, or"
        " env:NAME of a variable that has one as JSON",
    )
    describe_changes(command)


def describe_changes(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the spec, such as optimizer.lr=0.05; values are YAML; may be repeated",
    )


def describe_strategy(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--strategy",
        type=choice,
        metavar="NAME[,OPTION=VALUE...]",
        help="how replicas cooperate, such as local-sgd,every=8; `isotrain strategies` lists all"
        " (default: the spec's)",
    )


def describe_target(
    command: argparse.ArgumentParser, *, required: bool, default: str | None = None
) -> None:
    command.add_argument(
        "--backend",
        required=required,
        metavar="NAME[:COLLECTIVE]",
        help="what to run on, such as tf-multiworker:ring; `isotrain backends` lists all",
    )
    describe_strategy(command)
    describe_launcher(command, default)
    command.add_argument(
        "--replicas",
        type=count,
        metavar="N",
        help="how many copies of the model train together"
        f" (default: {default or 'one per usable GPU, or one'})",
    )


def describe_launcher(command: argparse.ArgumentParser, default: str | None = None) -> None:
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
