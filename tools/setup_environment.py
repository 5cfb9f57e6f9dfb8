"""Make the environment that the Makefile uses: `.venv`, with the versions of constraints.txt.

Run by every `make` target. It is done in an instant when nothing has changed since the last
complete set-up; a set-up that failed or was interrupted is done again. Packages come from wherever
pip is configured to look. Each step is one line on the screen; what it says goes to `.venv/setup.log`.

This file must also run, far enough to say what is missing, on older Pythons.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools" / "build_horovod"))

import progress  # noqa: E402 - isotrain is not installed yet

VENV = ROOT / ".venv"
STAMP = VENV / ".stamp"
LOG = VENV / "setup.log"
LOG_LINES = 40  # shown on failure; the message of Horovod's build fits in
VENV_PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = (3, 11)

TENSORFLOW = "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow"
BUILD_TOOLS = ("pip", "setuptools", "wheel")
HOROVOD_NEEDS = ("cffi", "cmake", "packaging")
JAX = ("jax", "jaxlib")
JAX_FOLDER = VENV / "jax"
"""Apart from the others: where JAX can be imported Keras and TensorFlow import it, in every process."""
STREAMS = ("litdata", "mosaicml-streaming")
"""Without what they require: torchvision needs another torch, and MosaicML Streaming an older NumPy."""

DETAIL = re.compile(
    r"^\s*((?:Collecting|Downloading|Building|Installing) [^<>=~!;]{,60})"  # pip
    r"|^horovod: (.*?)(?: \.\.\. [\d mins]+  (.*))?$"
)


class SetupError(Exception):
    """The set-up cannot be done; the text says why and what to do."""


def _inputs() -> str:
    """A digest of everything that decides what gets installed."""
    files = [CONSTRAINTS, ROOT / "pyproject.toml", ROOT / "setup.py", Path(__file__).resolve()]
    files += sorted(f for f in (ROOT / "tools" / "build_horovod").iterdir() if f.is_file())
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


def _stamp() -> dict[str, str]:
    """Inputs and choices of the last complete set-up; empty without one."""
    try:
        stamp: dict[str, str] = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp


def horovod_choice() -> str:
    """Whether Horovod is wanted, `1` or `0`: as `HOROVOD` says, else as in the last set-up."""
    return os.environ.get("HOROVOD") or _stamp().get("horovod", "1")


def tools_choice() -> str:
    """Whether the tools for working on isotrain are wanted, `1` or `0`; what is there stays."""
    return "0" if os.environ.get("TOOLS") == "0" and _stamp().get("tools") != "1" else "1"


def is_complete(inputs: str) -> bool:
    """Whether the last set-up was completed with the same inputs, Python and choices."""
    stamp = _stamp()
    wanted = {"inputs": inputs, "python": "{}.{}".format(*sys.version_info)}
    if horovod_choice() != "0":
        wanted["horovod"] = "1"
    if tools_choice() != "0":
        wanted["tools"] = "1"
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


def _run(step: progress.Step) -> None:
    began = LOG.stat().st_size if LOG.exists() else 0
    status = progress.run_logged(step, LOG, os.environ)
    if status:
        raise SetupError(
            f"this step ended with exit status {status}:\n"
            f"  {' '.join(step.command)}\n"
            f"The end of what it said (all of it is in {LOG}):\n{_end_of_log(began)}\n"
            "Put right what it names and run the same make command again."
        )


def _end_of_log(began: int) -> str:
    """The last lines that were logged since the log was `began` bytes long."""
    with LOG.open("rb") as file:
        file.seek(began)
        lines = file.read().decode("utf-8", errors="replace").splitlines()[1:]
    return "\n".join(f"  | {line.rstrip()}" for line in lines[-LOG_LINES:])


def _has_venv() -> bool:
    """Whether `.venv` is a working environment of this Python that was made in this place."""
    config = VENV / "pyvenv.cfg"
    here = config.is_file() and f" {VENV}\n" in config.read_text(encoding="utf-8")
    python = "{}.{}".format(*sys.version_info)
    return here and (VENV / "bin" / "pip").exists() and _version_of(VENV_PYTHON) == python


def _clear_venv() -> None:
    """Leave an empty `.venv`; refuses to empty a folder that no set-up has made."""
    VENV.mkdir(exist_ok=True)
    entries = list(VENV.iterdir())
    if entries and not (VENV / "pyvenv.cfg").is_file() and LOG not in entries:
        raise SetupError(
            f"{VENV} exists and is not a virtual environment: move it away and run this again."
        )
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def steps(
    with_venv: bool, with_horovod: bool = True, with_tools: bool = True
) -> list[progress.Step]:
    """Steps to run, in this order."""
    pip = (str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check", "install")
    pinned = (*pip, "--constraint", str(CONSTRAINTS))
    project = ["--no-build-isolation", "--editable", f"{ROOT}[torch,report,testing]"]
    if with_tools:
        project += ["--group", f"{ROOT}/pyproject.toml:dev"]
    venv = (os.path.realpath(sys.executable), "-m", "venv", str(VENV))
    horovod = (str(VENV_PYTHON), "-m", "isotrain.build_horovod")
    streams = (*pinned, "--no-deps", *STREAMS)
    jax = (*pinned, "--no-deps", "--upgrade", "--target", str(JAX_FOLDER), *JAX)
    tasks = [
        ("creating .venv with Python {}.{}".format(*sys.version_info), "", venv),
        ("installing the build tools", "", (*pinned, *BUILD_TOOLS)),
        (
            "installing PyTorch, TensorFlow" + (", test tools" if with_tools else ""),
            "about 500 MB",
            (*pinned, *(HOROVOD_NEEDS if with_horovod else ()), TENSORFLOW, *project),
        ),
        (
            "installing Horovod",
            "compiled the first time: 3 to 4 minutes on 2 idle cores; HOROVOD=0 leaves it out",
            horovod,
        ),
        ("installing libraries of streams", "", streams),
        ("installing JAX for the example of a backend", "", jax),
    ]
    left_out = [
        *([] if with_venv else [venv]),
        *([] if with_horovod else [horovod]),
        *([] if with_tools else [streams, jax]),
    ]
    wanted = [task for task in tasks if task[2] not in left_out]
    return [
        progress.Step(f"set-up: {number} of {len(wanted)}  {title}", command, DETAIL, note)
        for number, (title, note, command) in enumerate(wanted, start=1)
    ]


def _install(with_horovod: bool, with_tools: bool) -> None:
    """Make `.venv` where there is none that serves, and install everything into it."""
    missing = not _has_venv()
    if missing:
        _clear_venv()
    LOG.unlink(missing_ok=True)
    for step in steps(missing, with_horovod, with_tools):
        _run(step)


def write_stamp(inputs: str, horovod: str, tools: str) -> None:
    stamp = {
        "inputs": inputs,
        "python": "{}.{}".format(*sys.version_info),
        "mpi": os.environ.get("ISOTRAIN_HOROVOD_MPI", ""),
        "horovod": horovod,
        "tools": tools,
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
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        _check_python()
        inputs = _inputs()
        with _one_at_a_time():
            if is_complete(inputs):
                return 0
            horovod, tools = horovod_choice(), tools_choice()
            if horovod != "0":
                _check_compiler()
            if STAMP.exists():
                STAMP.unlink()
            _install(horovod != "0", tools != "0")
            write_stamp(inputs, horovod, tools)
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
