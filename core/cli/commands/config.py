"""The arguments of `isotrain config`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from isotrain.core.cli.argument_types import option, positive_int
from isotrain.core.cli.command import Command
from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.contracts.plan import split_backend
from isotrain.core.errors import IsotrainError, unknown_name
from isotrain.core.json_format import FORMAT, json_page
from isotrain.core.plugins.manager import PluginManager, plugin_manager


def config(options: argparse.Namespace) -> None:
    """Asks, and writes what launches a training."""
    from isotrain.core.launching.scheduler.launch_script import Launch, write_launch
    from isotrain.core.spec.training_spec import TrainingSpec

    host, asks = plugin_manager(), sys.stdin.isatty() and not options.json
    precisions = get_args(TrainingSpec.model_fields["precision"].annotation)
    launch = Launch(
        backend=_chosen("backend", options.backend, host.backends.names(), _usable(host), asks),
        launcher=_chosen("launcher", options.launcher, host.launchers.names(), LOCAL, asks),
        launcher_options=tuple(options.launcher_option),
        replicas=options.replicas or (_number("replicas") if asks else None),
        precision=_chosen("precision", options.precision, precisions, precisions[0], asks),
        spec=None if options.spec is None else str(Path(options.spec).resolve()),
    )
    host.launcher(launch.launcher, dict(map(option, launch.launcher_options)))
    files = [str(path) for path in write_launch(launch, Path(options.directory))]
    if options.json:
        print(json_page({"format": FORMAT, "files": files, "command": launch.command}))
        return
    print(*files, sep="\n")


def _usable(host: PluginManager) -> str:
    """The first backend that is installed; the first of all where none is."""
    names = host.backends.names()
    return next((name for name in names if host.backend(name).availability().available), names[0])


def _chosen(what: str, given: str | None, known: Sequence[str], default: str, asks: bool) -> str:
    """One of the known names: as an option gives it, as a person answers, or the default."""
    if given is not None:
        return _checked(what, given, known)
    while asks:
        answer = input(f"{what} ({', '.join(known)}) [{default}]: ").strip() or default
        try:
            return _checked(what, answer, known)
        except IsotrainError as error:
            print(error)
    return default


def _checked(what: str, name: str, known: Sequence[str]) -> str:
    own = split_backend(name)[0] if what == "backend" else name
    if own not in known:
        raise IsotrainError(unknown_name(what, own, known))
    return name


def _number(what: str) -> int | None:
    """A whole number of at least 1, as a person answers; None: one for each device."""
    while True:
        answer = input(f"{what} [one for each usable device]: ").strip()
        if not answer:
            return None
        if answer.isascii() and answer.isdecimal() and int(answer) > 0:
            return int(answer)
        print(f"{what}: expected a whole number of at least 1, received {answer!r}.")


def _add_config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--backend",
        metavar="NAME[:COLLECTIVE]",
        help="what to run on; `isotrain backends` lists all",
    )
    command.add_argument(
        "--launcher",
        metavar="NAME",
        help="what starts the processes; `isotrain launchers` lists all",
    )
    command.add_argument(
        "--launcher-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the launcher, such as nodes=2 of slurm; may be repeated",
    )
    command.add_argument(
        "--replicas",
        type=positive_int,
        metavar="N",
        help="how many copies of the model train together",
    )
    command.add_argument("--precision", metavar="TYPE", help="such as float32 or bfloat16")
    command.add_argument(
        "--spec", metavar="SPEC", help="a spec that is there already; no skeleton is written then"
    )
    command.add_argument(
        "--directory",
        default=".",
        metavar="DIR",
        help="where to write launch.sh and train.yaml (default: here)",
    )


CONFIG = Command(
    "config",
    "write a script that launches a training",
    "Asks a few questions, where options do not answer them, and writes a script that launches a\n"
    "training, and the skeleton of its spec. Outside of a terminal nothing is asked: defaults are taken.",
    """\
examples:
  isotrain config
  isotrain config --backend torch-ddp --replicas 2 --directory digits
  isotrain config --backend tf-multiworker:ring --launcher slurm --launcher-option nodes=2 \\
      --spec digits.yaml""",
    add_arguments=_add_config_arguments,
    module="isotrain.core.cli.commands.config",
)
