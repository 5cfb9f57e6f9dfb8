"""A third party's plugin: one strategy, and every event hook; what it is told goes to a file."""

from __future__ import annotations

import json
import os
from typing import Any

from isotrain import Capability, Strategy, hookimpl


class PeriodicAveraging(Strategy):
    """Local steps, with the parameters averaged every so often and at the end."""

    name = "periodic-averaging"
    summary = "local steps, averaged now and then"
    requires = frozenset({Capability.LOCAL_STEP, Capability.AVERAGE_PARAMETERS})

    def __init__(self, every: int = 2) -> None:
        self._every = every

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        loss = group.local_step(batch, learning_rate)
        if (batch.step + 1) % self._every == 0:
            group.average_parameters()
        return loss

    def finished(self, group: Any) -> None:
        group.average_parameters()


@hookimpl
def isotrain_register_strategies(register: Any) -> None:
    register.add(PeriodicAveraging)


def tell(event: str, **facts: Any) -> None:
    with open(os.environ["RECORDER_FILE"], "a", encoding="utf-8") as stream:
        stream.write(json.dumps({"event": event, **facts}) + "\n")


@hookimpl
def isotrain_run_started(plan: dict[str, Any], run_directory: str) -> None:
    tell("started", strategy=plan["strategy"])


@hookimpl
def isotrain_epoch_ended(epoch: int, metrics: dict[str, float]) -> None:
    tell("epoch", epoch=epoch, metrics=sorted(metrics))
    raise RuntimeError("a logger that breaks must not end the run")


@hookimpl
def isotrain_run_failed(message: str) -> None:
    tell("failed", message=message)


@hookimpl
def isotrain_run_finished(result: dict[str, Any]) -> None:
    tell("finished", final_loss=result["final_loss"])
