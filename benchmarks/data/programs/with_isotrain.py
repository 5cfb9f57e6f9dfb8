"""isotrain, with worker processes of its own."""

from __future__ import annotations

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


def data() -> isotrain.DataSet:
    """The samples of the job."""
    work = Job.of_this_process().work
    samples = work.dataset()
    if isinstance(samples, Stream):
        return isotrain.DataSet(isotrain.sources.stream(samples, work.samples))
    return isotrain.DataSet(isotrain.sources.MapStyle(samples))


def train(session: isotrain.Session) -> None:
    """Trains as `isotrain.run` does, and takes the times."""
    clock = Clock(Job.of_this_process(), session.rank)
    for batch in session.batches():
        session.step(batch)
        if batch.is_last_of_epoch:
            clock.epoch_done()


def spec(job: Job) -> isotrain.TrainingSpec:
    """The spec of a job."""
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
    if (
        job.name != "stream" or job.replicas > 1
    ):  # a reader for one replica would only pass samples on
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
