"""What a rank does of the work of another command, whose process has had an engine start it."""

from __future__ import annotations

import json
from importlib import import_module

from isotrain.core.contracts.job import ToldWork
from isotrain.core.errors import PlanError
from isotrain.core.launching.driving import WORK

_WORKS = {
    "measure": "isotrain.core.comparison.measure:Measurement",
    "trace": "isotrain.core.parity.trace:Trace",
}
"""By the name that each has for itself: where it is."""


def told_work(text: str) -> ToldWork:
    """Makes the work of what `--work` says.

    Raises:
        PlanError: It is none that this version knows.
    """
    try:
        fields = json.loads(text)
        module, _, name = _WORKS[fields.pop(WORK)].partition(":")
        kind: type[ToldWork] = getattr(import_module(module), name)
        return kind.of(fields)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PlanError(
            f"--work: expected what `isotrain compare` or `isotrain parity` of this version tells the ranks"
            f" that it has started; received {text!r:.80}."
        ) from error
