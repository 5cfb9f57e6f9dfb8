"""An argument parser that raises errors instead of exiting, and suggests the nearest name."""

from __future__ import annotations

import argparse
import itertools
import re
import string
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from isotrain.core.errors import IsotrainError, nearest, unknown_name, whether_meant
from isotrain.core.system.standard_streams import has_colours

_ENTRY = re.compile(r"^( {2,4}\S.*?)(?=  |$)", re.MULTILINE)
"""An option, argument, command or example in a help text, without what is said about it."""
_HEADING = re.compile(r"^(usage:|[a-z][a-z -]*:$)", re.MULTILINE)
_GAP = re.compile(r"(?<=\S)  +(?=\S)")
"""The gap between an entry of a list and what is said about it."""


class UsageError(IsotrainError):
    """The command line is wrong: an unknown or missing argument, or a bad value."""


class HelpLayout(argparse.HelpFormatter):
    """Help formatter that folds paragraphs and lists, and puts options and their help on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
        self._action_max_length = 16  # so that commands are on one line with their help too

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Folds a paragraph between words: names are not broken at their hyphens."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Folds paragraphs, and lines of lists at their second column; commands to copy stay whole."""
        groups = itertools.groupby(text.splitlines(), lambda line: line[:1] not in ("", " "))
        lines: list[str] = []
        for is_paragraph, group in groups:
            if is_paragraph:
                lines += self._split_lines(" ".join(group), width)
            else:
                lines += itertools.chain.from_iterable(_folded(line, width) for line in group)
        return "".join(f"{indent}{line}\n" for line in lines)


def _folded(line: str, width: int) -> list[str]:
    """Lines of one line of a list, of at most `width` characters where it has a second column."""
    gap = _GAP.search(line)
    if len(line) <= width or gap is None:
        return [line]
    indent = " " * gap.end()
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)


def _coloured(text: str) -> str:
    """A help text with bold headings, and its entries in cyan."""
    return _ENTRY.sub("\x1b[36m\\1\x1b[0m", _HEADING.sub("\x1b[1m\\1\x1b[0m", text))


class StoreOnce(argparse.Action):
    """Stores an option's value, and refuses a second one, which argparse would let win silently."""

    _stored_in: argparse.Namespace | None = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Stores the value, or raises."""
        if option_string and self._stored_in is namespace:
            parser.error(f"{option_string} was given twice; expected one value.")
        self._stored_in = namespace
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UsageError` instead of exiting.

    Attributes:
        commands: Parser of each command, by name; empty for the parser of a single command.
    """

    commands: Mapping[str, Parser] = {}

    @property
    def epilog(self) -> str | None:
        """The examples, with names of registered backends where they have `{backend}` and `{other}`."""
        return None if self._epilog is None else _with_backends(self._epilog)

    @epilog.setter
    def epilog(self, text: str | None) -> None:
        self._epilog = text

    @property
    def completions(self) -> list[str]:
        """Long options that `--help` shows, and subcommands."""
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        names = (name for action in shown for name in action.option_strings)
        return [*(name for name in names if name.startswith("--")), *self.commands]

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.register("action", None, StoreOnce)
        self.color = False  # Python 3.14 would colour the text itself

    def print_help(self, file: Any = None) -> None:
        """Prints the help text, with colours where they may be."""
        out, text = file or sys.stdout, self.format_help()
        self._print_message(_coloured(text) if has_colours(out) else text, out)

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse would ignore that it cannot be written

    def error(self, message: str) -> NoReturn:
        """Raises a `UsageError`."""
        raise UsageError(f"{message}\n`{self.prog} --help` explains it.")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses as argparse does, but reports unknown arguments before missing ones."""
        words = list(args)
        if self.commands:
            words = list(itertools.takewhile(lambda word: word.startswith("-"), args))
            self._refuse_unknown_command(args[len(words) :])
        self._refuse_unknown_options(itertools.takewhile(lambda word: word != "--", words))
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}.")
        return options, unknown

    def _refuse_unknown_command(self, words: Sequence[str]) -> None:
        if words and words[0] not in self.commands:
            self.error(unknown_name("command", words[0], self.commands))

    def _refuse_unknown_options(self, words: Iterable[str]) -> None:
        options = [name for action in self._actions for name in action.option_strings]
        for name in (word.partition("=")[0] for word in words if _is_option(word)):
            if name not in options:
                self.error(f"unknown option {name!r}.{self._hint(name, options)}")

    def _hint(self, name: str, options: Iterable[str]) -> str:
        if self.commands:
            return " Options of a command go after its name."
        called_here = _called_here(name)
        field = _spec_field(called_here) if "--set" in options else None
        if field is not None:
            return f" Fields of the spec are changed with {_assignment(field)}."
        long = [option.removeprefix("--") for option in options if option.startswith("--")]
        return (
            whether_meant(f"--{called_here}") if called_here in long else _did_you_mean(name, long)
        )


def _with_backends(text: str) -> str:
    if "{backend}" not in text and "{other}" not in text:
        return text
    from isotrain.core.plugins.manager import plugin_manager  # slow to import: only for help

    first, second, *_ = [*plugin_manager().backends.names(), "BACKEND", "OTHER"]
    return text.replace("{backend}", first).replace("{other}", second)


def _is_option(word: str) -> bool:
    """Whether a word is an option: not `-`, and no negative number."""
    return word.startswith("-") and word[1:2] not in {"", ".", *string.digits}


def _did_you_mean(name: str, options: Iterable[str]) -> str:
    """Suggests the nearest option; for a short one such as `-b`, an option with that first letter."""
    if name.startswith("--"):
        near = nearest(name.removeprefix("--"), options)
    else:
        near = min((option for option in options if option.startswith(name[1])), default=None)
    return whether_meant(f"--{near}" if near else None)


def _called_here(option: str) -> str:
    """isotrain's name for an option of another tool, `replicas` for `--num-processes`; else its own."""
    from isotrain.core.spec.validation import OTHER_TOOLS_NAMES  # slow to import: only on an error

    word = option.lstrip("-").replace("-", "_")
    return OTHER_TOOLS_NAMES.get(word, word)


def _spec_field(name: str) -> str | None:
    """The spec field of this name, such as `optimizer.lr` for `lr`; None without one."""
    from isotrain.core.spec.optimizers import AdamW, Sgd  # slow to import: only on an error
    from isotrain.core.spec.training_spec import TrainingSpec

    if name.partition(".")[0] in TrainingSpec.model_fields:
        return name
    return f"optimizer.{name}" if name in {*Sgd.model_fields, *AdamW.model_fields} else None


def _assignment(field: str) -> str:
    """The option that changes a field of the spec; for one that takes a table alone, with its keys."""
    from isotrain.core.spec.training_spec import TrainingSpec  # slow to import: only on an error
    from isotrain.core.spec.validation import table_keys

    info = TrainingSpec.model_fields.get(field)
    keys = None if info is None else table_keys(info)
    if keys is None:
        return f"--set {field}=VALUE"
    if not keys:
        return f"--set '{field}={{KEY: VALUE}}'"
    return f"--set {field}.KEY=VALUE, where KEY is one of {', '.join(keys)}"
