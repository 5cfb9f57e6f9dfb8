"""`isotrain config`: asks a few questions and writes a launch script and the skeleton of a spec."""

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
    """Asks for what options leave open (in a terminal only), and writes the files."""
    from isotrain.core.launching.scheduler.launch_script import Launch, write_launch
    from isotrain.core.spec.training_spec import TrainingSpec

    host, asks = plugin_manager(), sys.stdin.isatty() and not options.json
    backends, launchers = host.backends.names(), host.launchers.names()
    precisions = get_args(TrainingSpec.model_fields["precision"].annotation)
    launch = Launch(
        backend=_choose("backend", options.backend, backends, _default_backend(host), asks),
        launcher=_choose("launcher", options.launcher, launchers, LOCAL, asks),
        launcher_options=tuple(options.launcher_option),
        replicas=options.replicas or (_ask_number("replicas") if asks else None),
        precision=_choose("precision", options.precision, precisions, precisions[0], asks),
        spec=None if options.spec is None else str(Path(options.spec).resolve()),
    )
    host.launcher(launch.launcher, dict(map(option, launch.launcher_options)))
    files = [str(path) for path in write_launch(launch, Path(options.directory))]
    if options.json:
        print(json_page({"format": FORMAT, "files": files, "command": launch.command}))
        return
    print(*files, sep="\n")


def _default_backend(host: PluginManager) -> str:
    """The first backend that is installed; without any, the first of all."""
    names = host.backends.names()
    return next((name for name in names if host.backend(name).availability().available), names[0])


def _choose(
    kind: str, option_value: str | None, names: Sequence[str], default: str, asks: bool
) -> str:
    """One of the names: the option's value, the user's answer, or the default."""
    if option_value is not None:
        return _validated(kind, option_value, names)
    while asks:
        answer = input(f"{kind} ({', '.join(names)}) [{default}]: ").strip() or default
        try:
            return _validated(kind, answer, names)
        except IsotrainError as error:
            print(error)
    return default


def _validated(kind: str, choice: str, names: Sequence[str]) -> str:
    name = split_backend(choice)[0] if kind == "backend" else choice
    if name not in names:
        raise IsotrainError(unknown_name(kind, name, names))
    return choice


def _ask_number(kind: str) -> int | None:
    """The user's answer, at least 1; None for one per available device."""
    while True:
        answer = input(f"{kind} [one for each usable device]: ").strip()
        if not answer:
            return None
        if answer.isascii() and answer.isdecimal() and int(answer) > 0:
            return int(answer)
        print(f"{kind}: expected a whole number of at least 1, received {answer!r}.")


def _add_config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--backend",
        metavar="NAME[:COLLECTIVE]",
        help="backend to run on; `isotrain backends` lists all",
    )
    command.add_argument(
        "--launcher",
        metavar="NAME",
        help="launcher that starts the processes; `isotrain launchers` lists all",
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
        help="number of replicas (copies of the model that train together)",
    )
    command.add_argument(
        "--precision", metavar="TYPE", help="precision, such as float32 or bfloat16"
    )
    command.add_argument(
        "--spec", metavar="SPEC", help="an existing spec; no skeleton is written then"
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
    "Asks for what options leave open, and writes a script that launches a training, and the\n"
    "skeleton of its spec. Outside of a terminal nothing is asked: defaults are taken.",
    """\
examples:
  isotrain config
  isotrain config --backend torch-ddp --replicas 2 --directory digits
  isotrain config --backend tf-multiworker:ring --launcher slurm --launcher-option nodes=2 \\
      --spec digits.yaml""",
    add_arguments=_add_config_arguments,
    module=__name__,
)
