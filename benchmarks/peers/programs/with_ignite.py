"""PyTorch-Ignite: its engine, and its helpers for replicas."""

from __future__ import annotations

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from torch import nn

from benchmarks.peers import torch_data, torch_models
from benchmarks.peers.job import Clock, Job
from benchmarks.peers.workloads import MOMENTUM


def train(local_rank: int, job: Job) -> None:
    work = job.work
    torch.set_num_threads(job.threads)
    model = idist.auto_model(torch_models.build(work))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), work.rate, MOMENTUM))
    loader = idist.auto_dataloader(
        torch_data.dataset(work),
        batch_size=work.global_batch_size,  # of all replicas
        sampler=torch_data.CommonOrder(work, job.replicas),
    )
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    clock = Clock(job)

    @trainer.on(Events.ITERATION_COMPLETED)
    def step_done(engine: Engine) -> None:
        clock.step_done(engine.state.output)

    trainer.run(loader, max_epochs=work.epochs)
    clock.write(idist.get_rank())


def main() -> None:
    job = Job.of_this_process()
    with idist.Parallel(backend="gloo" if job.replicas > 1 else None) as parallel:
        parallel.run(train, job)


main()
