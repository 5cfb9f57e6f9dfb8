"""Declaration of a command: its texts, its arguments and the module that runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from isotrain.core.cli.parser import HelpLayout, Parser


def _no_arguments(command: argparse.ArgumentParser) -> None:
    """Adds nothing: for a command with only the common options."""


@dataclass(frozen=True)
class Command:
    """A command, with the texts of its `--help`.

    Attributes:
        name: Name on the command line.
        summary: One line for the list of commands.
        description: A few lines for its own help.
        examples: Example command lines for its own help.
        module: Module with the function that runs the command, named as the command; imported late.
        add_arguments: Adds its arguments to a parser.
    """

    name: str
    summary: str
    description: str
    examples: str
    module: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments

    def add_to(self, commands: argparse._SubParsersAction[Parser]) -> None:
        """Adds the command, with its arguments and those of every command."""
        command = commands.add_parser(
            self.name,
            help=self.summary,
            description=self.description,
            epilog=self.examples,
            formatter_class=HelpLayout,
        )
        common = command.add_argument_group("options of every command")
        common.add_argument("--json", action="store_true", help="print JSON instead of text")
        common.add_argument(
            "--plugin",
            action="append",
            default=[],
            metavar="MODULE",
            help="also load this plugin: a module, or a file that ends in .py; may be repeated",
        )
        common.add_argument(
            "--block-plugin",
            action="append",
            default=[],
            metavar="NAME",
            help="leave this plugin out; `isotrain plugins` lists all; may be repeated",
        )
        amount = common.add_mutually_exclusive_group()
        amount.add_argument(
            "-q", "--quiet", action="store_true", help="print nothing but the result and errors"
        )
        amount.add_argument(
            "-v", "--verbose", action="store_true", help="show every epoch, and what is logged"
        )
        command.set_defaults(module=self.module)
        self.add_arguments(command)
