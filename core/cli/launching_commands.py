"""What the commands about launchers do; `launching_arguments` has their texts."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict

from isotrain.core.json_text import FORMAT, json_line, json_page
from isotrain.core.plugins.host import plugin_host


def place(options: argparse.Namespace) -> None:
    """Prints this process's place; as JSON in one line, for many processes print theirs at once."""
    from isotrain.core.planning.places import place_of

    found = place_of(os.environ, plugin_host())
    if options.json:
        print(json_line({"format": FORMAT, "place": None if found is None else asdict(found)}))
        return
    from isotrain.core.showing import launching_texts

    sys.stdout.write(launching_texts.place(found))


def launchers(options: argparse.Namespace) -> None:
    """Lists the launchers and engines, and the backends that they fit."""
    from isotrain.core.planning import launchable

    host = plugin_host()
    launchers, environments = launchable.launchers(host), launchable.environments(host)
    if options.json:
        listed = {"launchers": launchers, "environments": environments}
        print(json_page({"format": FORMAT, **listed, "plugin_faults": dict(host.faults)}))
        return
    from isotrain.core.showing import launching_texts

    sys.stdout.write(launching_texts.launchers(launchers, environments))
