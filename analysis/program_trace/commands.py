"""Command `isotrain trace`, and `isotrain parity` of two traces."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from isotrain.analysis.program_trace.bootstrap.sitecustomize import VARIABLE
from isotrain.analysis.program_trace.comparison import compare
from isotrain.analysis.program_trace.reading import is_trace, read_trace
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.errors import IsotrainError
from isotrain.core.json_format import json_page
from isotrain.core.plugins.manager import plugin_manager

_BOOTSTRAP = Path(__file__).with_name("bootstrap")


def trace(options: argparse.Namespace) -> int:
    """Runs `isotrain trace`: a program whose steps are recorded; the exit code is the program's.

    Raises:
        IsotrainError: The folder has a trace already, the program cannot be started, or it took no step.
    """
    folder = Path(options.output or tempfile.mkdtemp(prefix="trace-", dir=".")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if is_trace(folder):
        raise IsotrainError(f"{folder}: there is a trace in it. Give another folder by --output.")
    command = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not command:
        raise IsotrainError("trace: expected a program after --, as in: trace -- python train.py")
    told = {"folder": str(folder), "steps": options.steps, "hooks": program_hooks()}
    path = os.pathsep.join(filter(None, [str(_BOOTSTRAP), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, VARIABLE: json.dumps(told), "PYTHONPATH": path}
    try:
        status = subprocess.call(command, env=environment)
    except OSError as error:
        raise IsotrainError(f"trace: {command[0]}: {error.strerror}.") from error
    if status == 0 or is_trace(folder):
        made = read_trace(folder)
        facts = {"folder": str(folder), "processes": made.processes, "steps": len(made.steps)}
        if options.json:
            print(json_page(facts))
        else:
            owners = "1 process" if made.processes == 1 else f"{made.processes} processes"
            print(f"isotrain: {len(made.steps)} steps of {owners} in {folder}", file=sys.stderr)
    return status


def program_hooks() -> dict[str, str]:
    """Import strings of the functions that hook a framework, by the framework's name."""
    host = plugin_manager()
    adapters = map(host.backend, host.backends.names())
    return {each.framework: each.program_hooks for each in adapters if each.program_hooks}


def compare_traces(options: argparse.Namespace) -> ExitCode:
    """Runs `isotrain parity A B`: finds where the second trace parts from the first."""
    from isotrain.analysis.program_trace import text

    comparison = compare(read_trace(options.spec), read_trace(options.other))
    if options.json:
        print(json_page(dataclasses.asdict(comparison)))
    else:
        sys.stdout.write(text.result(comparison))
    return ExitCode.OK if comparison.agree else ExitCode.DIFFERENT
