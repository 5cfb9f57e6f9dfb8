"""`isotrain backends`, `strategies`, `plugins`, `doctor` and `schema`: what is available and works."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isotrain.core.cli.argument_types import option
from isotrain.core.cli.command import Command
from isotrain.core.cli.support import read_spec, warn_of_plugins
from isotrain.core.errors import PlanError
from isotrain.core.json_format import FORMAT, json_page
from isotrain.core.reporting.status import waiting

if TYPE_CHECKING:
    from isotrain.core.plugins.manager import PluginManager


def backends(options: argparse.Namespace) -> None:
    """Lists the backends."""
    from isotrain.core.planning import listings

    _list("backends", listings.backends, options)


def strategies(options: argparse.Namespace) -> None:
    """Lists the strategies and the backends each runs on."""
    from isotrain.core.planning import listings

    _list("strategies", listings.strategies, options)


def _list(
    kind: str, listing: Callable[[PluginManager], list[dict[str, Any]]], options: argparse.Namespace
) -> None:
    from isotrain.core.plugins.manager import plugin_manager

    host = plugin_manager()
    entries = listing(host)
    if options.json:
        print(json_page({"format": FORMAT, kind: entries, "plugin_faults": dict(host.faults)}))
        return
    from isotrain.core.reporting import text as texts

    sys.stdout.write({"backends": texts.backends, "strategies": texts.strategies}[kind](entries))
    warn_of_plugins(host)


def plugins(options: argparse.Namespace) -> None:
    """Lists the plugins, including those that failed to load."""
    from isotrain.core.plugins import selection
    from isotrain.core.plugins.hookspecs import API_VERSION
    from isotrain.core.plugins.manager import PluginManager

    spec_plugins = read_spec(options).plugins if options.spec else ()
    host = PluginManager(selection.current(), spec_plugins, strict=False)
    entries = [plugin.to_dict() for plugin in host.loaded]
    if options.json:
        print(json_page({"format": FORMAT, "api_version": API_VERSION, "plugins": entries}))
        return
    from isotrain.core.reporting import text as texts

    sys.stdout.write(texts.plugins(entries))


def doctor(options: argparse.Namespace) -> None:
    """Tries the backends, or the launchers of `--launcher`, on this machine."""
    from isotrain.core.planning.doctor import examine
    from isotrain.core.plugins.manager import plugin_manager

    host = plugin_manager()
    if options.launcher:
        if options.backend:
            raise PlanError(
                "doctor: it examines either backends or launchers; leave out --backend or --launcher."
            )
        _examine_launchers(host, options)
        return
    if options.launcher_option:
        raise PlanError("doctor: --launcher-option needs --launcher NAME too.")
    names = options.backend or host.backends.names()
    with waiting(f"loading {', '.join(names)}", quiet=options.quiet):
        report = examine(host, names)
    if options.json:
        print(json_page({"format": FORMAT, **report}))
        return
    from isotrain.core.reporting import text as texts

    sys.stdout.write(texts.doctor(report))


def _examine_launchers(host: PluginManager, options: argparse.Namespace) -> None:
    from isotrain.core.launching.scheduler.launcher_doctor import examine_launcher

    launcher_options = dict(options.launcher_option)
    reports = [examine_launcher(host, name, launcher_options) for name in options.launcher]
    if options.json:
        print(json_page({"format": FORMAT, "launchers": reports}))
        return
    from isotrain.core.reporting import launcher_text

    sys.stdout.write("\n".join(map(launcher_text.launcher_report, reports)))


def schema(options: argparse.Namespace) -> None:
    """Prints the JSON Schema of specs, with and without `--json`."""
    from isotrain.core.spec.loading import json_schema

    print(json.dumps(json_schema(), indent=2))


def _add_plugins_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "spec", metavar="SPEC", nargs="?", help="also load the plugins of this spec"
    )


def _add_doctor_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-b",
        "--backend",
        action="append",
        metavar="NAME",
        help="backend to load; may be repeated (default: every backend)",
    )
    command.add_argument(
        "--launcher",
        action="append",
        metavar="NAME",
        help="examine this launcher instead, and show what it lacks here; may be repeated",
    )
    command.add_argument(
        "--launcher-option",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the launcher; may be repeated",
    )


BACKENDS = Command(
    "backends",
    "list the backends",
    "Lists the backends, their collectives, and whether their packages are installed.\nLoads"
    " no framework; `isotrain doctor` loads and tries them.",
    """\
examples:
  isotrain backends
  isotrain backends --json""",
    module=__name__,
)
STRATEGIES = Command(
    "strategies",
    "list which strategy runs on which backend",
    "Lists for every strategy and backend whether it runs there, and why not, from what they declare.",
    """\
examples:
  isotrain strategies
  isotrain strategies --json""",
    module=__name__,
)
PLUGINS = Command(
    "plugins",
    "list the plugins",
    "Lists the plugins: what they registered, where they come from, and what is wrong with them.",
    """\
examples:
  isotrain plugins
  isotrain plugins digits.yaml                             also those that the spec names
  isotrain plugins --plugin my_strategy.py --json""",
    add_arguments=_add_plugins_arguments,
    module=__name__,
)
DOCTOR = Command(
    "doctor",
    "find out what works on this machine, and why not",
    "Loads each backend in a separate process, and shows for it and for each of its collectives:\n"
    "available or not, which version, why not, and what to do.",
    """\
examples:
  isotrain doctor
  isotrain doctor --backend {backend}
  isotrain doctor --launcher slurm
  isotrain doctor --launcher mpi --launcher-option hosts=node1:2,node2:2
  isotrain doctor --json > machine.json""",
    add_arguments=_add_doctor_arguments,
    module=__name__,
)
SCHEMA = Command(
    "schema",
    "print the JSON Schema of specs",
    "Prints the JSON Schema of spec files; editors complete and check specs with it.",
    """\
examples:
  isotrain schema > isotrain.schema.json

then, as the first line of a YAML spec, for editors:
  # yaml-language-server: $schema=isotrain.schema.json""",
    module=__name__,
)
