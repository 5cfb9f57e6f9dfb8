"""A training script as a person writes it for one framework; prints when its first step ended."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

from benchmarks import by_hand, workload


def main() -> None:
    """Takes one step on this rank of the run."""
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    width, depth = workload.SIZES["small"]
    if os.environ["KERAS_BACKEND"] == "torch":
        _start_torch(rank, replicas)
        train = by_hand.torch_ddp(workload.model(width, depth), rank, replicas, None)
    else:
        strategy = _start_tensorflow(rank, replicas)
        with strategy.scope():
            model = workload.model(width, depth)
        group = SimpleNamespace(strategy=strategy, local_replicas=(rank,))
        train = by_hand.tf_strategy(model, rank, replicas, group)
    train(1)
    print(time.time(), flush=True)
    os._exit(0)


def _start_torch(rank: int, replicas: int) -> None:
    import torch.distributed as dist

    if replicas > 1:
        address = f"tcp://127.0.0.1:{os.environ['PORT']}"
        dist.init_process_group("gloo", address, rank=rank, world_size=replicas)


def _start_tensorflow(rank: int, replicas: int) -> Any:
    import tensorflow as tf

    if replicas == 1:
        return tf.distribute.get_strategy()
    first = int(os.environ["PORT"])
    workers = [f"127.0.0.1:{first + index}" for index in range(replicas)]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=rank
    )
    return tf.distribute.MultiWorkerMirroredStrategy(resolver)


if __name__ == "__main__":
    main()
