"""Which locations are URLs, and not paths of this machine."""

from __future__ import annotations

import re

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(location: str) -> bool:
    """Whether a location is a URL."""
    return _URL.match(location) is not None
