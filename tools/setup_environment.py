"""Make the environment that the Makefile uses: `.venv`, with the versions of constraints.txt.

Run by every `make` target. It is done in an instant when nothing has changed since the last
complete set-up; a set-up that failed or was interrupted is done again. Packages come from wherever
pip is configured to look.

This file must also run, far enough to say what is missing, on older Pythons.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".stamp"
VENV_PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = (3, 11)

TENSORFLOW = "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow"
BUILD_TOOLS = ("setuptools", "wheel")
HOROVOD_NEEDS = ("cffi", "cmake", "packaging")
JAX = ("jax", "jaxlib")
JAX_FOLDER = VENV / "jax"
"""Apart from the others: where JAX can be imported Keras and TensorFlow import it, in every process."""


class SetupError(Exception):
    """The set-up cannot be done; the text says why and what to do."""


def _inputs() -> str:
    """A digest of everything that decides what gets installed."""
    files = [CONSTRAINTS, ROOT / "pyproject.toml", Path(__file__).resolve()]
    files += sorted(f for f in (ROOT / "tools" / "horovod").iterdir() if f.is_file())
    digest = hashlib.sha256(str(VENV).encode())
    for file in files:
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _version_of(python: Path) -> str | None:
    """Major and minor version of an interpreter; None when it does not run."""
    program = "import sys; print('{}.{}'.format(*sys.version_info))"
    try:
        done = subprocess.run(
            [str(python), "-c", program], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _is_complete(inputs: str) -> bool:
    """Whether the last set-up was completed with the same inputs, Python and choice of MPI."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    wanted = {"inputs": inputs, "python": "{}.{}".format(*sys.version_info)}
    if "ISOTRAIN_HOROVOD_MPI" in os.environ:
        wanted["mpi"] = os.environ["ISOTRAIN_HOROVOD_MPI"]
    return all(stamp.get(name) == value for name, value in wanted.items())


def _check_python() -> None:
    if sys.version_info < OLDEST:
        raise SetupError(
            "Python {}.{} or newer is needed, and {} is {}.\n"
            "Install one (Debian 12, Ubuntu 24.04: 'sudo apt install python3 python3-venv'),\n"
            "or name one that you have: 'PYTHON=python3.12 make demo'.".format(
                *OLDEST, sys.executable, platform.python_version()
            )
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"{sys.executable} cannot make virtual environments (no module {error.name}).\n"
            "Run 'sudo apt install python{}.{}-venv' and run this again.".format(*sys.version_info)
        ) from error


def _check_compiler() -> None:
    """Say before the downloads what would stop the build of Horovod after them."""
    compiler = os.environ.get("CXX", "").split()[:1] or ["c++"]
    missing = [name for name in (*compiler, "make") if not shutil.which(name)]
    if missing:
        raise SetupError(
            f"not found: {', '.join(missing)}.\n"
            "Horovod is compiled here, which takes a C++ compiler and make.\n"
            "Run 'sudo apt install g++ make' and run this again."
        )


def _run(*command: str) -> None:
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()  # the step was interrupted too and tidies up
            raise
    if status:
        shown = " ".join(command)
        raise SetupError(
            f"this step failed with exit status {status}, its message is above:\n"
            f"  {shown}\n"
            "Put right what it names and run the same make command again."
        )


def _make_venv() -> None:
    """Create `.venv`, unless there is a working one of this Python made in this place."""
    wanted = "{}.{}".format(*sys.version_info)
    config = VENV / "pyvenv.cfg"
    here = config.is_file() and f" {VENV}\n" in config.read_text(encoding="utf-8")
    if here and (VENV / "bin" / "pip").exists() and _version_of(VENV_PYTHON) == wanted:
        return
    if VENV.exists() and not config.is_file() and any(VENV.iterdir()):
        raise SetupError(
            f"{VENV} exists and is not a virtual environment: move it away and run this again."
        )
    print(f"set-up: creating {VENV} with Python {wanted}", flush=True)
    _run(os.path.realpath(sys.executable), "-m", "venv", "--clear", str(VENV))


def _install() -> None:
    pip = (str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check", "install")
    pinned = (*pip, "--constraint", str(CONSTRAINTS))
    print(
        "set-up: installing the pinned packages (PyTorch and TensorFlow are about 500 MB)",
        flush=True,
    )
    _run(*pinned, *BUILD_TOOLS)
    extras = f"{ROOT}[torch,dev]"
    _run(*pinned, *HOROVOD_NEEDS, TENSORFLOW, "--no-build-isolation", "--editable", extras)
    print("set-up: installing Horovod", flush=True)
    _run(str(VENV_PYTHON), str(ROOT / "tools" / "horovod" / "build.py"))
    print("set-up: installing JAX for the example of a backend", flush=True)
    _run(*pinned, "--no-deps", "--upgrade", "--target", str(JAX_FOLDER), *JAX)


def _write_stamp(inputs: str) -> None:
    stamp = {
        "inputs": inputs,
        "python": "{}.{}".format(*sys.version_info),
        "mpi": os.environ.get("ISOTRAIN_HOROVOD_MPI", ""),
    }
    unfinished = STAMP.with_suffix(".new")
    unfinished.write_text(json.dumps(stamp), encoding="utf-8")
    os.replace(unfinished, STAMP)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold a lock on the clone: two runs of make must not install into it at once."""
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("set-up: another one is running in this clone: waiting for it", flush=True)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def main() -> int:
    """Bring the environment up to date; returns the exit status."""
    try:
        _check_python()
        inputs = _inputs()
        with _one_at_a_time():
            if _is_complete(inputs):
                return 0
            _check_compiler()
            if STAMP.exists():
                STAMP.unlink()
            _make_venv()
            _install()
            _write_stamp(inputs)
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted: the next make begins it again", file=sys.stderr)
        return 130
    print("set-up: complete", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
