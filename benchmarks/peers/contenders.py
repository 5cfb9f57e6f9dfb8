"""Who competes, and the commands that start them, as their documentation says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import environment
from benchmarks.peers.ports import free_ports

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Command:
    """A command line with variables of its own."""

    line: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


Commands = Callable[[str, int], list[Command]]
"""Function from a program's name and the number of replicas to the commands that start it."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A program that trains a workload.

    Attributes:
        name: Name of the contender.
        reference: The contender that it is compared to: by hand, without a loader.
        program: Name of its file in `programs`.
        commands: Function that returns the commands that start it.
        options: Options of the program beyond its job.
        native: The contender with a native model, every field of the spec as it comes, that it is compared
            to as well; empty for this one.
    """

    name: str
    reference: str
    program: str
    commands: Commands
    options: dict[str, Any] = field(default_factory=dict)
    native: str = ""


def _module(program: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.peers.programs.{program}")


def plain(program: str, replicas: int) -> list[Command]:
    """One process of this environment."""
    return [Command((sys.executable, *_module(program)))]


def torchrun(program: str, replicas: int, python: str = sys.executable) -> list[Command]:
    """One process, or torch's launcher where there are several replicas."""
    if replicas == 1:
        return [Command((python, *_module(program)))]
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={replicas}")
    return [Command((python, *launcher, *_module(program)))]


def _peers_torchrun(program: str, replicas: int) -> list[Command]:
    """The same in the peers' environment; `accelerate launch` starts one process without a GPU."""
    return torchrun(program, replicas, str(environment.PYTHON))


def _fabric(program: str, replicas: int) -> list[Command]:
    if replicas == 1:
        return [Command((str(environment.PYTHON), *_module(program)))]
    run = (str(environment.PYTHON.parent / "fabric"), "run", "--accelerator=cpu", "--strategy=ddp")
    where = (f"--devices={replicas}", f"--main-port={free_ports(1)[0]}")
    return [Command((*run, *where, str(PROGRAMS / f"{program}.py")))]


def _horovodrun(program: str, replicas: int) -> list[Command]:
    run = (str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(replicas))
    return [Command((*run, sys.executable, *_module(program)))]


def _workers(program: str, replicas: int) -> list[Command]:
    """A process per worker, each told of all by TF_CONFIG."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(replicas)]
    return [
        Command(
            (sys.executable, *_module(program)),
            {
                "RANK": str(rank),
                "TF_CONFIG": json.dumps(
                    {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
                ),
            },
        )
        for rank in range(replicas)
    ]


def _both(
    name: str, program: str, commands: Commands, reference: str = "", **options: Any
) -> list[Contender]:
    """A program without and with its usual loader."""
    reference = reference or name
    return [
        Contender(name, reference, program, commands, {"loader": False, **options}),
        Contender(f"{name}/loader", reference, program, commands, {"loader": True, **options}),
    ]


def _isotrain(
    backend: str, framework: str, variant: str = "", fields: dict[str, Any] | None = None
) -> list[Contender]:
    """Contenders with a native and a portable model; a variant sets some fields of the spec."""
    native = f"isotrain/{backend}/native"
    told = {"backend": backend, "framework": framework, "fields": fields or {}}
    return [
        Contender(
            f"isotrain/{backend}/{model}{variant}",
            backend,
            "with_isotrain",
            plain,
            {**told, "model": model},
            "" if model + variant == "native" else native,
        )
        for model in ("native", "portable")
    ]


PEERS = ("fabric", "accelerate", "ignite")
"""Contenders that wrap a framework as isotrain does; each with its loader."""
CONTENDERS = (
    *_both("torch-ddp", "torch_ddp", torchrun),
    Contender("fabric", "torch-ddp", "with_fabric", _fabric),
    Contender("accelerate", "torch-ddp", "with_accelerate", _peers_torchrun),
    Contender("ignite", "torch-ddp", "with_ignite", _peers_torchrun),
    *_isotrain("torch-ddp", "torch"),
    *_isotrain("torch-ddp", "torch", "/compiled", {"compile": True}),
    *_isotrain("torch-ddp", "torch", "/unrecorded", {"capture": False})[1:],
    *_both("horovod-torch", "horovod_torch", _horovodrun),
    *_isotrain("horovod-torch", "torch"),
    *_both("tf-mirrored", "tf_strategy", plain, workers=False),
    *_both("keras-fit", "keras_fit", plain, reference="tf-mirrored"),
    *_isotrain("tf-mirrored", "tensorflow"),
    *_both("tf-multiworker", "tf_strategy", _workers, workers=True),
    *_isotrain("tf-multiworker", "tensorflow"),
    *_both("horovod-tf", "horovod_tf", _horovodrun),
    *_isotrain("horovod-tf", "tensorflow"),
)
