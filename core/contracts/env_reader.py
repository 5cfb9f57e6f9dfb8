"""The variables of one engine, read with care: what is half set or no number is an error that says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from isotrain.core.errors import ClusterInfoError

T = TypeVar("T")


class EnvReader:
    """Reads variables that an engine sets, and notes which. One that is set to nothing is not set."""

    def __init__(self, engine: str, variables: Mapping[str, str]) -> None:
        self._engine = engine
        self._variables = variables
        self._read: dict[str, None] = {}

    @property
    def variables_read(self) -> tuple[str, ...]:
        """The names of the set variables that were asked for so far, in order."""
        return tuple(self._read)

    def all_set(self, *names: str) -> bool:
        """Whether the engine has set these variables: all of them, or none.

        Raises:
            ClusterInfoError: Some of them are set, and others are not.
        """
        found = [name for name in names if self.text(name) is not None]
        missing = [name for name in names if name not in found]
        if found and missing:
            raise ClusterInfoError(
                f"{self._engine}: {_are_set(found)}, but not {' and '.join(missing)}; expected all of"
                f" {', '.join(names)}, as this engine sets them, or none. Set what is missing, or unset"
                " the others."
            )
        return bool(found)

    def text(self, name: str) -> str | None:
        """The text of a variable; None: it is not set."""
        found = self._variables.get(name, "").strip()
        if not found:
            return None
        self._read[name] = None
        return found

    def required_text(self, name: str) -> str:
        """The text of a variable without which the place is not whole.

        Raises:
            ClusterInfoError: It is not set.
        """
        found = self.text(name)
        if found is None:
            self.all_set(*self._read, name)
        return found or ""

    def number(self, name: str) -> int | None:
        """The whole number, of at least 0, that a variable is set to; None: it is not set.

        Raises:
            ClusterInfoError: It is set to something else.
        """
        found = self.text(name)
        if found is None:
            return None
        if not (found.isascii() and found.isdecimal()):
            raise ClusterInfoError(
                f"{self._engine}: {name} is {found!r}; expected a whole number of at least 0."
            )
        return int(found)

    def required_number(self, name: str) -> int:
        """The number of a variable without which the place is not whole.

        Raises:
            ClusterInfoError: It is not set, or to something else.
        """
        self.required_text(name)
        return self.number(name) or 0

    def required_list(self, name: str, read: Callable[[str], list[T]]) -> tuple[T, ...]:
        """What `host_list` or `counts_per_host` reads in a variable without which the place is not whole.

        Raises:
            ClusterInfoError: It is not set, or to something else.
        """
        text = self.required_text(name)
        try:
            return tuple(read(text))
        except ClusterInfoError as error:
            raise ClusterInfoError(f"{self._engine}: {name}: {error}") from error


def _are_set(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} set"
