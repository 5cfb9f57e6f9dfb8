"""A command of the command line, as it is declared."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from isotrain.core.cli.parser import HelpLayout, Parser


def _no_arguments(command: argparse.ArgumentParser) -> None:
    """For a command that has only the options of every command."""


@dataclass(frozen=True)
class Command:
    """A command, with the texts of its `--help`.

    Attributes:
        name: What a person types.
        summary: What it does, in a few words.
        description: What it does, in a few lines.
        examples: Of its use.
        add_arguments: Adds its arguments.
        module: The module that has the function that does it.
    """

    name: str
    summary: str
    description: str
    examples: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments
    module: str = "isotrain.core.cli.commands.actions"

    def add_to(self, commands: argparse._SubParsersAction[Parser]) -> None:
        """Adds it, with its arguments and those of every command."""
        command = commands.add_parser(
            self.name,
            help=self.summary,
            description=self.description,
            epilog=self.examples,
            formatter_class=HelpLayout,
        )
        everywhere = command.add_argument_group("options of every command")
        everywhere.add_argument("--json", action="store_true", help="print JSON instead of text")
        everywhere.add_argument(
            "--plugin",
            action="append",
            default=[],
            metavar="MODULE",
            help="also load this plugin: a module, or a file that ends in .py; may be repeated",
        )
        everywhere.add_argument(
            "--block-plugin",
            action="append",
            default=[],
            metavar="NAME",
            help="leave this plugin out; `isotrain plugins` lists all; may be repeated",
        )
        command.set_defaults(module=self.module)
        self.add_arguments(command)
