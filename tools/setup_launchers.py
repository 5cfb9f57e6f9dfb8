"""Install the launchers that tests/launchers starts: SLURM, OpenMPI, SSH, Ray, and Horovod with MPI.

Run it with the Python of the environment that `make` sets up. What is of Debian is installed where it is
missing, which takes root; no service of it is started. What is of PyPI goes into `.venv-launchers`, which
sees the packages of that environment below its own, so that neither is changed: Horovod is there a second
time, built with MPI too.

Each step is one line on the screen; what it says goes to `.venv-launchers/setup.log`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from isotrain.build_horovod import progress

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-launchers"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "setup.log"
STAMP = VENV / ".stamp"
CONSTRAINTS = ROOT / "constraints.txt"
BUILD_HOROVOD = ROOT / "tools" / "build_horovod"
DEBIAN = (
    *(
        "munge",
        "slurm-wlm",
        "openmpi-bin",
        "libopenmpi-dev",
        "mpich",
        "openssh-server",
        "openssh-client",
    ),
    *("iproute2", "util-linux", "mount", "hostname"),
)
PYPI = ("ray[train]", "kubernetes-validate")
DETAIL = re.compile(
    r"^\s*((?:Collecting|Downloading|Installing|Unpacking|Setting up) \S{,60})"
    r"|^horovod: (.*?)(?: \.\.\. [\d mins]+  (.*))?$"
)
LOG_LINES = 30


class SetupError(Exception):
    """The launchers cannot be installed; the text says why and what to do."""


def _missing() -> list[str]:
    """Debian packages that are not installed."""
    if not shutil.which("dpkg-query"):
        raise SetupError(f"this is no Debian or Ubuntu: install {', '.join(DEBIAN)} by hand")
    form = ("dpkg-query", "--show", "--showformat", "${db:Status-Abbrev}")
    return [name for name in DEBIAN if not _says([*form, name]).startswith("ii")]


def _says(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _inputs() -> str:
    """A digest of what decides what is installed."""
    below = Path(sys.prefix) / ".stamp"
    files = [Path(__file__).resolve(), CONSTRAINTS, *sorted(BUILD_HOROVOD.iterdir()), below]
    digest = hashlib.sha256(f"{VENV} {sys.prefix}".encode())
    for file in filter(Path.is_file, files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _run(title: str, command: Sequence[str], **variables: str) -> None:
    step = progress.Step(f"launchers: {title}", command, DETAIL, plain_period_s=60)
    status = progress.run_logged(step, LOG, os.environ | variables)
    if status:
        said = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        raise SetupError(
            f"this ended with exit status {status}: {' '.join(command)}\n"
            + "".join(f"  | {line}\n" for line in said)
            + f"All of it is in {LOG}."
        )


def _install_debian(missing: Sequence[str]) -> None:
    if os.geteuid() != 0:
        raise SetupError(f"not installed: run 'sudo apt install {' '.join(missing)}'")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    _run("updating Debian's lists", ("apt-get", "update"), **quiet)
    options = ("install", "--yes", "--no-install-recommends")
    _run(f"installing {', '.join(missing)}", ("apt-get", *options, *missing), **quiet)


def _install_python() -> None:
    for entry in VENV.iterdir():
        if entry not in (LOG, STAMP):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    make = (sys.executable, "-m", "venv", "--without-pip", str(VENV))
    _run("making .venv-launchers", make)
    below = sysconfig.get_path("purelib")
    packages = Path(
        _says([str(PYTHON), "-c", "import site; print(site.getsitepackages()[0])"]).strip()
    )
    (packages / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    pip = (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install")
    _run(f"installing {', '.join(PYPI)}", (*pip, "--constraint", str(CONSTRAINTS), *PYPI))
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    mpi = {"ISOTRAIN_HOROVOD_MPI": "1", "PATH": tools}
    _run("installing Horovod with MPI", (str(PYTHON), "-m", "isotrain.build_horovod"), **mpi)


def _install() -> None:
    VENV.mkdir(exist_ok=True)
    if missing := _missing():
        _install_debian(missing)
    inputs = _inputs()
    if STAMP.is_file() and STAMP.read_text() == inputs:
        return
    STAMP.unlink(missing_ok=True)
    _install_python()
    STAMP.write_text(inputs)
    print("launchers: complete", file=sys.stderr)


def main() -> int:
    """Install what is missing; returns the exit status."""
    try:
        _install()
    except SetupError as error:
        print(f"launchers: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
