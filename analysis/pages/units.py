"""Formatting of a comparison's numbers: one unit and one number of decimals per column."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["plain", "rate", "seconds", "bytes", "bytes/s", "percent", "loss", "difference"]

_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "bytes/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")),
    "rate": ((1.0, "samples/s"),),
    "percent": ((0.01, "%"),),
}
_DIGITS = 3
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Unit:
    """Unit and number of decimals in which numbers are formatted.

    Attributes:
        kind: Kind of quantity.
        name: Unit name; empty for plain numbers.
        size: Size of the unit in the records' base unit, such as 1e-3 for ms.
        decimals: Digits after the decimal point.
    """

    kind: Kind
    name: str
    size: float
    decimals: int

    def text(self, value: float) -> str:
        """A number in this unit, without the unit's name."""
        if math.isnan(value):
            return "not a number"
        if math.isinf(value):
            return "∞" if value > 0 else "−∞"
        if self.kind == "difference":
            return power(value)
        return f"{value / self.size:,.{self.decimals}f}".replace("-", "−")

    def full(self, value: float) -> str:
        """A number in this unit, with the unit's name."""
        return f"{self.text(value)} {self.name}".rstrip()


def unit_of(kind: Kind, values: Iterable[float]) -> Unit:
    """Picks the unit in which the largest of some numbers has few digits before the point.

    Args:
        kind: Kind of quantity.
        values: Numbers in seconds, bytes, bytes per second or without unit; non-finite ones are ignored.
    """
    sizes = [abs(value) for value in values if math.isfinite(value) and value != 0]
    largest, smallest = max(sizes, default=1.0), min(sizes, default=1.0)
    scales = _SCALES.get(kind, ((1.0, ""),))
    size, name = next((scale for scale in scales if largest >= scale[0]), scales[-1])
    if kind == "loss":
        return Unit(kind, name, size, max(map(_shortest, sizes), default=0))
    return Unit(kind, name, size, _decimals(smallest / size, largest / size))


def _decimals(smallest: float, largest: float) -> int:
    """Three digits of the smallest, unless that gives the largest more than six."""
    wanted = _DIGITS - 1 - math.floor(math.log10(smallest))
    room = 2 * _DIGITS - 1 - math.floor(math.log10(largest))
    return max(0, min(wanted, room))


def _shortest(value: float) -> int:
    """Decimals that six digits of a number take, without zeros at the end."""
    digits, _, exponent = f"{value:.6g}".partition("e")
    return max(0, len(digits.partition(".")[2]) - int(exponent or 0))


def power(value: float) -> str:
    """A number in scientific notation with two digits."""
    if value == 0:
        return "0"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits} × 10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def tick(value: float, _position: float) -> str:
    """A tick label; matplotlib formatter signature."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.6g}".replace("-", "−")
    digits, _, exponent = f"{value:.0e}".partition("e")
    shown = f"10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return shown if digits == "1" else f"{digits} × {shown}"
