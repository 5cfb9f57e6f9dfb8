"""The arguments of the commands about launchers, and about who a process is."""

from __future__ import annotations

from isotrain.core.cli.command import Command

LAUNCHERS = Command(
    "launchers",
    "list what starts which backend",
    "Says which launcher starts runs of which backend, and which engines may start the same\n"
    "command on every rank instead, from what they declare.",
    """\
examples:
  isotrain launchers
  isotrain launchers --json""",
    module="isotrain.core.cli.commands.launchers_actions",
)
CLUSTER_INFO = Command(
    "cluster-info",
    "say which process of which engine this one is",
    "Says which process of which engine this one would be taken for, from its variables alone:\n"
    "srun isotrain cluster-info shows what each task of a step is told, and whether it could encrypt.",
    """\
examples:
  isotrain cluster-info
  isotrain cluster-info --json""",
    module="isotrain.core.cli.commands.launchers_actions",
)
