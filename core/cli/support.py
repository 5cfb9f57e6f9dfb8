"""What several commands do alike: read the spec, warn of plugins, and show what a wait is for."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isotrain.core.plugins.manager import PluginManager
    from isotrain.core.spec.training_spec import TrainingSpec


def add_working_directory_to_path() -> None:
    """Lets modules be found that lie in the current folder."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def read_spec(options: argparse.Namespace) -> TrainingSpec:
    """Reads the spec; what it refers to may lie in the current folder."""
    from isotrain.core.spec.loading import load_spec

    add_working_directory_to_path()
    return load_spec(options.spec, getattr(options, "set", ()))


def read_spec_with_choices(options: argparse.Namespace) -> TrainingSpec:
    """The same, under the one strategy and with the loggers that were asked for."""
    from isotrain.core.spec.loading import load_spec

    add_working_directory_to_path()
    return load_spec(
        options.spec,
        options.set,
        strategy=options.strategy,
        loggers=getattr(options, "logger", ()),
    )


def warn_of_plugins(host: PluginManager) -> None:
    for name, fault in host.faults.items():
        print(f"isotrain: plugin {name!r} was left out: {fault}", file=sys.stderr)
    for name, note in host.notes.items():
        print(f"isotrain: plugin {name!r}: {note}", file=sys.stderr)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Any]:
    """Shows in a terminal what a wait is for."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
