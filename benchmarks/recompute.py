"""Memory and time of a deep model with its blocks kept and computed again, seen from outside.

    python -m benchmarks.recompute torch-ddp tf-multiworker

Each run is a program of its own; its memory is the largest resident set that the kernel saw of any of its
processes, less that of the same run with one sample. The C library is told to give large blocks back at once:
otherwise it keeps some, and the set tells where they lay rather than how much was needed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ENV = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SAMPLES, WIDTH, BLOCKS = 8192, 256, 12
SPEC: dict[str, Any] = {
    "model": f"{Path(__file__).resolve()}:model",
    "data": f"{Path(__file__).resolve()}:data",
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "optimizer": {"name": "sgd", "lr": 0.03125},
    "steps": 6,
    "evaluation": {"every_epochs": 0},
    "capture": False,
}


def model() -> Any:
    """Blocks of three dense layers; what they compute is larger than their weights."""
    from keras import Input, Sequential, layers

    def block() -> Any:
        dense = [layers.Dense(WIDTH, activation="tanh") for _ in range(3)]
        return Sequential([Input((WIDTH,)), *dense])

    return Sequential([Input((WIDTH,)), *(block() for _ in range(BLOCKS)), layers.Dense(10)])


def data() -> Any:
    """Noise."""
    generator = np.random.default_rng(0)
    return generator.standard_normal((SAMPLES, WIDTH), "float32"), generator.integers(
        0, 10, SAMPLES
    )


def measured(backend: str, batch: int, recompute: str | None) -> tuple[int, float]:
    """The bytes and the seconds of one run; called in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.json"
        spec.write_text(json.dumps({**SPEC, "global_batch_size": batch, "recompute": recompute}))
        command = [sys.executable, "-m", "isotrain", "run", str(spec), "--backend", backend]
        began = time.perf_counter()
        subprocess.run(
            [*command, "--replicas", "1"], check=True, cwd=folder, env=ENV, capture_output=True
        )
        seconds = time.perf_counter() - began
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, seconds


def apart(*given: Any) -> tuple[int, float]:
    """Result of `measured` in a process whose children are that run alone."""
    asked = json.dumps(given)
    command = [sys.executable, "-m", "benchmarks.recompute", "--measure", asked]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found, seconds = json.loads(done.stdout)
    return found, seconds


def main() -> None:
    """Prints a line for each backend."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backends", nargs="*", default=["torch-ddp"], metavar="BACKEND")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured(*options.measure)))
        return
    for backend in options.backends:
        floor, started = apart(backend, 1, None)
        for name, pattern in {"kept": None, "computed again": "*"}.items():
            found, seconds = apart(backend, SAMPLES, pattern)
            print(
                f"{backend}, {name}: {(found - floor) / 2**20:.0f} MiB, {seconds - started:.1f} s"
            )


if __name__ == "__main__":
    main()
