"""The programs that are compared, each for some workloads."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks.data.workloads import SAMPLES
from benchmarks.peers import environment

_BY_POSITION = ("images", "audio", "texts")


@dataclass(frozen=True)
class Contender:
    """A program that trains on samples which it loads.

    Attributes:
        name: Name of the contender.
        program: Name of its file in `programs`.
        workloads: Workloads that it can load.
        references: Names of the contenders of which the fastest is what it is compared to.
        options: Options of the program.
        replicas: Largest number of its replicas.
        is_peer: Whether it needs the environment of the peers.
    """

    name: str
    program: str
    workloads: tuple[str, ...]
    references: tuple[str, ...] = ()
    options: str = ""
    replicas: int = 2
    is_peer: bool = False

    def command(self, replicas: int) -> list[str]:
        """The command line that starts it."""
        python = str(environment.PYTHON) if self.is_peer else sys.executable
        module = ["-m", f"benchmarks.data.programs.{self.program}"]
        if self.program in ("with_isotrain", "tf_by_hand") or replicas == 1:
            return [python, *module]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={replicas}"]
        return [python, *launcher, *module]


_TORCH = ("torch by hand", "accelerate", "fabric")

CONTENDERS = (
    Contender("torch by hand", "torch_by_hand", tuple(SAMPLES)),
    Contender("torch by hand, no steps", "torch_by_hand", tuple(SAMPLES), options="no-steps"),
    Contender("accelerate", "with_accelerate", _BY_POSITION, is_peer=True),
    Contender("fabric", "with_fabric", _BY_POSITION, is_peer=True),
    Contender("isotrain/torch-ddp", "with_isotrain", tuple(SAMPLES), _TORCH, "torch-ddp"),
    Contender(
        "isotrain/torch-ddp, by-length",
        "with_isotrain",
        ("texts",),
        ("isotrain/torch-ddp",),
        "torch-ddp,by-length",
    ),
    Contender(
        "isotrain/torch-ddp, no steps",
        "with_isotrain",
        tuple(SAMPLES),
        options="torch-ddp,no-steps",
    ),
    Contender("tf.data by hand", "tf_by_hand", ("images",), replicas=1),
    Contender("tf.data by hand, Pillow", "tf_by_hand", ("images",), options="pillow", replicas=1),
    Contender(
        "isotrain/tf-mirrored, tf.data",
        "with_isotrain",
        ("images",),
        ("tf.data by hand",),
        "tf-mirrored,tf.data",
    ),
    Contender(
        "isotrain/tf-mirrored, Pillow",
        "with_isotrain",
        ("images",),
        ("tf.data by hand, Pillow",),
        "tf-mirrored",
    ),
)
