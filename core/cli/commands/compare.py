"""The arguments of `isotrain compare` and `isotrain report`."""

from __future__ import annotations

import argparse
import re

from isotrain.core.cli.argument_types import name_with_options, positive_int, positive_ints
from isotrain.core.cli.command import Command
from isotrain.core.cli.common_options import add_launcher_arguments, add_spec_arguments

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def _add_compare_arguments(command: argparse.ArgumentParser) -> None:
    add_spec_arguments(command)
    _add_cells_arguments(command)
    _add_measuring_arguments(command)
    _add_results_arguments(command)


def _add_cells_arguments(command: argparse.ArgumentParser) -> None:
    """What is compared with what."""
    add = command.add_argument
    add(
        "--backend",
        action="append",
        metavar="NAME[:COLLECTIVE]",
        help="what to compare; may be repeated (default: all that can be used)",
    )
    add(
        "--replicas",
        type=positive_ints,
        metavar="N,N",
        help="with how many to measure each, such as 1,2,4 (default: 1; with --launcher as many as its hosts"
        " give)",
    )
    add(
        "--strategy",
        type=name_with_options,
        action="append",
        metavar="NAME[,OPTION=VALUE...]",
        help="under which to measure each, such as local-sgd,every=8; may be repeated (default: the spec's)",
    )
    add(
        "--python",
        action="append",
        type=_interpreter,
        default=[],
        metavar="BACKEND=PATH",
        help="interpreter that has this backend; may be repeated",
    )
    add_launcher_arguments(command)


def _add_measuring_arguments(command: argparse.ArgumentParser) -> None:
    """How much of each is run."""
    add = command.add_argument
    add(
        "--repeat",
        type=positive_int,
        metavar="N",
        help="runs of each cell, a backend with a number of replicas (default: 3)",
    )
    add(
        "--time-budget",
        type=_duration,
        metavar="T",
        help="such as 90s, 10m, 1h: add runs where the ranking is open, until then",
    )
    add(
        "--run-limit",
        type=_duration,
        metavar="T",
        help="end a run's timed steps after T, steady or not (default: 60s, or less with a budget)",
    )
    add(
        "--steps",
        type=positive_int,
        metavar="N",
        help="how many first steps to compare the losses of (default: 20)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the order of the runs (default: 0)")


def _add_results_arguments(command: argparse.ArgumentParser) -> None:
    """What becomes of the results."""
    add = command.add_argument
    add(
        "--reference",
        metavar="CELL",
        help="whose losses and plan the others' are compared with, such as torch-ddp@1 (default: the first)",
    )
    add(
        "--output",
        metavar="DIR",
        help="new or empty folder for the results (default: comparisons/NAME-TIME)",
    )
    add("--resume", action="store_true", help="go on with the comparison in --output")
    add("--against", metavar="OLD", help="folder or JSON file of an earlier one: show changes")
    add(
        "--fail-if-slower",
        type=_share,
        metavar="P",
        help="such as 5%%: exit code 5 if a cell is that much slower than in --against",
    )
    add("--quiet", action="store_true", help="print nothing but the result")


def _add_report_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", metavar="DIR", help="folder that compare wrote to")


def _duration(text: str) -> float:
    """Seconds of `90`, `90s`, `10m` or `1h30m`."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"expected a time such as 90s, 10m or 1h, got {text!r}")
    return sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a share such as 5% or 0.05, received {text!r}")
    return value


def _interpreter(text: str) -> tuple[str, str]:
    backend, equals, path = text.partition("=")
    if not (backend and equals and path):
        raise argparse.ArgumentTypeError(f"expected BACKEND=PATH, received {text!r}")
    return backend, path


COMPARE = Command(
    "compare",
    "measure backends side by side",
    "Measures every backend with every number of replicas, in new processes, in turn and\n"
    "several times, and says which is fastest, or that it cannot tell. docs/compare.md explains all.",
    """\
examples:
  isotrain compare digits.yaml --backend torch-ddp --backend tf-mirrored --replicas 1,2
  isotrain compare digits.yaml --replicas 1,2 --time-budget 10m --output today
  isotrain compare digits.yaml --replicas 1,2 --time-budget 10m --output today --resume
  isotrain compare digits.yaml --backend torch-ddp --against before --fail-if-slower 5%
  isotrain compare digits.yaml --backend torch-ddp --backend tf-multiworker:ring \\
      --python tf-multiworker=/home/me/tensorflow/bin/python""",
    add_arguments=_add_compare_arguments,
    module="isotrain.analysis.commands",
)
REPORT = Command(
    "report",
    "show a comparison again",
    "Makes the report of a comparison again from its stored results, and prints its tables.",
    """\
examples:
  isotrain report comparisons/digits-20260102-030405
  isotrain report today --json""",
    add_arguments=_add_report_arguments,
    module="isotrain.analysis.commands",
)
