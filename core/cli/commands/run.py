"""`isotrain run`, `resume` and `plan`: training, and what a training would do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isotrain.core.cli.argument_types import (
    RUN_HELP,
    name_with_options,
    non_negative_int,
    port,
    positive_int,
    ranks,
    run_location,
    target,
)
from isotrain.core.cli.command import Command
from isotrain.core.cli.commands import launchers
from isotrain.core.cli.common_options import (
    add_backend_arguments,
    add_override_arguments,
    add_spec_arguments,
)
from isotrain.core.cli.support import read_spec_with_choices
from isotrain.core.contracts.events import RESULT
from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.errors import PlanError, RunFailedError
from isotrain.core.json_format import FORMAT, json_page, prefixed_line

if TYPE_CHECKING:
    from isotrain.core.cli.argument_types import PlanTarget
    from isotrain.core.contracts.events import OnPlainEvent
    from isotrain.core.contracts.plan import Plan
    from isotrain.core.results.result import RunResult
    from isotrain.core.spec.training_spec import TrainingSpec


def run(options: argparse.Namespace) -> None:
    """Trains, and prints the result."""
    from isotrain.core import api
    from isotrain.core.cli import internal_work

    if options.internal_work:
        internal_work.refuse_other_options(options)
    spec = read_spec_with_choices(options)
    if options.dry_run:
        launchers.dry_run(spec, options)
        return
    for name, value in (
        ("--return-files", options.return_files),
        ("--internal-work", options.internal_work),
    ):
        if value and not (options.json and options.line_prefix and options.output):
            raise PlanError(f"{name}: give --json, --line-prefix TEXT and --output too.")
    if options.internal_work:
        internal_work.do_internal_work(spec, options)
        return
    _train(
        options,
        lambda on_event: api.run(
            spec,
            output=options.output,
            on_event=on_event,
            resume=options.resume,
            **_launch_options(options),
        ),
    )


def resume(options: argparse.Namespace) -> None:
    """Continues a run, and prints the result."""
    from isotrain.core import api
    from isotrain.core.launching.run_directory.run_directory import SPEC_FILE, RunDirectory

    options.spec = options.spec or str(RunDirectory.reopen(options.run).path / SPEC_FILE)
    spec = read_spec_with_choices(options)
    _train(
        options,
        lambda on_event: api.resume(
            options.run, spec=spec, on_event=on_event, **_launch_options(options)
        ),
    )


def _launch_options(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments that `isotrain.run` and `isotrain.resume` share."""
    names = (
        *("backend", "replicas", "port", "launcher", "max_restarts", "ranks", "interface"),
        *("quiet", "verbose"),
    )
    launcher_options = dict(options.launcher_option)
    return {name: getattr(options, name) for name in names} | {"launcher_options": launcher_options}


def _train(
    options: argparse.Namespace, training: Callable[[OnPlainEvent | None], RunResult]
) -> None:
    """Shows the progress of a training, and prints its result."""
    from isotrain.core.cli.run_output import (
        is_result_printed_by_rank_zero,
        progress_display,
        returning_files,
    )

    try:
        with progress_display(options) as on_event, returning_files(options, on_event):
            result = training(on_event)
    except RunFailedError as failure:
        if failure.result is not None and not is_result_printed_by_rank_zero(options):
            _print_result(failure.result, options)
        raise
    if not is_result_printed_by_rank_zero(options):
        _print_result(result, options)


def _print_result(result: RunResult, options: argparse.Namespace) -> None:
    if options.json:
        print(prefixed_line({"event": RESULT, **result.to_dict()}, options.line_prefix), flush=True)
    else:
        from isotrain.core.reporting import text as texts

        sys.stdout.write(texts.result(result))


def plan(options: argparse.Namespace) -> None:
    """Prints a plan, or the differences between two."""
    from isotrain.core.reporting import launcher_text
    from isotrain.core.reporting import text as texts

    spec = read_spec_with_choices(options)
    if options.hosts or options.gpus_per_host or options.gpu:
        _print_gpu_plan(spec, options)
        return
    if options.diff:
        _print_differences(spec, options)
        return
    resolved = _plan(spec, options.backend, options.replicas, options)
    preview = launchers.submission_preview(spec, resolved)
    if options.json:
        print(json_page({"format": FORMAT, "plan": resolved.to_dict(), **preview}))
    else:
        sys.stdout.write(texts.plan(resolved) + launcher_text.submission_preview(preview))


def _print_gpu_plan(spec: TrainingSpec, options: argparse.Namespace) -> None:
    """Prints the plan of a run on GPUs of hosts elsewhere."""
    from isotrain.core import api
    from isotrain.core.reporting import text as texts

    if options.gpus_per_host is None:
        raise PlanError(
            "plan: --hosts and --gpu plan for GPUs elsewhere; give --gpus-per-host N too."
        )
    chosen = {
        "--diff": options.diff,
        "--replicas": options.replicas,
        "--no-measure": options.no_measure,
    }
    chosen |= {
        "--launcher": options.launcher != LOCAL,
        "--launcher-option": options.launcher_option,
    }
    for name in filter(chosen.get, chosen):
        raise PlanError(
            f"plan: --gpus-per-host decides the processes and measures; leave {name} out."
        )
    made = api.gpu_plan(
        spec,
        backend=options.backend,
        hosts=options.hosts or 1,
        gpus_per_host=options.gpus_per_host,
        gpu=options.gpu,
        quiet=options.quiet,
    )
    if options.json:
        fields = {"plan": made.plan.to_dict(), "gpus": made.to_dict()}
        print(json_page({"format": FORMAT, **fields}))
    else:
        sys.stdout.write(texts.plan(made.plan) + "\n" + texts.gpu_plan(made.to_dict()))


def _print_differences(spec: TrainingSpec, options: argparse.Namespace) -> None:
    from isotrain.core.contracts.plan import differences
    from isotrain.core.reporting import text as texts

    if options.backend is not None:
        raise PlanError("plan: --diff A B names both backends; leave --backend out.")
    first, second = (_plan_target(spec, target, options) for target in options.diff)
    changes = differences(first, second)
    names = [target.text for target in options.diff]
    if options.json:
        rows = [{"field": field, "first": a, "second": b} for field, a, b in changes]
        sides = dict(zip(("first", "second"), names, strict=True))
        print(json_page({"format": FORMAT, **sides, "differences": rows}))
    else:
        sys.stdout.write(texts.differences(names, changes))


def _plan_target(spec: TrainingSpec, target: PlanTarget, options: argparse.Namespace) -> Plan:
    spec = spec.with_strategy(target.strategy) if target.strategy else spec
    return _plan(spec, target.backend, target.replicas or options.replicas, options)


def _plan(
    spec: TrainingSpec, backend: str | None, replicas: int | None, options: argparse.Namespace
) -> Plan:
    from isotrain.core import api

    launcher_choice = {
        "launcher": options.launcher,
        "launcher_options": dict(options.launcher_option),
    }
    if options.no_measure:
        return api.plan(spec, backend=backend, replicas=replicas, **launcher_choice)
    return api.measured_plan(
        spec, backend=backend, replicas=replicas, quiet=options.quiet, **launcher_choice
    )


def _add_run_arguments(command: argparse.ArgumentParser) -> None:
    add_spec_arguments(command)
    add_backend_arguments(command)
    command.add_argument(
        "--output",
        metavar="DIR",
        help="new or empty folder for the run's files (default: NAME-TIME in ISOTRAIN_RUNS, else in runs)",
    )
    command.add_argument(
        "--logger",
        type=name_with_options,
        action="append",
        default=[],
        metavar="NAME[,OPTION=VALUE...]",
        help="also record the run with this logger: csv, jsonl, tensorboard, ...; may be repeated",
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="only write what the launcher would submit to its scheduler, such as a script for sbatch",
    )
    command.add_argument(
        "--return-files",
        action="store_true",
        help=argparse.SUPPRESS,
    )
    command.add_argument(
        "--internal-work",
        metavar="JSON",
        help=argparse.SUPPRESS,
    )
    command.add_argument(
        "--resume",
        type=run_location,
        metavar="FROM",
        help="continue from a checkpoint, or the newest of a folder or run directory; `auto`: from the newest"
        " in --output or the spec's checkpoint.folder, if there is one",
    )
    _add_supervision_arguments(command)


def _add_resume_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", type=run_location, metavar="RUN", help=RUN_HELP)
    command.add_argument(
        "--spec",
        metavar="SPEC",
        help="what to train instead of the run's spec",
    )
    add_override_arguments(command)
    add_backend_arguments(command, default="the run's")
    _add_supervision_arguments(command)


def _add_plan_arguments(command: argparse.ArgumentParser) -> None:
    add_spec_arguments(command)
    add_backend_arguments(command)
    command.add_argument(
        "--diff",
        nargs=2,
        type=target,
        metavar=("A", "B"),
        help="instead of --backend: print the differences between two plans, each given as"
        " 'NAME[:COLLECTIVE][@REPLICAS][ STRATEGY]'",
    )
    command.add_argument(
        "--no-measure",
        action="store_true",
        help="start no process to count samples, parameters and bytes: quick, but shows less",
    )
    command.add_argument(
        "--hosts",
        type=positive_int,
        metavar="N",
        help="plan for GPUs of so many hosts elsewhere (default with --gpus-per-host: 1)",
    )
    command.add_argument(
        "--gpus-per-host",
        type=positive_int,
        metavar="N",
        help="number of GPUs of each host elsewhere: also counts collectives and what a GPU must hold",
    )
    command.add_argument(
        "--gpu",
        metavar="NAME",
        help="a100, h100, h200 or b200: also says whether the run fits, and bounds the time of a step",
    )


def _profile_steps(text: str) -> int:
    """A number of steps to profile; the spec after a bare `--profile` reaches this too."""
    try:
        return positive_int(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}; give a number as --profile=STEPS, and a bare --profile after the spec"
        ) from None


def _add_supervision_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--port",
        type=port,
        metavar="PORT",
        help="use this port and those after it, one per process (default: free ports)",
    )
    command.add_argument(
        "--interface",
        metavar="NAME",
        help="network interface between hosts, by name or address (default: ISOTRAIN_INTERFACE, else the"
        " interface over which each host reaches rank 0)",
    )
    command.add_argument(
        "--max-restarts",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="after a failure, start again from the last checkpoint, at most N times (default: 0)",
    )
    command.add_argument(
        "--ranks",
        type=ranks,
        default=(0,),
        metavar="N,...",
        help="ranks whose output is shown, such as 0,3, or all (default: 0); the run directory has that of"
        " every rank",
    )
    command.add_argument(
        "--profile",
        type=_profile_steps,
        nargs="?",
        const=10,
        metavar="STEPS",
        help="trace steps by the framework's profiler: 10 from step 10 on, or --profile=STEPS",
    )
    command.add_argument(
        "--line-prefix",
        default="",
        metavar="TEXT",
        help=argparse.SUPPRESS,
    )


RUN = Command(
    "run",
    "train a spec under a backend",
    "Trains a spec under a backend, in separate processes: on this machine, or where --launcher starts\n"
    "them. Progress goes to standard error, the result to standard output.",
    """\
examples:
  isotrain run digits.yaml --backend {backend}
  isotrain run digits.yaml --backend {other} --replicas 2
  isotrain run digits.yaml --backend {backend} --set optimizer.lr=0.05 --set epochs=3
  isotrain run digits.yaml --backend {other} --replicas 2 --strategy local-sgd,every=8
  isotrain run digits.yaml --backend {backend} --set checkpoint.every_minutes=10 --max-restarts 3
  isotrain run digits.yaml --backend {backend} --profile=5
  isotrain run digits.yaml --backend {backend} --json > events.jsonl""",
    add_arguments=_add_run_arguments,
    module=__name__,
)
RESUME = Command(
    "resume",
    "continue a run from its newest checkpoint",
    "Continues a run in its run directory, from its newest checkpoint: also under another\n"
    "backend, with another number of replicas or another strategy. What is computed stays the same.",
    """\
examples:
  isotrain resume runs/digits-20260102-030405
  isotrain resume runs/digits-20260102-030405 --backend {other} --replicas 3
  isotrain resume runs/digits-20260102-030405 --set epochs=20 --max-restarts 3""",
    add_arguments=_add_resume_arguments,
    module=__name__,
)
PLAN = Command(
    "plan",
    "show what a run would do",
    "Resolves a run without training: which rank runs where, the collective that will be used,\n"
    "batches, learning rate, environment variables, exchanged bytes. With --diff, compares two plans.",
    """\
examples:
  isotrain plan digits.yaml --backend {backend} --replicas 2
  isotrain plan digits.yaml --backend {backend} --replicas 8 --no-measure
  isotrain plan digits.yaml --hosts 8 --gpus-per-host 8 --gpu h100
  isotrain plan digits.yaml --diff {backend}@2 {other}@2
  isotrain plan digits.yaml --diff {backend}@2 '{backend}@2 local-sgd,every=8'""",
    add_arguments=_add_plan_arguments,
    module=__name__,
)
