"""Command `isotrain trace`, and `isotrain parity` of two traces."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from isotrain.analysis.parity.targets import parity_targets
from isotrain.analysis.program_trace.bootstrap.sitecustomize import VARIABLE
from isotrain.analysis.program_trace.comparison import compare
from isotrain.analysis.program_trace.reading import ProgramTrace, is_trace, read_trace
from isotrain.analysis.program_trace.recorder import FORMAT
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.support import read_spec
from isotrain.core.contracts.launcher import LOCAL, LauncherChoice
from isotrain.core.errors import IsotrainError, PlanError, first_of
from isotrain.core.json_format import json_page
from isotrain.core.launching.run_directory.run_directory import SPEC_FILE
from isotrain.core.planning.backend_choice import resolve_backend
from isotrain.core.planning.cluster_environment import (
    detect_cluster_info,
    explain_rank,
    require_single_process,
)
from isotrain.core.planning.launcher_support import require_startable
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.quantities import counted
from isotrain.core.reporting.status import ignore_status, print_status
from isotrain.core.spec.sections import strategy_list
from isotrain.core.spec.weight_name_map import read_maps

_BOOTSTRAP = Path(__file__).with_name("bootstrap")
_END_SECONDS = 30.0
"""Seconds that a program has to end its processes once it was asked to."""


def trace(options: argparse.Namespace) -> int:
    """Runs `isotrain trace`: a program whose steps are recorded; the exit code is the program's.

    The program starts all processes of a training, as torchrun does. Or each rank calls this for its own
    process, as under `srun` or with TF_CONFIG.

    Raises:
        IsotrainError: The folder has a trace already, several ranks were given none, the program cannot be
            started, or it took no step.
    """
    info = detect_cluster_info()
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise IsotrainError("trace: expected a program after --, as in: trace -- python train.py")
    if info is not None and not options.output:
        raise IsotrainError(
            f"trace: expected --output FOLDER, as each of {counted(info.world_size, 'rank')} records its"
            f" process, and all in one folder. {explain_rank(info)}"
        )
    folder = Path(options.output or tempfile.mkdtemp(prefix="trace-", dir=".")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    recorded = "rank-*.jsonl" if info is None else f"rank-{info.rank}-*.jsonl"
    if any(folder.glob(recorded)):
        raise IsotrainError(f"{folder}: there is a trace in it. Give another folder by --output.")
    told = {"folder": str(folder), "steps": options.steps, "hooks": program_hooks()}
    path = os.pathsep.join(filter(None, [str(_BOOTSTRAP), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, VARIABLE: json.dumps(told), "PYTHONPATH": path}
    try:
        status = _run(program, environment)
        if status == 0 and info is None:
            _tell(read_trace(folder), options)
        elif status == 0 and info is not None and not any(folder.glob(recorded)):
            raise IsotrainError(
                f"trace: rank {info.rank} of {info.world_size} has recorded nothing. Its process took no"
                " step of an optimizer, or does not know its rank by torch.distributed, tf.distribute or"
                " Horovod."
            )
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(_left_by_interrupt(folder, options.output))
        raise
    finally:
        if not options.output and not any(folder.iterdir()):
            folder.rmdir()
    return status


def _run(program: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of a program; it gets the signal that ends this process, and time to end its own."""
    try:
        process = subprocess.Popen(program, env=environment)
    except OSError as error:
        raise IsotrainError(f"trace: {program[0]}: {error.strerror}.") from error
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        raise
    return status if status >= 0 else 128 - status


def _left_by_interrupt(folder: Path, output: str | None) -> str:
    """Note for an interrupt of the program: its recorded steps, and how to go on."""
    again = "use another --output" if output and is_trace(folder) else "use the same command"
    try:
        recorded = _recorded(read_trace(folder))
    except IsotrainError:
        return f"No step of all processes was recorded. To start again, {again}."
    return (
        f"{recorded}\n`isotrain parity` compares these steps. To record more, start again: {again}."
    )


def _recorded(made: ProgramTrace) -> str:
    steps, owners = counted(len(made.steps), "step"), counted(made.processes, "process")
    return f"{steps} of {owners} in {made.folder}"


def _tell(made: ProgramTrace, options: argparse.Namespace) -> None:
    if options.json:
        facts = {
            "folder": str(made.folder),
            "processes": made.processes,
            "steps": len(made.steps),
            "sharded": made.sharded,
        }
        print(json_page({"format": FORMAT, **facts}))
    elif not options.quiet:
        print(f"isotrain: {_recorded(made)}", file=sys.stderr)
        if made.sharded:
            names = first_of(made.sharded, 5)
            print(f"isotrain: not recorded, as sharded over processes: {names}", file=sys.stderr)


def program_hooks() -> dict[str, str]:
    """Import strings of the functions that hook a framework, by the module after whose import they do."""
    host = plugin_manager()
    hooks: dict[str, str] = {}
    for name in host.backends.names():
        hooks |= host.backend(name).program_hooks
    return hooks


def compare_programs(options: argparse.Namespace) -> ExitCode:
    """Runs `isotrain parity A B`: finds where the second trace, or run of a spec, parts from the first.

    Raises:
        PlanError: An option is given that only a spec takes, several runs of the spec are asked for, neither
            is a trace, or a trace has fewer steps than `--steps`.
    """
    from isotrain.analysis.program_trace import text

    if options.bits:
        raise PlanError("parity --bits: a trace has fingerprints of tensors. Leave --bits out.")
    paths = (options.spec, options.other)
    specs = [path for path in paths if not Path(path).is_dir()]
    if len(specs) > 1:
        raise PlanError(
            f"parity: expected two traces, or a trace and a spec, received {' and '.join(specs)}, which are"
            " no folders. `isotrain trace` makes traces. Runs of one spec are compared with each other by"
            " --backend, --replicas and --strategy."
        )
    traces = {path: _read(path) for path in paths if path not in specs}
    if specs:
        (program,) = traces.values()
        traces[specs[0]] = _trace_of_spec(specs[0], program, options)
    else:
        _refuse_options_of_specs(options)
    comparison = compare(*(traces[path] for path in paths), steps=options.steps)
    if options.json:
        verdict = "agree" if comparison.agree else "difference"
        facts = {"format": FORMAT, "verdict": verdict, **dataclasses.asdict(comparison)}
        print(json_page(facts))
    else:
        sys.stdout.write(text.result(comparison))
    return ExitCode.OK if comparison.agree else ExitCode.DIFFERENT


def _read(path: str) -> ProgramTrace:
    """The trace in a folder."""
    if not is_trace(path) and (Path(path) / SPEC_FILE).is_file():
        raise PlanError(
            f"parity: {path} is the directory of a run, and no trace. To compare a trace with another run of"
            f" its spec, give {Path(path) / SPEC_FILE}."
        )
    return read_trace(path)


def _trace_of_spec(path: str, program: ProgramTrace, options: argparse.Namespace) -> ProgramTrace:
    """The trace of the run that the options describe, from the program's initial weights."""
    from isotrain.analysis.program_trace.spec_run import trace_of_spec

    require_single_process("parity")
    spec = read_spec(argparse.Namespace(**{**vars(options), "spec": path}))
    host = plugin_manager(spec.plugins)
    launcher = LauncherChoice(options.launcher, dict(options.launcher_option))
    require_startable(host.launcher(launcher.name, launcher.options))
    backends = options.backend or [None]
    targets = parity_targets(
        spec,
        host,
        backends=[resolve_backend(each, ResolvedSpec(spec, host)) for each in backends],
        replicas=options.replicas,
        strategies=strategy_list(options.strategy) or [spec.strategy.name],
        launcher=launcher,
    )
    if len(targets) > 1:
        names = ", ".join(target.name for target in targets)
        raise PlanError(
            f"parity: expected one run of {path} to compare with a trace, found {names}."
        )
    return trace_of_spec(
        program,
        targets[0],
        host,
        steps=options.steps,
        label=path,
        maps=read_maps(options.map),
        output=options.output,
        on_progress=ignore_status if options.quiet or options.json else print_status,
    )


def _refuse_options_of_specs(options: argparse.Namespace) -> None:
    taken = {
        "--backend": options.backend,
        "--replicas": options.replicas,
        "--strategy": options.strategy,
        "--set": options.set,
        "--map": options.map,
        "--output": options.output,
        "--launcher-option": options.launcher_option,
        "--launcher": options.launcher != LOCAL,
    }
    if ignored := [name for name, value in taken.items() if value]:
        raise PlanError(f"parity: {', '.join(ignored)}: two traces are compared as they are.")
