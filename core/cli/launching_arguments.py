"""The arguments of the commands about launchers, and about who a process is."""

from __future__ import annotations

PLACE_EXAMPLES = """\
examples:
  isotrain place
  isotrain place --json"""
LAUNCHERS_EXAMPLES = """\
examples:
  isotrain launchers
  isotrain launchers --json"""

DESCRIPTIONS = {
    "place": "Says which process of which engine this one would be taken for, from its variables alone:\n"
    "srun isotrain place shows what each task of a step is told.",
    "launchers": "Says which launcher starts runs of which backend, and which engines may start the same\n"
    "command on every rank instead, from what they declare.",
}
