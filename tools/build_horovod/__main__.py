"""Install Horovod into the Python environment that runs this program: `python -m isotrain.build_horovod`.

The wheel is built from the registry's source distribution with the patch beside this file, against
the PyTorch and TensorFlow of this environment, and kept in a cache outside the clone, so that it is
built once per combination of versions. Also for environments of your own: run it with their Python,
after installing PyTorch and/or TensorFlow and `cmake cffi cloudpickle packaging psutil pyyaml wheel
'setuptools<81'`.

Variables:
    ISOTRAIN_HOROVOD_MPI=1: build the MPI controller too; needs an MPI with its headers, for
        instance libopenmpi-dev.
    HOROVOD_GPU_OPERATIONS, HOROVOD_NCCL_HOME, HOROVOD_CUDA_HOME, ...: Horovod's own variables for
        GPU builds.
    XDG_CACHE_HOME: where the cache is (default ~/.cache); its folder there is isotrain/horovod.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from isotrain.build_horovod import headers, progress, unified_patch

HERE = Path(__file__).resolve().parent
VERSION = "0.28.1"
PATCH = HERE / f"horovod-{VERSION}.patch"
GPU_PATCH = HERE / f"horovod-{VERSION}-gpu.patch"
REQUIREMENTS = HERE / "requirements.txt"
TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly")
NCCL_NAMES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
NEEDED = ("cffi", "cloudpickle", "cmake", "packaging", "psutil", "pyyaml", "wheel")
GPU_VARIABLES = ("HOROVOD_GPU", "HOROVOD_NCCL_", "HOROVOD_CUDA_", "HOROVOD_ROCM_")
MEMORY_PER_COMPILER = 2 * 1024**3  # bytes; TensorFlow's headers are the hungriest
LOG_LINES = 30  # of the log, shown on failure
PLAIN_PERIOD_S = 15.0

_COMPILED = re.compile(r"\[\s*(\d+%)\] (?:Building|Linking) \S+ .*?([^/\s]+)\s*$")
_ERROR = re.compile(
    r"\berror:|\bCMake Error\b|\*\*\* |\bKilled\b|cannot allocate memory", re.IGNORECASE
)


class BuildError(Exception):
    """Horovod cannot be built here; the text says why and what to do."""


def _installed(*names: str) -> str | None:
    """The first of these that is installed, as `name==version` with the local part."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name}=={importlib.metadata.version(name)}"
    return None


def _build_flags() -> dict[str, str]:
    """The environment variables that decide what is built."""
    have_torch = _installed("torch")
    have_tensorflow = _installed(*TENSORFLOW_NAMES)
    if not (have_torch or have_tensorflow):
        raise BuildError(
            f"neither PyTorch nor TensorFlow is installed in {sys.prefix}: install one of them "
            "first, because Horovod is compiled against it"
        )
    mpi = os.environ.get("ISOTRAIN_HOROVOD_MPI", "0") not in ("", "0")
    flags = {
        "HOROVOD_WITH_PYTORCH" if have_torch else "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW" if have_tensorflow else "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "LDFLAGS": f"{os.environ.get('LDFLAGS', '')} -Wl,--strip-debug".strip(),
    }
    chosen = {k: v for k, v in os.environ.items() if k.startswith(GPU_VARIABLES)}
    return flags | chosen


def _compiler() -> str:
    """The C++ compiler that CMake will pick."""
    name = os.environ.get("CXX", "").strip() or next(
        filter(shutil.which, ("c++", "g++", "clang++")), ""
    )
    if not name or not shutil.which(name.split()[0]):
        raise BuildError(
            f"no C++ compiler found{f' (CXX={name})' if name else ''}: install one, for instance "
            "with 'sudo apt install g++ make', and run this again"
        )
    return name


def _compiler_version(compiler: str) -> str:
    output = subprocess.run(
        [*compiler.split(), "--version"], capture_output=True, text=True, check=True
    ).stdout
    return output.splitlines()[0]


def _facts(flags: Mapping[str, str]) -> dict[str, object]:
    """Everything that decides whether a wheel built earlier serves here too."""
    return {
        "horovod": VERSION,
        "source": hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest(),
        "patch": hashlib.sha256(repr(unified_patch.parse(_patch(flags))).encode()).hexdigest(),
        "python": sysconfig.get_config_var("SOABI"),
        "machine": f"{sys.platform} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "compiler": _compiler_version(_compiler()),
        "compiler_options": os.environ.get("CXXFLAGS", ""),
        "torch": _installed("torch"),
        "tensorflow": _installed(*TENSORFLOW_NAMES),
        "flags": dict(sorted(flags.items())),
        # a GPU build finds NCCL's library again by its path
        **(
            {"nccl": f"{_installed(*NCCL_NAMES)} {sysconfig.get_path('platlib')}"}
            if _for_gpus(flags)
            else {}
        ),
    }


def _for_gpus(flags: Mapping[str, str]) -> bool:
    return any(name.startswith("HOROVOD_GPU_") for name in flags)


def _patch(flags: Mapping[str, str]) -> str:
    """The changes to Horovod; those of GPU operations only in builds that have them."""
    patches = [PATCH, GPU_PATCH] if _for_gpus(flags) else [PATCH]
    return "\n".join(each.read_text(encoding="utf-8") for each in patches)


def _key(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache"
    folder = Path(base) / "isotrain" / "horovod"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock `file`, waiting for a run that holds it; a process that ends frees it."""
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another set-up is building the same wheel: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"horovod: {text}", file=sys.stderr, flush=True)


def _check_tools(flags: Mapping[str, str]) -> None:
    """Refuse before the download what would fail minutes later."""
    missing = [name for name in NEEDED if not _installed(name)]
    setuptools = _installed("setuptools")
    if not setuptools or int(setuptools.removeprefix("setuptools==").split(".")[0]) >= 81:
        missing.append("'setuptools<81'")
    if missing:
        raise BuildError(
            f"{sys.prefix} lacks what the build needs: run\n"
            f"  {sys.executable} -m pip install {' '.join(missing)}\nand run this again"
        )
    if not shutil.which("make"):
        raise BuildError("'make' is not installed: run 'sudo apt install make' and run this again")
    if "HOROVOD_WITH_MPI" in flags and not shutil.which("mpicxx"):
        raise BuildError(
            "ISOTRAIN_HOROVOD_MPI is set, but there is no 'mpicxx': run 'sudo apt install "
            "libopenmpi-dev openmpi-bin', or unset the variable to build with Gloo alone"
        )


def _jobs() -> int:
    """Number of compilers to run at once: the cores this process may use, within the free memory."""
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY_PER_COMPILER))


def _variables(flags: Mapping[str, str], work: Path) -> dict[str, str]:
    """The variables of the build: the user's, with the flags and this Python in front."""
    variables = os.environ | dict(flags)
    for name in ("MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"):
        variables.pop(name, None)
    variables["MAKEFLAGS"] = f"-j{_jobs()}"
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if cuda_home := variables.get("HOROVOD_CUDA_HOME"):
        variables.setdefault("CUDA_HOME", cuda_home)  # by which torch finds CUDA's libraries
    variables |= nccl_variables(variables, work / "nccl")
    include = headers.find_or_fetch(work / "headers")
    if include:
        old = variables.get("CPLUS_INCLUDE_PATH")
        parts = [str(folder) for folder in include] + ([old] if old else [])
        variables["CPLUS_INCLUDE_PATH"] = os.pathsep.join(parts)
    return variables


def nccl_variables(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables for the NCCL of NVIDIA's wheel, whose library lacks the name that a linker looks for.

    Empty without that wheel, for an NCCL that the user names, and for builds without NCCL.
    """
    wheel = Path(sysconfig.get_path("platlib"), "nvidia", "nccl")
    library = next(wheel.glob("lib/libnccl.so.*"), None)
    is_named = any(name.startswith("HOROVOD_NCCL_") for name in variables)
    operations = {value for name, value in variables.items() if name.startswith("HOROVOD_GPU_")}
    if "NCCL" not in operations or is_named or library is None:
        return {}
    (folder / "lib").mkdir(parents=True)
    (folder / "include").symlink_to(wheel / "include")
    (folder / "lib" / "libnccl.so").symlink_to(library)
    return {
        "HOROVOD_NCCL_HOME": str(folder),
        "HOROVOD_NCCL_LINK": "shared",
        "LDFLAGS": f"{variables['LDFLAGS']} -Wl,-rpath,{library.parent}",
    }


def _pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]


def _fails(what: str, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> bool:
    """Runs one step of the build; whether it failed."""
    title = f"horovod: {what}"
    step = progress.Step(title, command, _COMPILED, plain_period_s=PLAIN_PERIOD_S)
    return progress.run_logged(step, log, variables) != 0


def _fetch_source(
    work: Path, log: Path, flags: Mapping[str, str], variables: Mapping[str, str]
) -> Path:
    """Download the source, checked against its pinned SHA-256, unpack and patch it."""
    command = _pip(
        "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation",
        "--require-hashes", "--dest", str(work), "--requirement", str(REQUIREMENTS),
    )  # fmt: skip
    if _fails("downloading the source", command, log, variables):
        raise BuildError(f"Horovod's source could not be downloaded.{_explain(log)}")
    shutil.unpack_archive(next(work.glob("horovod-*.tar.gz")), work)
    source = work / f"horovod-{VERSION}"
    count = unified_patch.apply(_patch(flags), source)
    _say(f"{count} edits applied")
    return source


def _build(work: Path, log: Path, flags: Mapping[str, str]) -> Path:
    """Build the wheel in `work` and see that it imports; returns its path."""
    variables = _variables(flags, work)
    source = _fetch_source(work, log, flags, variables)
    _say("compiling: 3 to 4 minutes on 2 idle cores, once per combination of versions")
    command = _pip(
        "wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir",
        "--wheel-dir", str(work / "out"), str(source),
    )  # fmt: skip
    if _fails("building", command, log, variables):
        raise BuildError(f"the build of Horovod failed.{_explain(log)}")
    wheel = next((work / "out").glob("horovod-*.whl"))
    _check_imports(wheel, work / "trial", log, flags)
    return wheel


def _check_imports(wheel: Path, folder: Path, log: Path, flags: Mapping[str, str]) -> None:
    """Refuse a wheel whose native parts do not load; Horovod's own build does not look."""
    modules = [
        module
        for flag, module in (
            ("HOROVOD_WITH_PYTORCH", "horovod.torch"),
            ("HOROVOD_WITH_TENSORFLOW", "horovod.tensorflow"),
        )
        if flag in flags
    ]
    install = _pip("install", "--quiet", "--no-deps", "--target", str(folder), str(wheel))
    program = "".join(f"import {name}; assert {name}.gloo_built()\n" for name in modules)
    variables = os.environ | {"PYTHONPATH": str(folder)}
    for command in (install, [sys.executable, "-c", program]):
        if _fails("checking", command, log, variables):
            raise BuildError(f"the wheel was built but does not work.{_explain(log)}")


def _explain(log: Path) -> str:
    """The part of the log that matters: around the first error, or the end where there is none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), len(lines))
    begin = max(0, min(first - LOG_LINES // 3, len(lines) - LOG_LINES))
    shown = "\n".join(f"  | {line.strip()}" for line in lines[begin : begin + LOG_LINES])
    return (
        f" From its log:\n{shown}\n"
        f"The whole log: {log}\n"
        "What to do: a missing header or program in the first error names what to install; "
        "'Killed' or 'cannot allocate memory' means too little memory (each compiler takes up to "
        "2 GB).\n"
        "Then run the same command again: nothing half-built is kept."
    )


def cached_wheel() -> Path:
    """Find the wheel for this environment in the cache, or build it.

    Returns:
        The path of the wheel. It appears there whole or not at all, also with several runs at once.

    Raises:
        BuildError: It cannot be built; the text says why and what to do.
    """
    flags = _build_flags()
    facts = _facts(flags)
    cache = _cache()
    key = _key(facts)
    final = cache / key
    with _locked(cache / f"{key}.lock"):
        if wheel := next(final.glob("*.whl"), None):
            _say(f"using the wheel built earlier ({wheel})")
            return wheel
        _check_tools(flags)
        work = cache / f"{key}.building"
        for leftover in (work, final):
            shutil.rmtree(leftover, ignore_errors=True)
        work.mkdir()
        log = cache / f"{key}.log"
        log.unlink(missing_ok=True)
        try:
            built = _build(work, log, flags)
            (built.parent / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")
            os.replace(built.parent, final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return final / built.name


def main() -> int:
    """Build or find the wheel and install it; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        wheel = cached_wheel()
    except (BuildError, headers.HeadersError, unified_patch.PatchError) as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    return subprocess.run(
        _pip("install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)), check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
