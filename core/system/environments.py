"""What belongs to the environment of this interpreter, and not to a person."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def is_of_environment(path: str) -> bool:
    """Whether a file or folder lies in it."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return any(Path(os.path.abspath(path)).is_relative_to(folder) for folder in folders)
