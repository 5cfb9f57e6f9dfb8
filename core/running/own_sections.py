"""What the sections of a checkpoint are called that hold what each place of a run has for itself."""

from __future__ import annotations

from collections.abc import Iterable

_OF_REPLICA = "replica-"


def replica_section(replica: int, stage: int) -> str:
    """Of a stage of a replica; one that lies in no stages is its own first."""
    return f"{_OF_REPLICA}{replica}" + (f"-stage-{stage}" if stage else "")


def replica_sections(sections: Iterable[str]) -> list[str]:
    """Those among a checkpoint's sections, in its order."""
    return [section for section in sections if section.startswith(_OF_REPLICA)]
