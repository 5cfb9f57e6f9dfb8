"""Cost of `isotrain trace`: steps of plain torch that are recorded, between steps that are not.

python -m benchmarks.tracing [STEPS]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from isotrain.adapters.torch import program_hooks
from isotrain.analysis.program_trace.recorder import Recorder


class Switch(Recorder):
    """A recorder that can be switched off for a step."""

    is_on = True

    def wants(self, optimizer: int) -> bool:
        return self.is_on


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """A network of 4 million weights, and a batch of 256."""
    layers = [nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(256, 1024)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Four blocks of width 256, and a batch of 32 sequences of 64."""
    block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(64 * 256, 10)), torch.randn(32, 64, 256)


def measure(name: str, recorder: Switch, steps: int) -> None:
    """Prints the ratio of the medians of steps with and without a record."""
    torch.manual_seed(0)
    model, inputs = {"mlp": mlp, "transformer": transformer}[name]()
    targets = torch.randint(10, (len(inputs),))
    optimizer = torch.optim.AdamW(model.parameters())
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for step in range(2 * steps + 4):
        recorder.is_on = recorder.is_recording = step % 2 == 0
        wall, processor = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        spent = time.perf_counter() - wall, time.process_time() - processor
        if step >= 4:
            times[recorder.is_on].append(spent)
    for index, what in enumerate(("wall", "processor time")):
        on, off = (
            statistics.median(each[index] for each in times[is_on]) for is_on in (True, False)
        )
        print(
            f"{name:12} {what:15} {1e3 * off:8.1f} ms, recorded {1e3 * on:8.1f} ms: {on / off:.2f} times"
        )


def main(steps: int) -> None:
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Switch(Path(folder), steps=10**9)
        program_hooks.install(recorder)
        for name in ("mlp", "transformer"):
            measure(name, recorder, steps)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
