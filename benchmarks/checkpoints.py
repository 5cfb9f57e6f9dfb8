"""Time and memory to save and load the state of a model, beside what people would use instead.

    python -m benchmarks.checkpoints                        # 100 M parameters
    python -m benchmarks.checkpoints --slots 2 --rounds 10  # and two slots for each, as Adam has

Each contender saves the same float32 tensors (`isotrain, a run` as the weights of a model that it trains)
in a program of its own, three times, of which the last counts, and loads them in another; contenders come in
an order drawn anew for every round. Seconds are of the training thread (`stall`), until all is on the disk,
with an fsync where the contender makes none (`on disk`), and to read it back, which the system still has in
memory (`load`); and of the processor, which all threads together take for that (`processor to load`). Memory
is what the program takes at most besides what it had before, as a multiple of the state: of a run, and of
Keras, the model's own is there before. Reported are medians with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import isotrain
from benchmarks import statistics
from isotrain.core.checkpoints.folder import CheckpointFolder, checkpoint_at
from isotrain.core.checkpoints.tensor_part import TensorPart

_WIDTH = 2000
"""Width of the square tensors: 16 MB each."""
_SAVES = 3
"""Number of saves in each program; the last is counted."""
Finish = Callable[[], Any]
"""Returns once the contender has written."""


class Contender(ABC):
    """One way to save and load."""

    def prepare(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """The state as the contender has it in training, in the shapes of `arrays`."""
        import torch

        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    @abstractmethod
    def save(self, state: Any, folder: Path) -> Finish:
        """Saves; returns when training may go on."""

    @abstractmethod
    def load(self, state: Any, folder: Path) -> Mapping[str, Any]:
        """Reads what was saved."""


class Isotrain(Contender):
    """A copy of the state, in the memory of the copy before, which a thread writes."""

    def __init__(self) -> None:
        self._copy: dict[str, np.ndarray] = {}

    def save(self, state: Any, folder: Path) -> Finish:
        from isotrain.adapters.torch.base.tensors import copied

        self._copy = {name: copied(each, self._copy.get(name)) for name, each in state.items()}
        parts = {name: TensorPart(array) for name, array in self._copy.items()}
        held = {"sections": {"state": parts}, "run": {}}
        thread = threading.Thread(target=CheckpointFolder(folder).save, args=(1,), kwargs=held)
        thread.start()
        return thread.join

    def load(self, state: Any, folder: Path) -> Mapping[str, Any]:
        return checkpoint_at(folder).read("state")


class Run(Contender):
    """A run on torch, with its model in memory, that saves and goes on from there."""

    def prepare(self, arrays: Mapping[str, np.ndarray]) -> Any:
        samples = np.zeros((1, _WIDTH), np.float32)
        spec = {
            "model": {"torch": _network},
            "model_args": {"count": len(arrays)},
            "data": (samples, samples),
            "loss": "mean_squared_error",
            "optimizer": {"name": "sgd", "lr": 0.1},
            "global_batch_size": 1,
            "steps": 1,
        }
        session = isotrain.open_session(spec, backend="torch-ddp", replicas=1)
        session.write_state({f"{n}.weight": a for n, a in enumerate(arrays.values())})
        return session

    def save(self, state: Any, folder: Path) -> Finish:
        state.save(folder)
        return _nothing

    def load(self, state: Any, folder: Path) -> Mapping[str, Any]:
        state.restore(folder)
        return _Weights(state)


def _network(count: int) -> Any:
    import torch

    layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)]
    return torch.nn.Sequential(*layers)


class _Weights(Mapping[str, Any]):
    """Weights of a session, copied when the first is asked for."""

    def __init__(self, session: isotrain.Session) -> None:
        self._session = session

    @functools.cached_property
    def _copied(self) -> Mapping[str, np.ndarray]:
        """Copies of the weights by name, in their shapes."""
        found = self._session.read_state(("trainable",))
        return {f"w{name.partition('.')[0]}": array for name, array in found.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """One weight, in its shape."""
        return self._copied[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._copied)

    def __len__(self) -> int:
        return len(self._copied)


class TorchSave(Contender):
    """`torch.save` and `torch.load`."""

    def save(self, state: Any, folder: Path) -> Finish:
        import torch

        torch.save(state, folder / "state.pt")
        return _nothing

    def load(self, state: Any, folder: Path) -> Mapping[str, Any]:
        import torch

        return torch.load(folder / "state.pt", weights_only=True)


class DistributedCheckpoint(Contender):
    """`torch.distributed.checkpoint.save`, of one process."""

    def prepare(self, arrays: Mapping[str, np.ndarray]) -> Any:
        import torch.distributed as dist
        import torch.distributed.checkpoint  # noqa: F401  # takes a while, once

        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return super().prepare(arrays)

    def save(self, state: Any, folder: Path) -> Finish:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=folder)
        return _nothing

    def load(self, state: Any, folder: Path) -> Mapping[str, Any]:
        import torch
        import torch.distributed.checkpoint as dcp

        loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        dcp.load(loaded, checkpoint_id=folder)
        return loaded


class AsyncDistributedCheckpoint(DistributedCheckpoint):
    """`torch.distributed.checkpoint.async_save`."""

    def save(self, state: Any, folder: Path) -> Finish:
        import torch.distributed.checkpoint as dcp

        finish: Finish = dcp.async_save(state, checkpoint_id=folder).result
        return finish


class Keras(Contender):
    """`save_weights` and `load_weights` of a Keras model."""

    def prepare(self, arrays: Mapping[str, np.ndarray]) -> Any:
        os.environ["KERAS_BACKEND"] = "torch"
        import keras

        layers = [keras.layers.Dense(_WIDTH, use_bias=False, name=name) for name in arrays]
        model = keras.Sequential([keras.Input((_WIDTH,)), *layers])
        model.set_weights(list(arrays.values()))
        return model

    def save(self, state: Any, folder: Path) -> Finish:
        state.save_weights(folder / "state.weights.h5")
        return _nothing

    def load(self, state: Any, folder: Path) -> Mapping[str, Any]:
        state.load_weights(folder / "state.weights.h5")
        return {layer.name: layer.kernel.value.detach() for layer in state.layers}


CONTENDERS: Mapping[str, type[Contender]] = {
    "isotrain": Isotrain,
    "isotrain, a run": Run,
    "torch.save": TorchSave,
    "distributed.checkpoint": DistributedCheckpoint,
    "distributed.checkpoint, async": AsyncDistributedCheckpoint,
    "Keras save_weights": Keras,
}
FIGURES = ("stall", "on disk", "load", "processor to load", "memory to save", "memory to load")


def measure_saving(contender: Contender, count: int, folder: Path) -> dict[str, float]:
    """Saves so many tensors three times; gives what the last took, and the memory of all."""
    arrays = _arrays(count)
    state = contender.prepare(arrays)
    before = _forget_peak()
    for number in range(_SAVES):
        place = folder / str(number)
        place.mkdir()
        began = time.perf_counter()
        finish = contender.save(state, place)
        stall = time.perf_counter() - began
        finish()
        _sync(place)
        on_disk = time.perf_counter() - began
    memory = (_peak() - before) / _bytes(arrays)
    return {"stall": stall, "on disk": on_disk, "memory to save": memory}


def measure_loading(contender: Contender, count: int, folder: Path) -> dict[str, float]:
    """Loads what was saved last, over a state of zeros; checks it."""
    arrays = _arrays(count)
    state = contender.prepare({name: np.zeros_like(array) for name, array in arrays.items()})
    before, began, busy = _forget_peak(), time.perf_counter(), time.process_time()
    loaded = contender.load(state, folder / str(_SAVES - 1))
    load, processor = time.perf_counter() - began, time.process_time() - busy
    memory = (_peak() - before) / _bytes(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), array)
    return {"load": load, "processor to load": processor, "memory to load": memory}


def _arrays(count: int) -> dict[str, np.ndarray]:
    """Square float32 tensors by name, shape `[_WIDTH, _WIDTH]`."""
    generator = np.random.default_rng(0)
    return {f"w{n}": generator.random((_WIDTH, _WIDTH), np.float32) for n in range(count)}


def _bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """Size of arrays of any shape in bytes."""
    return sum(array.nbytes for array in arrays.values())


_PARTS = {"save": measure_saving, "load": measure_loading}


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


def _forget_peak() -> int:
    """Lets the peak begin at what the program has now; gives that, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _nothing() -> None:
    """There is nothing left to do."""


def measure(name: str, count: int) -> dict[str, float]:
    """Saves in a program of its own, and loads in another."""
    found: dict[str, float] = {}
    with TemporaryDirectory(dir=".") as folder:
        for part in _PARTS:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "benchmarks.checkpoints",
                "--part",
                part,
            ]
            command += ["--contender", name, "--tensors", str(count), "--folder", folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found |= json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=25, help="of 4 M parameters each")
    parser.add_argument("--slots", type=int, default=0, help="as many again for each")
    parser.add_argument("--rounds", type=int, default=7)
    for name, choices in (("--contender", CONTENDERS), ("--part", _PARTS), ("--folder", None)):
        parser.add_argument(name, choices=choices, help=argparse.SUPPRESS)  # of the programs
    given = parser.parse_args()
    count = given.tensors * (1 + given.slots)
    if given.part:
        contender = CONTENDERS[given.contender]()
        print(json.dumps(_PARTS[given.part](contender, count, Path(given.folder))))
        return
    order = np.random.default_rng(0)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(given.rounds):
        for name in map(str, order.permutation(list(CONTENDERS))):
            found[name].append(measure(name, count))
    _print(found)


def _print(found: Mapping[str, list[dict[str, float]]]) -> None:
    print(f"| contender | {' | '.join(FIGURES)} |\n|---|{'---|' * len(FIGURES)}")
    for name, runs in found.items():
        cells = []
        for figure in FIGURES:
            estimate = statistics.median(np.array([run[figure] for run in runs]))
            cells.append(estimate.text("" if "memory" in figure else " s", 2))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
