"""The command `isotrain find`; `core/cli/commands/find.py` has its arguments."""

from __future__ import annotations

import argparse

from isotrain.analysis.find.batch import STEPS as BATCH_STEPS
from isotrain.analysis.find.batch import BatchSearch, find_batch
from isotrain.analysis.find.rate import FIRST, LAST, STEPS, find_rate
from isotrain.analysis.find.rate_search import RateSearch
from isotrain.core.cli.support import read_spec_with_choices
from isotrain.core.errors import PlanError
from isotrain.core.json_format import FORMAT, json_page
from isotrain.core.reporting.status import ignore_status, print_status, waiting
from isotrain.core.run.options import ResumeOptions


def find(options: argparse.Namespace) -> None:
    """Runs `isotrain find rate` or `isotrain find batch` and prints what it found.

    Raises:
        PlanError: An option is of the other search.
    """
    others = {
        "rate": ("first_batch", "largest_batch"),
        "batch": ("first_rate", "last_rate", "output"),
    }
    for name in others[options.what]:
        if getattr(options, name) is not None:
            raise PlanError(f"--{name.replace('_', '-')} is no option of `find {options.what}`.")
    (_find_rate if options.what == "rate" else _find_batch)(options)


def _run_options(options: argparse.Namespace) -> ResumeOptions:
    return {
        "replicas": options.replicas,
        "launcher": options.launcher,
        "launcher_options": dict(options.launcher_option),
        "quiet": _is_quiet(options),
    }


def _is_quiet(options: argparse.Namespace) -> bool:
    return bool(options.quiet or options.json)


def _json(search: RateSearch | BatchSearch) -> str:
    return json_page({"format": FORMAT, **search.to_dict()})


def _find_rate(options: argparse.Namespace) -> None:
    search = find_rate(
        read_spec_with_choices(options),
        backend=options.backend,
        first_rate=FIRST if options.first_rate is None else options.first_rate,
        last_rate=LAST if options.last_rate is None else options.last_rate,
        steps=options.steps or STEPS,
        **_run_options(options),
    )
    if options.output is not None:
        search.plot(options.output)
    print(_json(search) if options.json else _rate_text(search))


def _rate_text(search: RateSearch) -> str:
    swept = f"{len(search.rates)} steps, from rate {search.rates[0]:.3g} to {search.rates[-1]:.3g}"
    if search.suggestion is None:
        return f"{swept}: the smoothed loss falls nowhere. Take other rates or more steps."
    return (
        f"{swept}: the smoothed loss falls fastest at {search.suggestion:.3g}\n"
        f"optimizer.lr: {search.lr:.3g}"
    )


def _find_batch(options: argparse.Namespace) -> None:
    quiet = _is_quiet(options)
    with waiting("trying global batches", quiet=quiet):
        search = find_batch(
            read_spec_with_choices(options),
            backend=options.backend,
            first_batch=options.first_batch,
            largest_batch=options.largest_batch,
            steps=options.steps or BATCH_STEPS,
            on_progress=ignore_status if quiet else print_status,
            **_run_options(options),
        )
    if options.json:
        print(_json(search))
    elif search.largest is None:
        print("no global batch fits")
    else:
        print(f"global_batch_size: {search.largest} (largest), {search.fastest} (fastest)")
