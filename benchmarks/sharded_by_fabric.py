"""A sharded run by Lightning Fabric, as its documentation says: started by `benchmarks.sharded`.

Fabric's `FSDPStrategy` is for GPUs alone ("FSDP is only available on GPU"); on CPUs it has torch's
`fully_shard` by its `ModelParallelStrategy`, in which the model is wrapped by hand.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import lightning_fabric
import torch
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.sharded_work import BATCH, RATE, REPLICAS, STEPS, inputs, model, timed


def wrapped(made: nn.Module, mesh: Any) -> nn.Module:
    """The model with each layer, and itself, wrapped as by hand."""
    for layer in made.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(made, mesh=mesh["data_parallel"])


def main(target: Path) -> None:
    """Writes each rank's seconds of a step into a file of its own."""
    torch.set_num_threads(1)
    strategy = ModelParallelStrategy(wrapped, data_parallel_size=REPLICAS, tensor_parallel_size=1)
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=REPLICAS, strategy=strategy)
    fabric.launch()
    made = fabric.setup_module(model())
    optimizer: Any = fabric.setup_optimizers(torch.optim.Adam(made.parameters(), lr=RATE))
    own = torch.from_numpy(inputs()[fabric.global_rank :: REPLICAS])

    def step(place: int) -> None:
        batch = own[place * BATCH // REPLICAS :][: BATCH // REPLICAS]
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(made(batch), batch))
        optimizer.step()

    seconds = timed(functools.partial(step, n % 8) for n in range(STEPS))
    (target / str(fabric.global_rank)).write_text(str(seconds), encoding="ascii")
    fabric.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
