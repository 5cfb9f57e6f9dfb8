"""What each command does; `isotrain.core.cli.app` has their arguments."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isotrain.core.cli.run_output import (
    is_result_printed_by_rank_zero,
    progress_display,
    returning_files,
)
from isotrain.core.cli.support import read_spec, read_spec_with_choices, waiting, warn_of_plugins
from isotrain.core.contracts.events import RESULT
from isotrain.core.errors import PlanError, RunFailedError
from isotrain.core.json_format import FORMAT, json_page, prefixed_line
from isotrain.core.plugins.hookspecs import API_VERSION

if TYPE_CHECKING:
    from isotrain.core.cli.argument_types import PlanTarget
    from isotrain.core.contracts.events import OnPlainEvent
    from isotrain.core.contracts.plan import Plan
    from isotrain.core.plugins.manager import PluginManager
    from isotrain.core.results.result import RunResult
    from isotrain.core.spec.training_spec import TrainingSpec


def run(options: argparse.Namespace) -> None:
    """Trains, and prints the result."""
    from isotrain.core import api
    from isotrain.core.cli import internal_work
    from isotrain.core.cli.commands import launchers_actions

    if options.internal_work:
        internal_work.refuse_other_options(options)
    spec = read_spec_with_choices(options)
    if options.dry_run:
        launchers_actions.dry_run(spec, options)
        return
    for name, given in (
        ("--return-files", options.return_files),
        ("--internal-work", options.internal_work),
    ):
        if given and not (options.json and options.line_prefix and options.run_dir):
            raise PlanError(f"{name}: give --json, --line-prefix TEXT and --run-dir too.")
    if options.internal_work:
        internal_work.do_internal_work(spec, options)
        return
    _train(
        options,
        lambda on_event: api.run(
            spec,
            backend=options.backend,
            replicas=options.replicas,
            run_directory=options.run_dir,
            on_event=on_event,
            port=options.port,
            launcher=options.launcher,
            launcher_options=dict(options.launcher_option),
            resume=options.resume,
            max_restarts=options.max_restarts,
            ranks=options.ranks,
            interface=options.interface,
        ),
    )


def resume(options: argparse.Namespace) -> None:
    """Goes on with a run, and prints the result."""
    from isotrain.core import api
    from isotrain.core.launching.run_directory.run_directory import SPEC_FILE, RunDirectory

    options.spec = options.spec or str(RunDirectory.reopen(options.run_dir).path / SPEC_FILE)
    spec = read_spec_with_choices(options)
    _train(
        options,
        lambda on_event: api.resume(
            options.run_dir,
            spec=spec,
            backend=options.backend,
            replicas=options.replicas,
            on_event=on_event,
            port=options.port,
            launcher=options.launcher,
            launcher_options=dict(options.launcher_option),
            max_restarts=options.max_restarts,
            ranks=options.ranks,
            interface=options.interface,
        ),
    )


def _train(
    options: argparse.Namespace, training: Callable[[OnPlainEvent | None], RunResult]
) -> None:
    """Shows a training while it goes on, and prints its result."""
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
    """Prints a plan, or what differs between two."""
    from isotrain.core.cli.commands import launchers_actions
    from isotrain.core.reporting import launcher_text
    from isotrain.core.reporting import text as texts

    spec = read_spec_with_choices(options)
    if options.diff:
        _differences(spec, options)
        return
    if options.backend is None:
        raise PlanError("plan: give --backend NAME, or --diff A B to compare two.")
    found = _plan(spec, options.backend, options.replicas, options)
    given = launchers_actions.submission_preview(spec, found)
    if options.json:
        print(json_page({"format": FORMAT, "plan": found.to_dict(), **given}))
    else:
        sys.stdout.write(texts.plan(found) + launcher_text.submission_preview(given))


def _differences(spec: TrainingSpec, options: argparse.Namespace) -> None:
    from isotrain.core.contracts.plan import differences
    from isotrain.core.reporting import text as texts

    if options.backend is not None:
        raise PlanError("plan: --diff A B names both backends; leave --backend out.")
    first, second = (_planned(spec, target, options) for target in options.diff)
    found = differences(first, second)
    names = [target.text for target in options.diff]
    if options.json:
        rows = [{"field": name, "first": one, "second": two} for name, one, two in found]
        ends = dict(zip(("first", "second"), names, strict=True))
        print(json_page({"format": FORMAT, **ends, "differences": rows}))
    else:
        sys.stdout.write(texts.differences(names, found))


def _planned(spec: TrainingSpec, target: PlanTarget, options: argparse.Namespace) -> Plan:
    own = spec.under(target.strategy) if target.strategy else spec
    return _plan(own, target.backend, target.replicas or options.replicas, options)


def _plan(
    spec: TrainingSpec, backend: str, replicas: int | None, options: argparse.Namespace
) -> Plan:
    from isotrain.core import api

    how = {"launcher": options.launcher, "launcher_options": dict(options.launcher_option)}
    if options.no_measure:
        return api.plan(spec, backend=backend, replicas=replicas, **how)
    with waiting(f"counting samples and parameters on {backend} (--no-measure leaves it out)"):
        return api.measured_plan(spec, backend=backend, replicas=replicas, **how)


def backends(options: argparse.Namespace) -> None:
    """Lists the backends."""
    from isotrain.core.planning import listings

    _list("backends", listings.backends, options)


def strategies(options: argparse.Namespace) -> None:
    """Lists the strategies and the backends they fit."""
    from isotrain.core.planning import listings

    _list("strategies", listings.strategies, options)


def _list(
    kind: str, listed: Callable[[PluginManager], list[dict[str, Any]]], options: argparse.Namespace
) -> None:
    from isotrain.core.plugins.manager import plugin_manager

    host = plugin_manager()
    found = listed(host)
    if options.json:
        faults = {"plugin_faults": dict(host.faults)}
        print(json_page({"format": FORMAT, kind: found, **faults}))
        return
    from isotrain.core.reporting import text as texts

    sys.stdout.write({"backends": texts.backends, "strategies": texts.strategies}[kind](found))
    warn_of_plugins(host)


def plugins(options: argparse.Namespace) -> None:
    """Lists the plugins, broken ones too."""
    from isotrain.core.plugins import selection
    from isotrain.core.plugins.manager import PluginManager

    of_spec = read_spec(options).plugins if options.spec else ()
    host = PluginManager(selection.current(), of_spec, strict=False)
    found = [each.to_dict() for each in host.loaded]
    if options.json:
        versions = {"api_version": API_VERSION}
        print(json_page({"format": FORMAT, **versions, "plugins": found}))
        return
    from isotrain.core.reporting import text as texts

    sys.stdout.write(texts.plugins(found))


def doctor(options: argparse.Namespace) -> None:
    """Examines this machine."""
    from isotrain.core.planning.doctor import examine
    from isotrain.core.plugins.manager import plugin_manager

    host = plugin_manager()
    if options.launcher:
        if options.backend:
            raise PlanError(
                "doctor: it examines backends or launchers; leave out --backend or --launcher."
            )
        _examine_launchers(host, options)
        return
    if options.launcher_option:
        raise PlanError("doctor: --launcher-option is for a launcher; name that with --launcher.")
    names = options.backend or host.backends.names()
    with waiting(f"loading {', '.join(names)}"):
        found = examine(host, names)
    if options.json:
        print(json_page({"format": FORMAT, **found}))
        return
    from isotrain.core.reporting import text as texts

    sys.stdout.write(texts.doctor(found))


def _examine_launchers(host: PluginManager, options: argparse.Namespace) -> None:
    from isotrain.core.launching.scheduler.launcher_doctor import examine_launcher

    given = dict(options.launcher_option)
    found = [examine_launcher(host, name, given) for name in options.launcher]
    if options.json:
        print(json_page({"format": FORMAT, "launchers": found}))
        return
    from isotrain.core.reporting import launcher_text

    sys.stdout.write("\n".join(launcher_text.launcher_report(each) for each in found))


def new_plugin(options: argparse.Namespace) -> None:
    """Makes a plugin's package."""
    from pathlib import Path

    from isotrain.core.plugins.scaffold import make_plugin

    folder = make_plugin(options.name, Path(options.directory))
    if options.json:
        print(json_page({"format": FORMAT, "folder": str(folder)}))
        return
    print(f"{folder}: pip install --editable {folder}, then pytest {folder}")


def schema(options: argparse.Namespace) -> None:
    """Prints the JSON Schema of specs; it is JSON with and without --json."""
    from isotrain.core.spec.loading import json_schema

    print(json.dumps(json_schema(), indent=2))
