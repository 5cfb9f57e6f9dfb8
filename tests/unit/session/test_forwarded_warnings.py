"""Warnings of this package in a process of a run: whoever watches the run is told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from isotrain.core.contracts.events import ProcessEvent, Warned
from isotrain.core.worker import worker


class Listening:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[ProcessEvent] = []

    def emit(self, event: ProcessEvent) -> None:
        self.told.append(event)


def test_warnings_are_events(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(warnings, "showwarning", lambda *given, **options: shown.append(given))
    reporter: Any = Listening()
    worker.forward_warnings(reporter)
    warnings.showwarning("ours", RuntimeWarning, worker.__file__, 1)
    warnings.showwarning("another's", RuntimeWarning, warnings.__file__, 1)
    assert reporter.told == [Warned(text="ours")]
    assert [given[0] for given in shown] == ["ours", "another's"]
