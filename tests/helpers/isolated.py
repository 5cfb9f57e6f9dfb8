"""Work with a session in a process of its own: what it imports stays out of the tests' own processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import isotrain


def run_isolated(
    work: Callable[[isotrain.Session], Any], spec: dict[str, Any], backend: str, folder: Path
) -> Any:
    """What work with a session of one replica returns; what it raises ends the test with its text.

    Args:
        work: Of a module, or a partial of one: it is pickled.
        spec: Of the session; with one thread where it does not say how many, as replicas of most tests
            have: a fork server is for one number.
        backend: Its name.
        folder: For the files of the run; must not be there yet.
    """
    (returned,) = isotrain.launch(
        work,
        {"threads": 1, **spec},
        backend=backend,
        replicas=1,
        run_directory=folder,
        on_event=lambda event: None,
    )
    return returned
