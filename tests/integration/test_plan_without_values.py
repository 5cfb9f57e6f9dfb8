"""Plans of models that this machine has no memory for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from integration import step_memory

from isotrain.core import api
from isotrain.core.planning.gpu_plan import GpuPlan

pytestmark = [pytest.mark.slow, pytest.mark.features]

WIDTH, LAYERS = 50_000, 4
_MOST_BYTES = 2 * 2**30
_PROGRAM = """
import json, resource, sys
from integration import test_plan_without_values as tests
resource.setrlimit(resource.RLIMIT_DATA, (tests._MOST_BYTES, tests._MOST_BYTES))
plan = tests.planned(sys.argv[1], json.loads(sys.argv[2]))
print(json.dumps([plan.plan.parameters, plan.to_dict(), plan.plan.notes]))
"""
"""Program whose processes get at most `_MOST_BYTES` of memory each."""


def native() -> Any:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def portable() -> Any:
    import keras

    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.ones((8, WIDTH), "float32"), np.arange(8)


def planned(kind: str, fields: dict[str, Any]) -> GpuPlan:
    """The plan of a native or portable model on 8 GPUs."""
    spec = {
        "model": {"torch": native} if kind == "native" else portable,
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "adam", "lr": 0.001},
        "global_batch_size": 8,
        "steps": 1,
        **fields,
    }
    return api.gpu_plan(spec, hosts=1, gpus_per_host=8, gpu="h200", backend="torch-ddp", quiet=True)


PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
STAGE_3 = {"strategy": {"name": "sharded", "options": {"stage": 3}}}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("native", {}), ("native", STAGE_3), ("portable", {}), ("portable", STAGE_3)],
)
def test_a_model_of_ten_billion_weights_is_planned_in_two_gib(
    kind: str, fields: dict[str, Any]
) -> None:
    command = [sys.executable, "-c", _PROGRAM, kind, json.dumps(fields)]
    variables = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # each of NumPy's threads has memory
    program = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert not program.returncode, program.stderr
    parameters, plan, _ = json.loads(program.stdout)
    assert parameters == PARAMETERS > 10**10
    assert plan["why_not_counted"] is None
    assert plan["activations_counted"]
    assert plan["fits"] == bool(fields)  # on GPUs of 141 GB
    reduced = [each for each in plan["collectives"] if each["kind"] != "send"]
    if not fields:
        assert [each["kind"] for each in reduced] == ["all-reduce"]
        assert reduced[0]["nbytes"] == 4 * (PARAMETERS + 1)


class Scaled(torch.nn.Linear):
    """A large layer that reads a value."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / (1 + float(self.weight.detach().square().sum()))


def scaled() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(64, 512), Scaled(512, 512), torch.nn.Linear(512, 10))


def test_a_model_that_reads_values_is_planned_with_them() -> None:
    plan = api.gpu_plan(
        step_memory.spec({"torch": scaled}),
        hosts=1,
        gpus_per_host=2,
        backend="torch-ddp",
        quiet=True,
    )
    assert plan.why_not_counted is None
    assert plan.collectives is not None
    parameters = 65 * 512 + 513 * 512 + 513 * 10
    assert [each.nbytes for each in plan.collectives] == [4 * (parameters + 1)]
