"""Plans of models that this machine has no memory for."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from integration import own_layers, portable_memory, step_memory

from isotrain.core import api
from isotrain.core.errors import RunFailedError
from isotrain.core.planning import gpu_plan
from isotrain.core.planning.gpu_plan import GpuPlan

pytestmark = [pytest.mark.slow, pytest.mark.features]

WIDTH, LAYERS = 50_000, 4
_MOST_BYTES = 2 * 2**30
_PROGRAM = """
import json, resource, sys
from integration import test_plan_without_values as tests
resource.setrlimit(resource.RLIMIT_DATA, (tests._MOST_BYTES, tests._MOST_BYTES))
plan = tests.planned(*sys.argv[1:3], json.loads(sys.argv[3]))
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


def planned(backend: str, kind: str, fields: dict[str, Any]) -> GpuPlan:
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
    return api.gpu_plan(spec, hosts=1, gpus_per_host=8, gpu="h200", backend=backend, quiet=True)


PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
STAGE_3 = {"strategy": {"name": "sharded", "options": {"stage": 3}}}
STAGES: dict[str, Any] = {
    "strategy": {"name": "pipeline", "options": {"stages": 2}},
    "gradient_accumulation_steps": 4,
    "global_batch_size": 32,
}


@pytest.mark.parametrize(
    ("backend", "kind", "fields"),
    [
        *(("torch-ddp", "native", fields) for fields in ({}, STAGE_3)),
        ("torch-ddp", "portable", STAGES),
        *(("tf-multiworker", "portable", fields) for fields in (STAGE_3, STAGES)),
        ("tf-mirrored", "portable", {}),
    ],
)
def test_a_model_of_ten_billion_weights_is_planned_in_two_gib(
    backend: str, kind: str, fields: dict[str, Any]
) -> None:
    command = [sys.executable, "-c", _PROGRAM, backend, kind, json.dumps(fields)]
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
    if fields == STAGES:
        assert reduced[0]["nbytes"] == 4 * PARAMETERS / 2


def dense() -> Any:
    import keras

    first = keras.layers.Dense(600, activation="gelu")
    layers = [first, keras.layers.Dropout(0.5), keras.layers.Dense(600), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *layers])


def convolutional() -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(192, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Conv2D(192, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def transformer() -> Any:
    import keras

    inputs = keras.Input((64,))
    x = keras.layers.Dense(384)(keras.layers.Reshape((8, 8))(inputs))
    normed = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(4, 96, dropout=0.1)(normed, normed)
    hidden = keras.layers.Dense(768, activation="gelu")(keras.layers.LayerNormalization()(x))
    x = keras.layers.GlobalAveragePooling1D()(x + keras.layers.Dense(384)(hidden))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def cuttable() -> Any:
    import keras

    first = keras.layers.Dense(1024, activation="relu")
    layers = [first, keras.layers.Dense(1024), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *layers])


_SHARDED = {"name": "sharded", "options": {"stage": 3, "bucket_megabytes": 0.5}}
SMALL: dict[str, dict[str, Any]] = {
    "dense": portable_memory.spec(dense),
    "convolutional": portable_memory.spec(convolutional, strategy="sharded"),
    "transformer": portable_memory.spec(transformer, optimizer={"name": "adam", "lr": 0.01}),
    "cut": portable_memory.spec(cuttable, strategy="tensor"),
    "sharded": portable_memory.spec(transformer, strategy=_SHARDED),
    "averaged": portable_memory.spec(dense, ema={"decay": 0.9}),
    "diloco": portable_memory.spec(dense, strategy={"name": "diloco", "options": {"every": 3}}),
}
"""Specs of models that have some weights of more than 1 MiB."""


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("tf-multiworker", name) for name in ("dense", "convolutional", "cut")),
        *(
            pytest.param("tf-multiworker", name, marks=pytest.mark.exhaustive)
            for name in ("transformer", "sharded", "averaged", "diloco")
        ),
        ("tf-mirrored", "transformer"),
        ("horovod-tf", "convolutional"),
    ],
)
def test_what_is_planned_without_values_is_what_is_planned_with_them(
    monkeypatch: pytest.MonkeyPatch, backend: str, name: str
) -> None:
    plans = []
    for may_lack_values in (True, False):
        if not may_lack_values:
            monkeypatch.setattr(gpu_plan, "may_lack_values", lambda spec, plan: False)
        made = api.gpu_plan(
            SMALL[name], hosts=1, gpus_per_host=4, gpu="h100", backend=backend, quiet=True
        )
        assert not [note for note in made.plan.notes if "values" in note]
        assert made.why_not_counted is None
        plans.append({**made.plan.to_dict(), **made.to_dict()})
    assert plans[0] == plans[1]
    assert plans[0]["collectives"]


def two_modules() -> Any:
    first = (torch.nn.Linear(64, 600), torch.nn.ReLU(), torch.nn.Linear(600, 600))
    return torch.nn.Sequential(torch.nn.Sequential(*first), torch.nn.Linear(600, 10))


def two_layers() -> Any:
    """The same model of TensorFlow, whose layers are compared with it as they are called one by one."""
    import keras

    first = keras.Sequential([keras.layers.Dense(600, activation="relu"), keras.layers.Dense(600)])
    model = keras.Sequential([keras.Input((64,)), first, keras.layers.Dense(10)])
    model.pipeline_modules = lambda: [first, model.layers[1]]
    return model


def embedding() -> Any:
    """A model whose first stage has a gradient of rows alone (`tf.IndexedSlices`)."""
    import keras

    inputs = keras.Input((64,))
    x = keras.layers.Embedding(1000, 300)(keras.ops.cast(keras.ops.abs(inputs), "int32"))
    x = keras.layers.Dense(600, name="last")(keras.layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def listed_modules() -> Any:
    """The same model as `two_modules`, which lists its modules itself."""

    class Listed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = two_modules()

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.last(self.first(inputs))

        def pipeline_modules(self) -> list[torch.nn.Module]:
            return [self.first, self.last]

    return Listed()


STAGED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "torch": ("torch-ddp", {"torch": two_modules}, {}),
    "listed": ("torch-ddp", {"torch": listed_modules}, {}),
    "modules": ("tf-multiworker", {"tensorflow": two_layers}, {}),
    "layers": ("tf-multiworker", transformer, {"cut": ["dense_1"]}),
    "embedding": ("tf-multiworker", embedding, {"cut": ["last"]}),
    "horovod": ("horovod-tf", dense, {"cut": ["dense_1"]}),
}


ESTIMATED = (
    "pipeline: without values its layers are not timed: stages are balanced by the operations and bytes of"
    " their layers"
)
MODULES_COMPARED = "pipeline: the modules"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (name in ("layers", "modules")))
        for name in STAGED
    ],
)
def test_stages_without_values_have_the_bytes_of_those_with_them(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All but the times of their layers, which are estimated; the plan says so.

    So it does of modules that it cannot compare with their model by numbers.
    """
    backend, model, options = STAGED[name]
    strategy = {"name": "pipeline", "options": options}
    spec = step_memory.spec(model, strategy=strategy, gradient_accumulation_steps=4)
    plans = []
    for lacks_values in (True, False):
        if not lacks_values:
            monkeypatch.setattr(gpu_plan, "may_lack_values", lambda spec, plan: False)
        made = api.gpu_plan(spec, hosts=1, gpus_per_host=4, backend=backend, quiet=True)
        notes = [note for note in made.plan.notes if "values" in note]
        expected = [ESTIMATED, *([MODULES_COMPARED] if name in ("listed", "modules") else [])]
        assert [note.partition(",")[0] for note in notes] == lacks_values * expected
        assert made.plan.stages is not None
        stages = [replace(each, forward=0, backward=0) for each in made.plan.stages.stages]
        plans.append([made.collectives, made.needed_bytes, made.plan.state_bytes, stages])
    assert plans[0] == plans[1]


def test_a_plan_without_values_says_what_it_compares_of_cut_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"degree": 2, "layers": {"0": "colwise", "2": "rowwise"}}
    spec = step_memory.SPECS["dense"] | {"strategy": {"name": "tensor", "options": options}}
    for lacks_values in (True, False):
        if not lacks_values:
            monkeypatch.setattr(gpu_plan, "may_lack_values", lambda spec, plan: False)
        made = api.gpu_plan(spec, hosts=1, gpus_per_host=4, backend="torch-ddp", quiet=True)
        assert made.why_not_counted is None
        notes = [note for note in made.plan.notes if "by the shapes of outputs alone" in note]
        assert len(notes) == lacks_values


@pytest.mark.parametrize(
    ("backend", "schedule"),
    [("torch-ddp", "2bw"), ("torch-ddp", "pipedream"), ("tf-multiworker", "2bw")],
)
def test_stages_with_versions_of_weights_take_values(backend: str, schedule: str) -> None:
    spec = portable_memory.spec(
        dense,
        strategy={"name": "pipeline", "options": {"schedule": schedule}},
        gradient_accumulation_steps=4,
    )
    made = api.gpu_plan(spec, hosts=1, gpus_per_host=4, gpu="h100", backend=backend, quiet=True)
    assert made.why_not_counted is None
    assert made.collectives
    (note,) = (note for note in made.plan.notes if "values, which" in note)
    assert note.endswith("MissingValueError: weights have several versions")
    assert note.startswith("collectives" if backend == "torch-ddp" else "model")


def own() -> Any:
    return own_layers.model(own_layers.LAYERS)


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker"])
def test_layers_of_ones_own_are_planned_without_values(backend: str) -> None:
    made = api.gpu_plan(
        portable_memory.spec(own), hosts=1, gpus_per_host=2, backend=backend, quiet=True
    )
    assert made.why_not_counted is None
    assert made.collectives is not None
    assert not [note for note in made.plan.notes if "values" in note]
    assert sum(each.nbytes for each in made.collectives) == 4 * (own_layers.PARAMETERS + 1)


def faulty() -> Any:
    with pathlib.Path(os.environ["BUILDS"]).open("a") as file:
        file.write("built\n")
    raise ValueError("no such layer")


@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker"])
def test_an_error_of_the_model_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, backend: str
) -> None:
    """Without values it is built once; with them it would fail again."""
    monkeypatch.setenv("BUILDS", str(tmp_path / "builds"))
    with pytest.raises(RunFailedError, match="ValueError: no such layer"):
        api.gpu_plan(
            portable_memory.spec(faulty), hosts=1, gpus_per_host=2, backend=backend, quiet=True
        )
    assert (tmp_path / "builds").read_text() == "built\n"


def scaling(backend: str) -> dict[str, Any]:
    """A model that reads a value of a large weight: in the forward pass, or as it is built."""
    return {"torch": scaled} if backend == "torch-ddp" else {"tensorflow": summed}


def summed() -> Any:
    import keras

    model = dense()
    model.layers[2].bias.assign(model.layers[2].bias + float(keras.ops.sum(model.layers[2].kernel)))
    return model


class Scaled(torch.nn.Linear):
    """A large layer that reads a value."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / (1 + float(self.weight.detach().square().sum()))


def scaled() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(64, 512), Scaled(512, 512), torch.nn.Linear(512, 10))


@pytest.mark.parametrize(("backend", "width"), [("torch-ddp", 512), ("tf-multiworker", 600)])
def test_a_model_that_reads_values_is_planned_with_them(backend: str, width: int) -> None:
    model = scaling(backend)
    plan = api.gpu_plan(
        step_memory.spec(model), hosts=1, gpus_per_host=2, backend=backend, quiet=True
    )
    assert plan.why_not_counted is None
    assert plan.collectives is not None
    parameters = 65 * width + (width + 1) * width + (width + 1) * 10
    assert [each.nbytes for each in plan.collectives] == [4 * (parameters + 1)]
    (note,) = (note for note in plan.plan.notes if "values, which" in note)
    assert f"({pathlib.Path(__file__).name}, line " in note
