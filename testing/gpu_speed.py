"""Times of steps on a GPU, beside loops in torch alone, and whether the goals for them are reached."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from isotrain.core import api
from isotrain.core.system import hardware
from isotrain.testing.launching import DEVICE_VARIABLE

BACKEND = "torch-ddp"
CLASSES = 10
STEPS, STEPS_ON_CPUS = 60, 12
"""Steps of a run, of which the first third is not timed."""
SECONDS, ROUNDS = 170.0, 5
"""Time for all rounds, of which the first is always made, and the largest number of them."""


@dataclass(frozen=True)
class Workload:
    """A model with its data, in a size that fills a GPU, and in one for CPUs.

    Attributes:
        native: Function from the width to a torch module.
        portable: Function from the width to the Keras model with the same layers.
        sample: Shape of a sample; None stands for the width.
        width: Width on a GPU.
        rows: Samples of a step on a GPU.
    """

    native: Callable[[int], Any]
    portable: Callable[[int], Any]
    sample: tuple[int | None, ...]
    width: int
    rows: int

    def data(self, width: int, rows: int, channels_last: bool) -> tuple[np.ndarray, np.ndarray]:
        """Samples of two steps, float32 `[2 * rows, *sample]`, and their classes, int64."""
        generator = np.random.default_rng(5)
        shape = [length or width for length in self.sample]
        inputs = generator.standard_normal((2 * rows, *shape), "float32")
        if channels_last and len(shape) == 3:
            inputs = np.ascontiguousarray(inputs.transpose(0, 2, 3, 1))
        return inputs, generator.integers(CLASSES, size=2 * rows)


def _mlp(width: int) -> Any:
    import torch

    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, CLASSES))


def _portable_mlp(width: int) -> Any:
    import keras

    layers = [keras.layers.Dense(width, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(CLASSES)])


def _cnn(width: int) -> Any:
    import torch

    layers = [
        layer
        for inputs in (3, width, width)
        for layer in (torch.nn.Conv2d(inputs, width, 3, padding="same"), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(
        *layers,
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(width, CLASSES),
    )


def _portable_cnn(width: int) -> Any:
    import keras

    layers = [keras.layers.Conv2D(width, 3, padding="same", activation="relu") for _ in range(3)]
    last = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input((32, 32, 3)), *layers, *last])


def _transformer(width: int) -> Any:
    import torch

    blocks = [
        torch.nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        for _ in range(4)
    ]
    return torch.nn.Sequential(
        *blocks, torch.nn.Flatten(), torch.nn.Linear(_LENGTH * width, CLASSES)
    )


def _portable_transformer(width: int) -> Any:
    import keras

    layers = keras.layers
    inputs = keras.Input((_LENGTH, width))
    x = inputs
    for _ in range(4):
        normed = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(normed, normed)
        normed = layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(normed))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Flatten()(x)))


_LENGTH = 64
WORKLOADS = {
    "small mlp": Workload(_mlp, _portable_mlp, (None,), 1024, 1024),
    "mlp": Workload(_mlp, _portable_mlp, (None,), 4096, 8192),
    "cnn": Workload(_cnn, _portable_cnn, (3, 32, 32), 128, 512),
    "transformer": Workload(_transformer, _portable_transformer, (_LENGTH, None), 512, 128),
}
_ON_CPUS = {"small mlp": (64, 32), "cnn": (8, 8), "transformer": (16, 4)}
"""Width and rows on CPUs."""


def _on_gpu() -> bool:
    return os.environ.get(DEVICE_VARIABLE, "gpu") == "gpu"


def _steps() -> int:
    return STEPS if _on_gpu() else STEPS_ON_CPUS


def bound_of_native(by_hand_ms: float) -> float:
    """Goal for a native model, times by hand: 1.02, or 20 µs more where that takes less than 1 ms."""
    return 1.02 if by_hand_ms >= 1 else max(1.02, 1 + 0.02 / by_hand_ms)


BOUND_OF_PORTABLE = 1.05
"""Goal for a portable model, times the native one."""


def judged(times: Sequence[float], others: Sequence[float], bound: float) -> dict[str, Any]:
    """Verdict on times: `reached` by the median of their ratios, `missed` by all of them, or `open`.

    Args:
        times: Milliseconds per step, by round.
        others: Those that they are compared with, in the same rounds.
        bound: Largest ratio of the goal.
    """
    ratios = np.array(times) / np.array(others)
    verdict = "missed" if ratios.min() > bound else "open"
    return {
        "ms": round(float(np.median(times)), 4),
        "ratio": round(float(np.median(ratios)), 4),
        "ratios": [round(float(each), 4) for each in (ratios.min(), ratios.max())],
        "goal": round(bound, 4),
        "verdict": "reached" if np.median(ratios) <= bound else verdict,
    }


def speed() -> dict[str, Any]:
    """Whether steps of one replica are as fast as the goals say, at sizes that fill a GPU.

    All programs of a round take turns; there are rounds until the time for them is over.
    """
    on_gpu = _on_gpu()
    sizes = {n: (w.width, w.rows) for n, w in WORKLOADS.items()} if on_gpu else _ON_CPUS
    times: dict[str, dict[str, list[float]]] = {
        name: {"by hand": [], "native": [], "portable": []} for name in sizes
    }
    started, rounds = time.monotonic(), 0
    while not rounds or (on_gpu and rounds < ROUNDS and _time_for_one_more(started, rounds)):
        rounds += 1
        for name, (width, rows) in sizes.items():
            workload, found = WORKLOADS[name], times[name]
            found["native"].append(_milliseconds(workload, width, rows, False))
            found["by hand"].append(_by_hand_milliseconds(workload, width, rows))
            found["portable"].append(_milliseconds(workload, width, rows, True))
    return {
        name: {
            "by hand": round(float(np.median(found["by hand"])), 4),
            "native": judged(
                found["native"],
                found["by hand"],
                bound_of_native(float(np.median(found["by hand"]))),
            ),
            "portable": judged(found["portable"], found["native"], BOUND_OF_PORTABLE),
            "rounds": rounds,
        }
        for name, found in times.items()
    }


def _time_for_one_more(started: float, rounds: int) -> bool:
    """Whether a round can be made in time, by the mean of those before."""
    return (time.monotonic() - started) * (rounds + 1) / rounds < SECONDS


def _milliseconds(workload: Workload, width: int, rows: int, is_portable: bool) -> float:
    """Milliseconds per step of isotrain after the warm-up."""
    build = workload.portable if is_portable else workload.native
    model = partial(build, width)
    spec = {
        "model": model if is_portable else {"torch": model},
        "data": partial(workload.data, width, rows, is_portable),
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.01},
        "global_batch_size": rows,
        "steps": _steps(),
        "device": "gpu" if _on_gpu() else "cpu",
    }
    (milliseconds,) = api.launch(_timed_steps, spec, backend=BACKEND, replicas=1, on_event=_silent)
    return float(milliseconds)


def _silent(event: Mapping[str, Any]) -> None:
    """Ignores an event."""


def _timed_steps(session: Any) -> float:
    started, warm_up = 0.0, session.total_steps // 3
    for number, batch in enumerate(session.batches()):
        if number == warm_up:
            session.group.barrier()
            synchronize()
            started = time.perf_counter()
        session.step(batch)
    synchronize()
    return float((time.perf_counter() - started) / (session.total_steps - warm_up) * 1e3)


def synchronize() -> None:
    """Waits for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches, of which a thread makes two while the one before them is in use."""
    with ThreadPoolExecutor(1) as thread:
        made = deque(thread.submit(next, batches, None) for _ in range(2))
        while (batch := made.popleft().result()) is not None:
            made.append(thread.submit(next, batches, None))
            yield batch


def _by_hand_milliseconds(workload: Workload, width: int, rows: int) -> float:
    """The same steps of the native model in torch alone.

    On a GPU, a thread fetches batches from a DataLoader ahead, and copies them from pinned memory.
    """
    import torch

    device = torch.device("cuda" if _on_gpu() else "cpu")
    torch.set_num_threads(hardware.cores())  # as a run of one replica has them
    steps, warm_up = _steps(), _steps() // 3
    model = workload.native(width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, classes = workload.data(width, rows, False)
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(inputs), torch.from_numpy(classes))
    sampler = torch.utils.data.BatchSampler(
        torch.utils.data.RandomSampler(tensors, num_samples=steps * rows, replacement=True),
        rows,
        True,
    )
    loader = torch.utils.data.DataLoader(
        tensors, sampler=sampler, batch_size=None, pin_memory=_on_gpu()
    )

    def copies() -> Iterator[list[Any]]:
        for batch in loader:
            yield [each.to(device, non_blocking=True) for each in batch]

    started = 0.0
    for number, (features, targets) in enumerate(ahead(copies()) if _on_gpu() else copies()):
        if number == warm_up:
            synchronize()
            started = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(features), targets).backward()
        optimizer.step()
    synchronize()
    return (time.perf_counter() - started) / (steps - warm_up) * 1e3
