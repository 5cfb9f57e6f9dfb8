"""From the command to the end of the first step: isotrain against a script written by hand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import statistics

_ROOT = Path(__file__).resolve().parent.parent
_FRAMEWORKS = {"torch-ddp": "torch", "tf-multiworker": "tensorflow"}


def main(backends: list[str], replicas: list[int], pairs: int) -> None:
    """Measures each cell in alternation, and prints the difference in seconds."""
    for backend in backends:
        for count in replicas:
            by_hand, isotrain = [], []
            _by_hand(backend, count)  # these two fill the caches of disk and bytecode
            _isotrain(backend, count)
            for _ in range(min(pairs, 10)):
                by_hand.append(_by_hand(backend, count))
                isotrain.append(_isotrain(backend, count))
            added = statistics.median(np.array(isotrain) - np.array(by_hand))
            print(
                f"{backend:15} {count}  by hand {np.median(by_hand):6.2f} s"
                f"  isotrain {np.median(isotrain):6.2f} s  added {added.text(' s', 2)}",
                flush=True,
            )


def _by_hand(backend: str, replicas: int) -> float:
    """Starts the script's processes directly; the slowest replica's first step counts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = time.time()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.script_by_hand"],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **_variables(),
                "KERAS_BACKEND": _FRAMEWORKS[backend],
                "RANK": str(rank),
                "WORLD_SIZE": str(replicas),
                "PORT": str(port),
                "TF_CPP_MIN_LOG_LEVEL": "1",
                "CUDA_VISIBLE_DEVICES": "-1",
                "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // replicas)),
            },
        )
        for rank in range(replicas)
    ]
    ends = [float(process.communicate()[0].split()[-1]) for process in processes]
    return max(ends) - start


def _isotrain(backend: str, replicas: int) -> float:
    """Runs the command line; its first progress event is sent at the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.json"
        spec.write_text(json.dumps(_SPEC), encoding="utf-8")
        command = [sys.executable, "-m", "isotrain", "run", str(spec), "--backend", backend]
        command += ["--replicas", str(replicas), "--json", "--run-dir", f"{folder}/run"]
        start = time.time()
        finished = subprocess.run(
            command, cwd=_ROOT, capture_output=True, check=True, text=True, env=_variables()
        )
    events = map(json.loads, finished.stdout.splitlines())
    return next(event["time"] for event in events if event["event"] == "progress") - start


def _variables() -> dict[str, str]:
    """This process's variables; both programs keep their compiled modules, as installed ones do."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


_SPEC = {
    "model": "benchmarks.workload:model",
    "model_args": {"width": 64, "depth": 2},
    "data": "benchmarks.workload:arrays",
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "optimizer": {"name": "sgd", "lr": 0.0625, "momentum": 0.875},
    "global_batch": 64,
    "steps": 2,
    "device": "cpu",
}
