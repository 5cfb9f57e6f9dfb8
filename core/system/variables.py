"""Setting environment variables of this process for a while, where a library takes nothing else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def environ_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process, and puts the former values back."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
