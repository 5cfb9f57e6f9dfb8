"""Find Python's C headers, which PyTorch's extension headers include."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


class HeadersError(Exception):
    """There are no headers for this Python; the text says what to install."""


def find_or_fetch(folder: Path) -> tuple[Path, ...]:
    """Say which folders must be added to the compiler's search path.

    Debian and Ubuntu keep the headers in a package of their own, which a machine with only Python
    and venv does not have. Then the package is downloaded with apt-get and unpacked into `folder`;
    that needs no root.

    Args:
        folder: Folder in which to unpack the package.

    Returns:
        The folders to add; none where the compiler finds the headers by itself.

    Raises:
        HeadersError: The headers are neither installed nor to be had.
    """
    if Path(sysconfig.get_path("include"), "Python.h").is_file():
        return ()
    return fetch_debian_package(folder)


def fetch_debian_package(folder: Path) -> tuple[Path, ...]:
    """Download and unpack the headers' Debian package; returns the include folders in it."""
    name = f"libpython{_VERSION}-dev"
    advice = f"Python's C headers are missing: run 'sudo apt install {name}' and run this again"
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise HeadersError(advice)
    folder.mkdir(parents=True)
    print(f"horovod: fetching Python's C headers ({name})", file=sys.stderr, flush=True)
    fetch = subprocess.run(
        ["apt-get", "--quiet", "download", name],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    package = next(folder.glob("*.deb"), None)
    if fetch.returncode or package is None:
        raise HeadersError(f"{advice} (apt-get could not download it: {fetch.stderr.strip()})")
    subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True)
    include = folder / "usr" / "include"
    if not (include / f"python{_VERSION}" / "Python.h").is_file():
        raise HeadersError(f"{advice} ({package.name} does not contain them)")
    return include / f"python{_VERSION}", include
