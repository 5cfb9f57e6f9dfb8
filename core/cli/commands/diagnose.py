"""The arguments of `isotrain check` and `isotrain parity`; `isotrain.analysis.commands` runs them."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import (
    comma_separated,
    name_with_options,
    positive_int,
    positive_ints,
)
from isotrain.core.cli.command import Command
from isotrain.core.cli.common_options import (
    add_launcher_arguments,
    add_spec_arguments,
    add_strategy_argument,
)


def _add_check_arguments(command: argparse.ArgumentParser) -> None:
    add_spec_arguments(command)
    command.add_argument(
        "-b",
        "--backend",
        type=comma_separated,
        action="extend",
        metavar="NAME[:COLLECTIVE],...",
        help="backends to check for; may be repeated (default: that of the spec,"
        " or auto: the first that is available here)",
    )
    command.add_argument(
        "-n",
        "--replicas",
        type=positive_ints,
        metavar="N,...",
        help="numbers of replicas to check for, such as 1,2,4 (default: one per usable GPU, or one)",
    )
    add_strategy_argument(command)
    command.add_argument(
        "--ignore",
        type=comma_separated,
        action="extend",
        default=[],
        metavar="CODE",
        help="leave out findings with this code, or of a group such as ISO4; may be repeated",
    )
    command.add_argument(
        "--strict", action="store_true", help="end with exit code 4 also when there are only notes"
    )
    command.add_argument(
        "--no-measure",
        action="store_true",
        help="start no process to load the data and build the model: quick, but finds less",
    )


def _add_parity_arguments(command: argparse.ArgumentParser) -> None:
    add_spec_arguments(command)
    command.add_argument(
        "other",
        nargs="?",
        metavar="TRACE",
        help="a trace of `isotrain trace` to compare a run of SPEC with, or a trace in place of SPEC; the"
        " first one is the reference",
    )
    command.add_argument(
        "-b",
        "--backend",
        type=comma_separated,
        action="extend",
        metavar="NAME[:COLLECTIVE],...",
        help="backends to run on; may be repeated, and the first is the reference (default: that of the spec,"
        " or auto: the first that is available here)",
    )
    command.add_argument(
        "-n",
        "--replicas",
        type=positive_ints,
        metavar="N,...",
        help="numbers of replicas to run each backend with; the first is the reference's (default: 1; with"
        " --launcher as many as its hosts have slots)",
    )
    command.add_argument(
        "--strategy",
        type=name_with_options,
        action="append",
        metavar="NAME[,OPTION=VALUE...]",
        help="strategy to run under; repeat it: the first is the reference's (default: the spec's)",
    )
    add_launcher_arguments(command)
    command.add_argument(
        "--bits",
        action="store_true",
        help="runs have to be equal to the bit, as with `reproducible: bits`: names the first step and tensor"
        " with other bits, and how many",
    )
    command.add_argument(
        "--steps",
        type=positive_int,
        metavar="N",
        help="number of steps to trace (default: 10); of traces, to compare (default: all)",
    )
    command.add_argument(
        "--map",
        metavar="FILE",
        help="for native models: names of the same tensor on each backend; see docs/parity.md",
    )
    command.add_argument(
        "--output",
        metavar="DIR",
        help="write parity.json, report.html and every fingerprint to this folder",
    )


def _add_trace_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--output", metavar="DIR", help="folder of the trace (default: a new one in this folder)"
    )
    command.add_argument(
        "--steps",
        type=positive_int,
        default=20,
        metavar="N",
        help="number of steps of each optimizer to record (default: 20)",
    )
    command.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="-- PROGRAM",
        help="-- and the program with its arguments, such as: -- torchrun --nproc-per-node 2 train.py",
    )


CHECK = Command(
    "check",
    "warn of what makes results differ",
    "Reports, before anything is trained, what will make results differ between backends or numbers\n"
    "of replicas, why, and what to do. Ends with exit code 4 when there are errors or warnings.",
    """\
examples:
  isotrain check digits.yaml --backend {backend} --replicas 1,2
  isotrain check digits.yaml --backend {backend} --backend {other} --replicas 1,4
  isotrain check digits.yaml --backend {other} --replicas 8 --ignore ISO101 --ignore ISO4""",
    add_arguments=_add_check_arguments,
    module="isotrain.analysis.commands",
)
PARITY = Command(
    "parity",
    "find where two runs of a spec diverge, and why",
    "Runs a few steps of a spec on several backends, numbers of replicas or strategies, compares\n"
    "gradients, weights, optimizer state and all other state with those of the first, and reports whether\n"
    "the difference is rounding, and if not, at which step and tensor runs diverge, and the likely cause.\n"
    "Ends with exit code 6 where runs diverge.",
    """\
examples:
  isotrain parity digits.yaml --backend {backend} --backend {other}
  isotrain parity digits.yaml --backend {backend} --backend {other} --replicas 1,2 --steps 20
  isotrain parity digits.yaml --backend {backend} --replicas 2 \\
      --strategy data-parallel --strategy hierarchical
  isotrain parity digits.yaml --backend {backend} --replicas 1,2,3 --bits --set reproducible=bits
  isotrain parity native.yaml --backend {backend} --backend {other} --map names.yaml --output parity
  isotrain parity one two                                        of `isotrain trace`
  isotrain parity one digits.yaml --backend {backend}            a trace, and a run of a spec""",
    add_arguments=_add_parity_arguments,
    module="isotrain.analysis.commands",
)
TRACE = Command(
    "trace",
    "record how a training program of your own trains",
    "Runs a program and records, for each process and step, a hash of its samples, losses, fingerprints of\n"
    "gradients, weights and optimizer state, the optimizer's options, clipping and collectives. The program\n"
    "stays as it is. `isotrain parity A B` then says where two programs part, and why.",
    """\
examples:
  isotrain trace --output one -- python train.py
  isotrain trace --output two -- torchrun --nproc-per-node 2 train_ddp.py
  isotrain parity one two""",
    add_arguments=_add_trace_arguments,
    module="isotrain.analysis.program_trace.commands",
)
