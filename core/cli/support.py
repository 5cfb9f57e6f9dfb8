"""Helpers of several commands: read the spec, warn of broken plugins."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isotrain.core.plugins.manager import PluginManager
    from isotrain.core.spec.training_spec import TrainingSpec


def add_working_directory_to_path() -> None:
    """Puts the current folder first on `sys.path`, so that modules in it can be imported."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)


def read_spec(options: argparse.Namespace) -> TrainingSpec:
    """Reads SPEC with `--set`; modules that it refers to may be in the current folder."""
    from isotrain.core.spec.loading import load_spec

    add_working_directory_to_path()
    return load_spec(options.spec, getattr(options, "set", ()))


def read_spec_with_choices(options: argparse.Namespace) -> TrainingSpec:
    """Reads SPEC with `--set`, `--strategy`, `--logger` and `--profile`."""
    from isotrain.core.spec.loading import load_spec

    add_working_directory_to_path()
    profile = getattr(options, "profile", None)
    return load_spec(
        options.spec,
        [*options.set, *([] if profile is None else [f"profile.steps={profile}"])],
        strategy=options.strategy,
        loggers=getattr(options, "logger", ()),
    )


def warn_of_plugins(host: PluginManager) -> None:
    """Prints the faults and notes of plugins to standard error."""
    for name, fault in host.faults.items():
        print(f"isotrain: plugin {name!r} was left out: {fault}", file=sys.stderr)
    for name, note in host.notes.items():
        print(f"isotrain: plugin {name!r}: {note}", file=sys.stderr)
