"""Probes of private APIs of libraries, which `isotrain doctor` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from isotrain.plugin import Availability


@dataclass(frozen=True)
class PrivateApiProbe:
    """A use of a private API, with a test that it still works.

    Attributes:
        name: Name of the API in the library.
        still_works: Uses the API as isotrain does; raises if it is missing or behaves differently.
    """

    name: str
    still_works: Callable[[], None]

    @property
    def fault(self) -> str | None:
        """The probe's error in one line; None where it passes."""
        try:
            self.still_works()
        except Exception as error:
            return f"{self.name} ({type(error).__name__}: {error})"
        return None


def private_api_changes(
    library: str, version: str, parts: Iterable[PrivateApiProbe]
) -> Availability | None:
    """Runs the probes of a library.

    Args:
        library: Name of the library.
        version: Installed version.
        parts: Probes of the private APIs that isotrain uses.

    Returns:
        Unavailability that names the changed APIs; None where no probe fails.
    """
    faults = [fault for probe in parts if (fault := probe.fault)]
    if not faults:
        return None
    return Availability(
        False,
        version,
        f"{library} {version} has changed private APIs: {'; '.join(faults)}",
        f"install a version of {library} that isotrain was tested with",
    )


def require(holds: bool, expected: str) -> None:
    """Raises where a probe does not hold.

    Raises:
        RuntimeError: The probe does not hold; the message says what was expected.
    """
    if not holds:
        raise RuntimeError(f"expected: {expected}")
