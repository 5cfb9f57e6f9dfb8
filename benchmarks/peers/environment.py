"""The environment of the peers, `.venv-peers`: their own packages over this environment's torch.

It sees this environment's packages through a path file, so that all contenders run on one and the same torch.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
FOLDER = _ROOT / ".venv-peers"
PYTHON = FOLDER / "bin" / "python"
_COMPLETE = FOLDER / "complete"
PEERS = ("lightning-fabric", "accelerate", "pytorch-ignite")
_TORCH = "import torch; print(torch.__version__, torch.__file__)"


def make() -> None:
    """Makes the environment anew, with the versions that pyproject.toml names.

    Raises:
        RuntimeError: A package would have brought another torch.
    """
    venv.create(FOLDER, clear=True, with_pip=True)
    own = sysconfig.get_path("purelib", vars={"base": str(FOLDER)})
    Path(own, "torch_of_isotrain.pth").write_text(
        sysconfig.get_path("purelib") + "\n", encoding="utf-8"
    )
    constraint = FOLDER / "constraint.txt"
    constraint.write_text(f"torch=={metadata.version('torch').partition('+')[0]}\n")
    subprocess.run(
        [str(PYTHON), "-m", "pip", "install", "--quiet", "-c", str(constraint), *_pinned()],
        check=True,
    )
    _see_that_torch_is_the_same()
    _COMPLETE.touch()


def is_there() -> bool:
    """Whether it was made, to the end."""
    return _COMPLETE.exists()


def require() -> None:
    """Requires the environment of the peers.

    Raises:
        RuntimeError: It is missing; the message says how to make it.
    """
    if not is_there():
        raise RuntimeError(
            f"{FOLDER} is missing: run `python -m benchmarks.peers --setup` once, or leave out"
            " fabric, accelerate and ignite with --contender."
        )


def versions() -> dict[str, str]:
    """Versions of the peers, by name."""
    program = f"from importlib import metadata\nfor n in {PEERS}: print(n, metadata.version(n))"
    lines = _said_by(str(PYTHON), program).splitlines()
    return dict(line.split() for line in lines)


def _pinned() -> list[str]:
    """The requirements of the dependency group `peers`."""
    import tomllib

    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pinned: list[str] = project["dependency-groups"]["peers"]
    return pinned


def _see_that_torch_is_the_same() -> None:
    ours, theirs = _said_by(sys.executable, _TORCH), _said_by(str(PYTHON), _TORCH)
    if ours != theirs:
        raise RuntimeError(f"the peers' environment has another torch: {theirs}, and not {ours}.")


def _said_by(python: str, program: str) -> str:
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()
