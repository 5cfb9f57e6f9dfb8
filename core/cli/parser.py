"""A parser of arguments that raises what is wrong, and says what was probably meant."""

from __future__ import annotations

import argparse
import itertools
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from isotrain.core.errors import IsotrainError, nearest, unknown_name, whether_meant


class UsageError(IsotrainError):
    """The command line itself is wrong."""


class HelpLayout(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions, and options beside their explanation."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
        self._action_max_length = 15  # the names of the commands stand beside theirs too


class StoreOnce(argparse.Action):
    """Keeps an option's value, and refuses a second one where the last would win without a word."""

    _given_to: argparse.Namespace | None = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Keeps it."""
        if option_string and self._given_to is namespace:
            parser.error(f"{option_string} was given twice; expected one value.")
        self._given_to = namespace
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Raises what is wrong instead of ending the program.

    Attributes:
        commands: Of the whole program; none of a command's own parser.
    """

    commands: Mapping[str, Any] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self.register("action", None, StoreOnce)

    def error(self, message: str) -> NoReturn:
        """Raises an error that also shows how to use the command."""
        raise UsageError(f"{message}\n{self.format_usage()}`{self.prog} --help` explains it.")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str], namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses as ever, but refuses what it does not know, before it asks for what is missing."""
        own = list(args)
        if self.commands:
            own = list(itertools.takewhile(lambda word: word.startswith("-"), args))
            self._require_command(args[len(own) :])
        self._require_options(itertools.takewhile(lambda word: word != "--", own))
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}.")
        return found, unknown

    def _require_command(self, words: Sequence[str]) -> None:
        if words and words[0] not in self.commands:
            self.error(unknown_name("command", words[0], self.commands))

    def _require_options(self, words: Iterable[str]) -> None:
        known = [name for action in self._actions for name in action.option_strings]
        for name in (word.partition("=")[0] for word in words if _is_option(word)):
            if name not in known:
                self.error(f"unknown option {name!r}.{self._hint(name, known)}")

    def _hint(self, name: str, known: Iterable[str]) -> str:
        if self.commands:
            return " The options of a command stand after its name."
        field = _field(name) if "--set" in known else None
        if field is not None:
            return f" Fields of the spec are changed with --set {field}=VALUE."
        return _meant(name, [each.removeprefix("--") for each in known if each.startswith("--")])


def _is_option(word: str) -> bool:
    """Whether a word can only be an option: not `-`, and no negative number."""
    return word.startswith("-") and word[1:2] not in {"", ".", *string.digits}


def _meant(name: str, known: Iterable[str]) -> str:
    """Asks for the option that was meant: of one letter, one that begins with it."""
    if name.startswith("--"):
        near = nearest(name.removeprefix("--"), known)
    else:
        near = min((each for each in known if each.startswith(name[1])), default=None)
    return whether_meant(f"--{near}" if near else None)


def _field(option: str) -> str | None:
    """The field of the spec that someone took for an option; None if there is none."""
    from isotrain.core.spec.optimizers import AdamW, Sgd  # takes a while: only on an error
    from isotrain.core.spec.training_spec import TrainingSpec
    from isotrain.core.spec.validation import ELSEWHERE

    word = option.lstrip("-").replace("-", "_")
    name = ELSEWHERE.get(word, word)
    if name in TrainingSpec.model_fields:
        return name
    return f"optimizer.{name}" if name in {*Sgd.model_fields, *AdamW.model_fields} else None
