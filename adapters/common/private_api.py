"""Uses of what a library does not document, each with a test of itself that `isotrain doctor` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from isotrain.plugin import Availability


@dataclass(frozen=True)
class PrivateApiProbe:
    """One of them.

    Attributes:
        name: Where it is in the library.
        still_works: Uses it as isotrain does; raises where it is not there, or does something else.
    """

    name: str
    still_works: Callable[[], None]

    @property
    def fault(self) -> str | None:
        """What is wrong with it, in a line; None where nothing is."""
        try:
            self.still_works()
        except Exception as error:
            return f"{self.name} ({type(error).__name__}: {error})"
        return None


def private_api_changes(
    library: str, version: str, parts: Iterable[PrivateApiProbe]
) -> Availability | None:
    """Tests private parts of a library.

    Args:
        library: Its name.
        version: The installed one.
        parts: What isotrain uses of it.

    Returns:
        That the library cannot be used, naming what has changed; None where nothing has.
    """
    faults = [fault for part in parts if (fault := part.fault)]
    if not faults:
        return None
    return Availability(
        False,
        version,
        f"{library} {version} has changed parts that it does not document: {'; '.join(faults)}",
        f"install a version of {library} that isotrain was tested with",
    )


def require(holds: bool, expected: str) -> None:
    """Raises where a private part does something else than it did.

    Raises:
        RuntimeError: It says what was expected.
    """
    if not holds:
        raise RuntimeError(f"expected: {expected}")
