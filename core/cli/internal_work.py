"""`run --internal-work`: a rank, started by a launcher, does its part of `compare` or `parity`."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

from isotrain.core import api
from isotrain.core.cli.run_output import (
    is_result_printed_by_rank_zero,
    progress_display,
    returning_files,
)
from isotrain.core.contracts.events import RESULT
from isotrain.core.contracts.job import InternalWork
from isotrain.core.contracts.launcher import LOCAL
from isotrain.core.errors import PlanError
from isotrain.core.json_format import prefixed_line
from isotrain.core.spec.training_spec import TrainingSpec

_WORKS = {
    "measure": "isotrain.analysis.compare.measurement.measure:Measurement",
    "bit-trace": "isotrain.analysis.parity.bit_trace:BitTrace",
    "trace": "isotrain.analysis.parity.trace:Trace",
    "program-trace": "isotrain.analysis.program_trace.spec_run:ProgramTraceWork",
}
"""Import string of each kind of work, by its name in `--internal-work`."""


def parse_internal_work(text: str) -> InternalWork:
    """Parses the JSON of `--internal-work`.

    Raises:
        PlanError: This version has no such work.
    """
    from isotrain.core.launching.scheduler.scheduler_run import WORK  # most runs need none of it

    refusal = PlanError(
        "--internal-work: expected the JSON that `isotrain compare` or `isotrain parity` of this version"
        f" passes to its ranks, received {text!r:.80}."
    )
    try:
        fields = json.loads(text)
        module, _, name = _WORKS[fields.pop(WORK)].partition(":")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise refusal from error
    kind: type[InternalWork] = getattr(import_module(module), name)  # its own errors are shown
    try:
        return kind.of(fields)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise refusal from error


def refuse_other_options(options: argparse.Namespace) -> None:
    """Refuses options, beside `--internal-work`, that only apply to the start of a training.

    Raises:
        PlanError: One of these options was given.
    """
    defaults = {
        "--launcher": LOCAL,
        "--launcher-option": [],
        "--dry-run": False,
        "--resume": None,
        "--max-restarts": 0,
        "--port": None,
    }
    for name, default in defaults.items():
        if getattr(options, name.strip("-").replace("-", "_")) != default:
            raise PlanError(
                f"{name}: --internal-work is for ranks that are started already, and trains nothing."
                f" Leave {name} out."
            )


def do_internal_work(spec: TrainingSpec, options: argparse.Namespace) -> None:
    """Does the work on this rank; rank 0 saves the values of all ranks in the run directory."""
    from isotrain.core.launching.run_directory.return_values import save_value
    from isotrain.core.launching.scheduler.scheduler_run import RETURNED

    work = parse_internal_work(options.internal_work)
    with progress_display(options) as on_event, returning_files(options, on_event):
        returned = api.launch(
            work,
            spec,
            backend=options.backend,
            replicas=options.replicas,
            output=options.output,
            on_event=on_event,
            ranks=options.ranks,
            interface=options.interface,
        )
        if not is_result_printed_by_rank_zero(options):
            save_value(returned, Path(options.output), RETURNED)
    if not is_result_printed_by_rank_zero(options):
        print(prefixed_line({"event": RESULT}, options.line_prefix), flush=True)
