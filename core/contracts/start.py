"""How the processes of a run come to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class StartMethod:
    """How the processes of a run come to be.

    They are forked from one process that has imported the framework and run nothing of it, or each
    of them starts by itself. Forking is safe only after imports that start no runtime, open no
    device and leave no thread that matters: threads do not survive it.

    Attributes:
        imports: What that process imports, in this order.
        why_fresh: Why there is no such process; None where there is.
    """

    imports: tuple[str, ...] = ()
    why_fresh: str | None = None

    @property
    def way(self) -> Literal["forked", "fresh"]:
        """How, in a word."""
        return "forked" if self.why_fresh is None else "fresh"
