"""What a backend, collective, launcher or logger says of whether it can be used here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Availability:
    """Whether a backend, one of its collectives, a launcher or a logger can be used here.

    Attributes:
        available: True when it can.
        version: Of the framework or library, when installed.
        reason: Why not, when not usable; else what it cannot do here, if there is something.
        hint: What to do about it.
    """

    available: bool
    version: str | None = None
    reason: str | None = None
    hint: str | None = None


@dataclass(frozen=True)
class Examination:
    """What `doctor` found by really loading a backend.

    Attributes:
        backend: Availability of the backend as a whole.
        collectives: Availability of each of its collectives.
        versions: Versions of every package it uses.
    """

    backend: Availability
    collectives: Mapping[str, Availability] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
