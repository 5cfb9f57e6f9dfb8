"""Commands `isotrain compare`, `report`, `check` and `parity`; `core/cli/commands` has their arguments."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from contextlib import AbstractContextManager
from pathlib import Path

from isotrain.analysis.compare import store
from isotrain.analysis.compare.engine import ComparisonEngine
from isotrain.analysis.compare.records import COMPARISON_FILE
from isotrain.analysis.compare.result import Comparison, read_comparison
from isotrain.analysis.compare.settings import REPEATS, STEPS, CompareRequest
from isotrain.analysis.pages.page import write_page
from isotrain.analysis.parity.records import PARITY_FILE
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.support import read_spec
from isotrain.core.contracts.launcher import LauncherChoice
from isotrain.core.errors import PlanError
from isotrain.core.json_format import FORMAT, json_page
from isotrain.core.launching.run_directory.run_directory import SPEC_FILE
from isotrain.core.reporting.status import ignore_status, print_status, waiting
from isotrain.core.reporting.tables import facts


def compare(options: argparse.Namespace) -> ExitCode:
    """Runs `isotrain compare` and prints the results so far, even after an interruption.

    Returns:
        The exit code; a `KeyboardInterrupt` is re-raised.
    """
    quiet = options.quiet or options.json
    on_progress = ignore_status if quiet else print_status
    engine = ComparisonEngine(read_spec(options), _request(options), on_progress)
    try:
        with waiting("comparing", quiet=quiet):
            engine.run()
    except KeyboardInterrupt:
        _show(engine, options)
        raise
    _show(engine, options)
    return _exit_code(engine.comparison, options.fail_if_slower)


def report(options: argparse.Namespace) -> None:
    """Runs `isotrain report`: writes the page of a comparison, a run or a parity check.

    Raises:
        PlanError: There are no results, or `--follow` with what is no run.
    """
    source = Path(options.results)
    if (source / SPEC_FILE).is_file():
        _report_run(source, options)
    elif options.follow:
        raise PlanError(f"report --follow: {source} is no run, and only a run goes on.")
    elif source.name == PARITY_FILE or (source / PARITY_FILE).is_file():
        _report_parity(source, options)
    elif source.is_file() or (source / COMPARISON_FILE).is_file():
        _report_comparison(source, options)
    else:
        raise PlanError(
            f"report: {source} has no results. Expected the folder of a run, of a comparison"
            " (`isotrain compare --output`) or of a parity check (`isotrain parity --output`)."
        )


def _report_comparison(source: Path, options: argparse.Namespace) -> None:
    """Writes the report of a stored comparison and prints its tables."""
    comparison = read_comparison(source)
    folder = source if source.is_dir() else source.parent
    # Without the report's packages, `to_html` raises an error that names the missing one.
    with _making_the_page(options):
        path = store.publish(comparison, folder) or comparison.to_html(folder)
    _print(comparison, folder, path, options.json)
    _open(path, options)


def _report_run(source: Path, options: argparse.Namespace) -> None:
    """Writes the report of a run, with `--follow` until the run has ended, and prints its path."""
    from isotrain.analysis.run_report.html import follow, write_report

    with _making_the_page(options):
        path, is_running = write_report(source, follows=options.follow)
    _print_path(path, options.json)
    _open(path, options)
    if is_running and options.follow:
        follow(source)


def _report_parity(source: Path, options: argparse.Namespace) -> None:
    """Writes the report of a stored parity check, and prints its path."""
    from isotrain.analysis.parity.report import read_parity, render

    folder = source if source.is_dir() else source.parent
    with _making_the_page(options):
        path = write_page(render(read_parity(source)), folder)
    _print_path(path, options.json)
    _open(path, options)


def _making_the_page(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Shows in a terminal that the page is made, which takes seconds where its plots are many."""
    return waiting("making the page", quiet=options.quiet)


def _print_path(report: Path, as_json: bool) -> None:
    if as_json:
        print(json_page({"format": FORMAT, "report": str(report)}), flush=True)
    else:
        sys.stdout.write(facts(None, [("report", str(report))]))
        sys.stdout.flush()


def _open(report: Path, options: argparse.Namespace) -> None:
    if options.open:
        webbrowser.open(report.resolve().as_uri())


def _request(options: argparse.Namespace) -> CompareRequest:
    if options.fail_if_slower is not None and options.against is None:
        raise PlanError(
            "--fail-if-slower compares with an earlier comparison: add --against COMPARISON."
        )
    return CompareRequest(
        backends=options.backend,
        replicas=options.replicas,
        strategies=options.strategy,
        repeats=options.repeats or REPEATS,
        time_budget=options.time_budget,
        run_limit=options.run_limit,
        seed=options.seed,
        steps=options.steps or STEPS,
        reference=options.reference,
        output=options.output,
        resume=options.resume,
        against=options.against,
        margin=options.fail_if_slower or 0.0,
        interpreters=dict(options.interpreter),
        launcher=LauncherChoice(options.launcher, dict(options.launcher_option)),
    )


def _show(engine: ComparisonEngine, options: argparse.Namespace) -> None:
    _print(engine.comparison, engine.folder, engine.report, options.json)


def _print(comparison: Comparison, folder: Path, report: Path | None, as_json: bool) -> None:
    if as_json:
        paths = {"folder": str(folder), "report": None if report is None else str(report)}
        print(json_page({**comparison.to_dict(), **paths}), flush=True)
        return
    from isotrain.analysis.compare import text

    sys.stdout.write(text.result(comparison) + "\n" + text.result_paths(folder, report))


def _exit_code(comparison: Comparison, margin: float | None) -> ExitCode:
    statuses = [cell.status for cell in comparison.cells]
    if "failed" in statuses or "finished" not in statuses:
        return ExitCode.RUN_FAILED
    if margin is not None and any(change.slower for change in comparison.changes):
        return ExitCode.SLOWER
    return ExitCode.OK


def check(options: argparse.Namespace) -> ExitCode | None:
    """Runs `isotrain check` and prints its findings."""
    from isotrain.analysis.check.check import check as checked
    from isotrain.analysis.check.findings import result_text
    from isotrain.analysis.check.rule import Severity

    result = checked(
        read_spec(options),
        backends=options.backend,
        replicas=options.replicas,
        strategy=options.strategy,
        ignore=options.ignore,
        measure=not options.no_measure,
        quiet=options.quiet,
    )
    if options.json:
        print(json_page(result.to_dict()))
    else:
        sys.stdout.write(result_text(result))
    failing = tuple(Severity) if options.strict else (Severity.ERROR, Severity.WARNING)
    return ExitCode.FINDINGS if any(map(result.with_severity, failing)) else None


def parity(options: argparse.Namespace) -> ExitCode:
    """Runs `isotrain parity` and prints its results; the exit code gives the verdict."""
    if options.other is not None:
        from isotrain.analysis.program_trace.commands import compare_programs

        return compare_programs(options)
    if Path(options.spec).is_dir():
        own = Path(options.spec) / SPEC_FILE
        raise PlanError(
            f"parity {options.spec}: expected a spec, two traces, or a trace and a spec."
            + (f" The spec of this run is {own}." if own.is_file() else "")
        )
    from isotrain.analysis.parity import check

    quiet = options.quiet or options.json
    with waiting("comparing", quiet=quiet):
        result = check.parity(
            read_spec(options),
            backends=options.backend,
            replicas=options.replicas,
            strategies=options.strategy,
            steps=options.steps or check.DEFAULT_STEPS,
            bits=options.bits,
            map=options.map,
            output=options.output,
            launcher=options.launcher,
            launcher_options=dict(options.launcher_option),
            on_progress=ignore_status if quiet else print_status,
        )
    if options.json:
        print(result.to_json())
    else:
        from isotrain.analysis.parity import text

        sys.stdout.write(text.result(result))
    return {"difference": ExitCode.DIFFERENT, "failed": ExitCode.RUN_FAILED}.get(
        result.verdict, ExitCode.OK
    )
