"""The arguments of `isotrain compare` and `isotrain report`; `isotrain.analysis.commands` runs them."""

from __future__ import annotations

import argparse
import re

from isotrain.core.cli.argument_types import (
    RUN_HELP,
    comma_separated,
    name_with_options,
    positive_int,
    positive_ints,
    run_location,
)
from isotrain.core.cli.command import Command
from isotrain.core.cli.common_options import add_launcher_arguments, add_spec_arguments

_COMPARISON_HELP = "its folder or JSON file"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def _add_compare_arguments(command: argparse.ArgumentParser) -> None:
    add_spec_arguments(command)
    _add_cells_arguments(command)
    _add_measuring_arguments(command)
    _add_results_arguments(command)


def _add_cells_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments that say what to compare."""
    add = command.add_argument
    add(
        "-b",
        "--backend",
        type=comma_separated,
        action="extend",
        metavar="NAME[:COLLECTIVE],...",
        help="backends to measure; may be repeated (default: all that are available)",
    )
    add(
        "-n",
        "--replicas",
        type=positive_ints,
        metavar="N,...",
        help="numbers of replicas to measure each backend with, such as 1,2,4 (default: 1; with --launcher,"
        " as many as its hosts have slots)",
    )
    add(
        "--strategy",
        type=name_with_options,
        action="append",
        metavar="NAME[,OPTION=VALUE...]",
        help="strategy to measure each backend under, such as local-sgd,every=8; may be repeated (default:"
        " the spec's)",
    )
    add(
        "--interpreter",
        action="append",
        type=_interpreter,
        default=[],
        metavar="BACKEND=PATH",
        help="Python interpreter that has this backend installed; may be repeated",
    )
    add_launcher_arguments(command)


def _add_measuring_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments that say how often and how long to measure."""
    add = command.add_argument
    add(
        "--repeats",
        type=positive_int,
        metavar="N",
        help="runs per cell; a cell is a backend with a number of replicas and a strategy (default: 3)",
    )
    add(
        "--time-budget",
        type=_duration,
        metavar="T",
        help="time such as 90s, 10m or 1h in which to add runs where the ranking is undecided",
    )
    add(
        "--run-limit",
        type=_duration,
        metavar="T",
        help="end the timed steps of a run after T, steady or not (default: 60s, or less with a budget)",
    )
    add(
        "--steps",
        type=positive_int,
        metavar="N",
        help="number of first steps whose losses are compared (default: 20)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the order of runs (default: 0)")


def _add_results_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments about the results."""
    add = command.add_argument
    add(
        "--reference",
        metavar="CELL",
        help="cell with whose losses and plan the others are compared, such as NAME@1 (default: the first)",
    )
    add(
        "--output",
        metavar="DIR",
        help="new or empty folder for the results (default: NAME-TIME in ISOTRAIN_COMPARISONS, else in"
        " comparisons)",
    )
    add(
        "--resume",
        metavar="DIR",
        help="continue the comparison in this folder, which must be of the same spec; instead of --output",
    )
    add(
        "--against",
        metavar="COMPARISON",
        help=f"show changes since an earlier comparison: {_COMPARISON_HELP}",
    )
    add(
        "--fail-if-slower",
        type=_fraction,
        metavar="FRACTION",
        help="end with exit code 5 if a cell is slower than in --against by this much, such as 5%%",
    )


def _add_report_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "results",
        metavar="RESULTS",
        type=run_location,
        help=f"a comparison or parity check: {_COMPARISON_HELP}; or {RUN_HELP}",
    )
    command.add_argument(
        "--follow",
        action="store_true",
        help="write the report of a run again and again until the run has ended",
    )
    command.add_argument("--open", action="store_true", help="open the report in a browser")


def _duration(text: str) -> float:
    """Parses `90`, `90s`, `10m` or `1h30m` to seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(
            f"expected a time such as 90s, 10m or 1h, received {text!r}"
        )
    return sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)


def _fraction(text: str) -> float:
    """Parses `5%` or `0.05`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(
            f"expected a fraction such as 5% or 0.05, received {text!r}"
        )
    return value


def _interpreter(text: str) -> tuple[str, str]:
    """Parses `BACKEND=PATH`."""
    backend, equals, path = text.partition("=")
    if not (backend and equals and path):
        raise argparse.ArgumentTypeError(f"expected BACKEND=PATH, received {text!r}")
    return backend, path


COMPARE = Command(
    "compare",
    "measure backends side by side",
    "Measures every backend with every number of replicas, several times and in turn, each run in new\n"
    "processes, and reports which is fastest, or that it is undecided. docs/compare.md explains how.",
    """\
examples:
  isotrain compare digits.yaml --backend {backend} --backend {other} --replicas 1,2
  isotrain compare digits.yaml --replicas 1,2 --time-budget 10m --output today
  isotrain compare digits.yaml --replicas 1,2 --time-budget 10m --resume today
  isotrain compare digits.yaml --backend {backend} --against before --fail-if-slower 5%
  isotrain compare digits.yaml --backend {backend} --backend {other} \\
      --interpreter {other}=/home/me/other/bin/python""",
    add_arguments=_add_compare_arguments,
    module="isotrain.analysis.commands",
)
REPORT = Command(
    "report",
    "make the page of a comparison, a run or a parity check",
    "Writes report.html from what is stored, also while a run goes on, and prints its path. docs/report.md\n"
    "explains the pages.",
    """\
examples:
  isotrain report comparisons/digits-20260102-030405
  isotrain report last --follow --open
  isotrain report today --json""",
    add_arguments=_add_report_arguments,
    module="isotrain.analysis.commands",
)
