"""isotrain, with worker processes of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import isotrain
from benchmarks.data.job import Clock, Job
from benchmarks.data.workloads import (
    PADDING,
    Stream,
    tensorflow_model,
    torch_loss,
    torch_model,
)


class Killing:
    """Samples, of which one kills the training process when it is loaded for the second time."""

    def __init__(self, samples: Any, loads: Path) -> None:
        self.samples, self.loads = samples, loads

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == 500:
            with self.loads.open("a") as file:
                file.write(".")
            if self.loads.stat().st_size == 2:
                os.kill(os.getppid(), signal.SIGKILL)
        return self.samples[index]


def data() -> isotrain.DataSet:
    """The samples of the job."""
    job = Job.of_this_process()
    work = job.work
    if "tf.data" in job.options:
        from benchmarks.data.programs import tf_by_hand

        return isotrain.DataSet(isotrain.sources.stream(tf_by_hand.images(job), work.samples))
    samples = work.dataset()
    if "kill" in job.options:
        samples = Killing(samples, Path(job.folder, "loads"))
    if isinstance(samples, Stream):
        shards = job.workers if job.workers > 1 else None
        return isotrain.DataSet(isotrain.sources.stream(samples, work.samples, shards=shards))
    return isotrain.DataSet(isotrain.sources.MapStyle(samples))


def train(session: isotrain.Session) -> None:
    """Trains as `isotrain.run` does, or only loads the batches; takes the times."""
    job = Job.of_this_process()
    clock = Clock(job, session.rank)
    for batch in session.batches():
        if "no-steps" not in job.options:
            session.step(batch)
        if batch.is_last_of_epoch:
            session.group.barrier()
            clock.epoch_done()


def spec(job: Job, **others: Any) -> isotrain.TrainingSpec:
    """The spec of a job, with other fields."""
    on_torch = "torch" in job.options
    fields: dict[str, Any] = {"loss": torch_loss, "ignore": ["ISO301"]}
    if not on_torch:
        fields = {"loss": {"name": "sparse_categorical_crossentropy", "from_logits": True}}
    if job.work.pads:
        fields |= {"collate": {"pad": {"inputs": 0, "targets": PADDING}}}
    if "by-length" in job.options:
        buckets = [64, 128, 192, 256, 320, 384, 448, 501]
        tokens = job.work.global_batch_size * 250
        order = {"name": "by-length", "lengths": "lengths", "buckets": buckets, "tokens": tokens}
        fields |= {"order": order, "global_batch_size": 1000}
    # one replica reads a stream of one shard by itself, but for the processor time of one reader
    is_alone = job.name == "stream" and job.replicas == 1 and job.workers < 2
    has_workers = not is_alone or "no-steps" in job.options
    if has_workers and "tf.data" not in job.options:
        fields |= {"loader": {"workers": job.workers}}
    return isotrain.TrainingSpec(
        **{
            "model": {"torch": torch_model} if on_torch else {"tensorflow": tensorflow_model},
            "model_args": {"name": job.name},
            "data": data,
            "optimizer": {"name": "sgd", "lr": 0.01},
            "global_batch_size": job.work.global_batch_size,
            "epochs": job.epochs,
            "threads": 1,
            "device": "cpu",
            **fields,
            **others,
        }
    )


def main() -> None:
    """Starts the replicas."""
    job = Job.of_this_process()
    backend = job.options.partition(",")[0]
    isotrain.launch(
        train, spec(job), backend=backend, replicas=job.replicas, output=f"{job.folder}/run"
    )


if __name__ == "__main__":
    main()
