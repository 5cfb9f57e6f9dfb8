"""Runs work with a session in a process of its own, so that its imports stay out of the test process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import isotrain


def run_isolated(
    work: Callable[[isotrain.Session], Any], spec: dict[str, Any], backend: str, folder: Path
) -> Any:
    """The return value of work with a session of one replica; its error fails the test with its text.

    Args:
        work: Function of a module, or a partial of one: it is pickled.
        spec: Spec of the session; one thread by default, as in most tests, so that they share a fork
            server.
        backend: Name of the backend.
        folder: Run directory; must not exist yet.
    """
    (returned,) = isotrain.launch(
        work,
        {"threads": 1, **spec},
        backend=backend,
        replicas=1,
        output=folder,
        on_event=lambda event: None,
    )
    return returned
