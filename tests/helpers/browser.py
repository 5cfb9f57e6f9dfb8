"""The Chromium that tests look at pages with; run as a program it says whether there is one."""

from __future__ import annotations

import os
import shutil
import sys

REQUIRED_VARIABLE = "ISOTRAIN_BROWSER_REQUIRED"
"""Where it is set, having no browser fails the tests."""
_NAMES = (
    *("chromium-headless-shell", "chromium", "chromium-browser"),
    *("google-chrome", "google-chrome-stable"),
)
MISSING = (
    f"no Chromium found ({', '.join(_NAMES)}): the HTML report is not looked at. "
    "Debian: 'sudo apt install chromium-headless-shell'"
)


def find() -> str | None:
    """The path of a Chromium on this machine."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def is_required() -> bool:
    """Whether tests must fail where there is none."""
    return bool(os.environ.get(REQUIRED_VARIABLE))


if __name__ == "__main__":
    found = find()
    print(found or MISSING)
    sys.exit(found is None)
