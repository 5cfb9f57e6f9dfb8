"""Where the command line looks for modules."""

from __future__ import annotations

import os
import sys


def add_working_directory_to_path() -> None:
    """Lets modules be found that lie in the current folder."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
