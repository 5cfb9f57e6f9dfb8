"""Metadata that depends on where the project lives: `make dist URL=https://...` says where.

The links of the README are relative in a clone. In a distribution they lead to the files of its version
at that address, and the project's links are there; without an address they stay as they are.
"""

import os
import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
URL = os.environ.get("ISOTRAIN_URL", "").rstrip("/")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
RELATIVE_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)]+)\)")


def absolute_link(link: re.Match[str]) -> str:
    """A relative link of the README as one to the file at the address, an image to its bytes."""
    image, text, path = link.groups()
    return f"{image}{text}({URL}/{'raw' if image else 'blob'}/v{VERSION}/{path})"


README = (ROOT / "README.md").read_text(encoding="utf-8")
PATHS = {
    "Homepage": "",
    "Documentation": f"/tree/v{VERSION}/docs",
    "Changelog": f"/blob/v{VERSION}/CHANGELOG.md",
    "Issues": "/issues",
}

setup(
    long_description=RELATIVE_LINK.sub(absolute_link, README) if URL else README,
    long_description_content_type="text/markdown",
    project_urls={name: URL + path for name, path in PATHS.items()} if URL else {},
)
