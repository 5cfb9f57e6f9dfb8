"""The arguments of `isotrain find`; `isotrain.analysis.find.commands` runs it."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import positive_int
from isotrain.core.cli.command import Command
from isotrain.core.cli.common_options import add_backend_arguments, add_spec_arguments


def _add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("what", choices=("rate", "batch"), help="what to search for")
    add_spec_arguments(command)
    add_backend_arguments(command)
    command.add_argument(
        "--steps",
        type=positive_int,
        metavar="N",
        help="number of steps: of the run for a rate (default: 100), of each trial of a batch (default: 3)",
    )
    command.add_argument(
        "--first-rate",
        type=float,
        metavar="RATE",
        help="rate of the first step (default: 1e-7)",
    )
    command.add_argument(
        "--last-rate", type=float, metavar="RATE", help="rate of the last step (default: 10)"
    )
    command.add_argument(
        "--output",
        metavar="FILE",
        help="file for a plot of the losses over the rates: .png or .svg",
    )
    command.add_argument(
        "--first-batch",
        type=positive_int,
        metavar="N",
        help="first global batch size (default: the spec's)",
    )
    command.add_argument(
        "--largest-batch",
        type=positive_int,
        metavar="N",
        help="largest global batch size to try (default: the number of training samples)",
    )


FIND = Command(
    "find",
    "find a learning rate, or the largest global batch",
    "Searches by short runs, of which nothing remains. For a rate it trains while the rate rises, and\n"
    "suggests the one at which the loss falls fastest. For a batch it doubles the global batch until\n"
    "memory runs out, then bisects; each trial has processes of its own.",
    """\
examples:
  isotrain find rate digits.yaml --backend {backend} --output rates.png
  isotrain find batch digits.yaml --backend {backend} --replicas 2 --largest-batch 4096""",
    add_arguments=_add_arguments,
    module="isotrain.analysis.find.commands",
)
