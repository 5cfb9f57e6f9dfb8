"""The Chromium that tests open pages with; run as a program, it prints its path or what is missing."""

from __future__ import annotations

import os
import shutil
import sys

REQUIRED_VARIABLE = "ISOTRAIN_BROWSER_REQUIRED"
"""Variable that makes tests fail without a browser."""
_NAMES = (
    *("chromium-headless-shell", "chromium", "chromium-browser"),
    *("google-chrome", "google-chrome-stable"),
)
MISSING = (
    f"no Chromium found ({', '.join(_NAMES)}): the HTML report is not tested. "
    "Debian: 'sudo apt install chromium-headless-shell'"
)


def find() -> str | None:
    """Path of a Chromium on this machine."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def is_required() -> bool:
    """Whether tests must fail without a browser."""
    return bool(os.environ.get(REQUIRED_VARIABLE))


if __name__ == "__main__":
    found = find()
    print(found or MISSING)
    sys.exit(found is None)
