"""The part of one process in a run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.core.contracts.job import Job, PluginChoice
from isotrain.core.contracts.process import LOCALHOST, ProcessContext, ServerConnection
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.loading import load_spec
from isotrain.core.worker.worker import run_job_in_worker
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network


def model() -> Network:
    return Network([Dense(4, 2)])


@pytest.mark.parametrize("strategy", ["data-parallel", "parameter-server"])
@pytest.mark.usefixtures("reference")
def test_a_run_without_parameter_server_makes_no_server_connection(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(*_: Any) -> None:
        raise AssertionError("constructed")

    monkeypatch.setattr(ServerConnection, "of", of)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the worker replaces it
    inputs = np.zeros((8, 4), "float32")
    fields = {"model": model, "data": (inputs, inputs[:, :2]), "loss": "mean_squared_error"}
    fields |= {"optimizer": {"name": "sgd", "lr": 0.125}, "global_batch_size": 4, "epochs": 1}
    resolved = ResolvedSpec(load_spec(fields | {"strategy": strategy}), plugin_manager())
    plan = make_plan(resolved, backend="reference", replicas=1)
    context = ProcessContext(0, 1, str(tmp_path), plan.processes, ((LOCALHOST, 0),))
    job = Job(lambda session: session.rank, resolved.spec, plan, b"", PluginChoice())
    assert run_job_in_worker(job, resolved, context, Reporter()) == 0
