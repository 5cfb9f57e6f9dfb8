"""A parser of arguments that raises what is wrong, and says what was probably meant."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from isotrain.core.errors import IsotrainError, did_you_mean, unknown_name


class UsageError(IsotrainError):
    """The command line itself is wrong."""


class Layout(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions, and options beside their explanation."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)
        self._action_max_length = 15  # the names of the commands stand beside theirs too


class Parser(argparse.ArgumentParser):
    """Raises what is wrong instead of ending the program.

    Attributes:
        commands: Of the whole program; none of a command's own parser.
    """

    commands: Mapping[str, Any] = {}

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
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and not any(each.startswith(name) for each in known):
                self.error(f"unknown option {name!r}.{self._hint(name, known)}")

    def _hint(self, name: str, known: Sequence[str]) -> str:
        if self.commands:
            return " The options of a command stand after its name."
        field = _field(name) if "--set" in known else None
        if field is not None:
            return f" Fields of the spec are changed with --set {field}=VALUE."
        return did_you_mean(name, known)


def _field(option: str) -> str | None:
    """The field of the spec that someone took for an option; None if there is none."""
    from isotrain.core.spec.optimizers import AdamW, Sgd  # takes a while: only on an error
    from isotrain.core.spec.problems import ELSEWHERE
    from isotrain.core.spec.training_spec import TrainingSpec

    word = option.lstrip("-").replace("-", "_")
    name = ELSEWHERE.get(word, word)
    if name in TrainingSpec.model_fields:
        return name
    return f"optimizer.{name}" if name in {*Sgd.model_fields, *AdamW.model_fields} else None
