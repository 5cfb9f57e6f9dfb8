"""isotrain: a spec and a loop of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.workloads import BETA_1, LOOPS, MOMENTUM, SEED, WORKLOADS, Workload


def torch_model(workload: str) -> Any:
    """The native model of torch, or models by name."""
    from benchmarks.peers import torch_loops, torch_models

    return (torch_loops if workload in LOOPS else torch_models).build(WORKLOADS[workload])


def keras_model(workload: str) -> Any:
    """The portable model; given for TensorFlow alone, it is the native one there."""
    if workload in LOOPS:
        from benchmarks.peers import keras_loops

        return keras_loops.build(WORKLOADS[workload])
    from benchmarks.peers import keras_models

    return keras_models.build(WORKLOADS[workload])


def arrays(workload: str, channels_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """Samples `[samples, ...]` and labels."""
    return WORKLOADS[workload].arrays(channels_first)


def train(session: isotrain.Session) -> None:
    """Trains as `isotrain.run` does, and takes the times."""
    clock = Clock(Job.of_this_process())
    for batch in session.batches():
        clock.step_done(session.step(batch))
    clock.write(session.rank)


def spec(
    workload: str, threads: int, *, native: bool, on_torch: bool, **fields: Any
) -> isotrain.TrainingSpec:
    """Spec of a workload; `fields` overrides some of its fields."""
    work = WORKLOADS[workload]
    models = {"torch": torch_model} if on_torch else {"tensorflow": keras_model}
    return isotrain.TrainingSpec(
        name=workload,
        model=models if native else keras_model,
        model_args={"workload": workload},
        data=arrays,
        data_args={"workload": workload, "channels_first": native and on_torch},
        ema=work.ema or None,
        global_batch_size=work.global_batch_size,
        epochs=work.epochs,
        seed=SEED,
        threads=threads,
        device="cpu",
        **objectives(work, on_torch),
        **fields,
    )


def objectives(work: Workload, on_torch: bool) -> dict[str, Any]:
    """Fields of the spec for a workload's losses and optimizers."""
    adam = {"name": "adam", "lr": work.rate, "beta_1": BETA_1, "epsilon": 1e-8}
    module = f"benchmarks.peers.{'torch' if on_torch else 'keras'}_loops"
    if work.name == "clip":
        return {"objective": f"{module}:contrastive_loss", "optimizer": adam}
    if work.name == "dcgan":
        updates = {
            name: {"objective": f"{module}:{name}_loss", "weights": f"{name}/*"}
            for name in ("discriminator", "generator")
        }
        return {"updates": updates, "optimizer": adam}
    return {
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": work.rate, "momentum": MOMENTUM},
    }


def main() -> None:
    """Starts the replicas."""
    job = Job.of_this_process()
    native = job.options["model"] == "native"
    on_torch = job.options["framework"] == "torch"
    isotrain.launch(
        train,
        spec(job.workload, job.threads, native=native, on_torch=on_torch, **job.options["fields"]),
        backend=job.options["backend"],
        replicas=job.replicas,
        output=f"{job.folder}/run",
    )


if __name__ == "__main__":
    main()
