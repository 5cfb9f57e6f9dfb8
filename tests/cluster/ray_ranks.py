"""Runs a command in every worker of a Ray Train run, on a Ray cluster that is there.

Arguments: the number of workers, a folder for Ray's own files, and the command.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def work(config: dict[str, list[str]]) -> None:
    """What each worker runs."""
    subprocess.run(config["command"], check=True)


if __name__ == "__main__":
    count, storage, *command = sys.argv[1:]
    ray.init(address="auto", log_to_driver=True)
    trainer = TorchTrainer(
        work,
        train_loop_config={"command": command},
        scaling_config=ScalingConfig(num_workers=int(count), resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(Path(storage))),
    )
    trainer.fit()
