"""How a strategy wants a model cut."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineSplit:
    """Into how many chunks, and where.

    Attributes:
        chunks: Of the model; chunk c is on stage c modulo the number of stages.
        first: The names of the layers with which the chunks after the first begin; none: where the backend
            finds them balanced, the same on every process.
        modules: Of a native model, the names of the modules that it applies one after the other, or patterns
            of these; none: as the model itself says.
    """

    chunks: int
    first: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
