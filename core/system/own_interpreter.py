"""What belongs to this interpreter: Python itself, and the packages installed for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def is_of_interpreter(path: str) -> bool:
    """Whether a file or folder is part of it, and not of what a person wrote."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    return any(Path(os.path.abspath(path)).is_relative_to(folder) for folder in folders)
