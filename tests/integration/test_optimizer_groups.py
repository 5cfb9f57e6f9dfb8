"""Optimizer groups under the strategies, and where a run goes on with other groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.by_need.harness import load

import isotrain

pytestmark = pytest.mark.features

OPTIMIZER: dict[str, Any] = {
    "name": "adamw",
    "lr": 0.0625,
    "weight_decay": 0.125,
    "layer_decay": 0.5,
    "groups": [{"weights": ["*bias", "*norm*"], "weight_decay": 0, "beta_1": 0.5}],
}
SCHEDULE = {"name": "linear", "warmup_steps": 1}
SCHEDULED = {**OPTIMIZER, "groups": [{**OPTIMIZER["groups"][0], "schedule": SCHEDULE}]}
LAMB = {**SCHEDULED, "name": "lamb"}
SLOTS: dict[str, Any] = {**OPTIMIZER, "groups": [{"weights": "*bias", "amsgrad": True}]}
STARTS: dict[str, Any] = {
    "name": "adagrad",
    "lr": 0.0625,
    "layer_decay": 0.5,
    "groups": [{"weights": "*bias", "initial_accumulator_value": 0.5}],
}
MOMENTA: dict[str, Any] = {
    "name": "rmsprop",
    "lr": 0.0078125,
    "layer_decay": 0.5,
    "groups": [{"weights": "*bias", "momentum": 0.5, "centered": True}],
}
OPTIMIZERS = [OPTIMIZER, SCHEDULED, LAMB, SLOTS, STARTS, MOMENTA]
CASES = [
    ("torch-ddp", {"name": "sharded", "options": {"stage": 1}}, SCHEDULED),
    ("torch-ddp", {"name": "sharded", "options": {"stage": 3}}, LAMB),
    ("horovod-tf", {"name": "sharded", "options": {"stage": 2}}, SCHEDULED),
    ("tf-multiworker", {"name": "sharded", "options": {"stage": 3}}, LAMB),
    ("torch-ddp", "pipeline", SCHEDULED),
    ("tf-multiworker", "pipeline", SCHEDULED),
    ("tf-multiworker", "parameter-server", OPTIMIZER),
    ("horovod-torch", "hierarchical", SCHEDULED),
    ("tf-mirrored", "data-parallel", STARTS),
    ("tf-multiworker", "data-parallel", STARTS),
    ("horovod-tf", "data-parallel", MOMENTA),
    ("torch-ddp", {"name": "sharded", "options": {"stage": 3}}, STARTS),
    ("tf-multiworker", {"name": "sharded", "options": {"stage": 3}}, STARTS),
    ("horovod-tf", {"name": "sharded", "options": {"stage": 1}}, SLOTS),
    ("torch-ddp", "pipeline", MOMENTA),
    ("tf-multiworker", "parameter-server", STARTS),
]


def trained(backend: str, folder: Path, replicas: int = 2, **changes: Any) -> isotrain.RunResult:
    spec = load("no_decay_on_biases").spec.replace(
        precision="float64", threads=1, optimizer=OPTIMIZER, epochs=1
    )
    return isotrain.run(spec.replace(**changes), backend=backend, replicas=replicas, output=folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """Weights of one replica for each of `OPTIMIZERS`."""
    folder = tmp_path_factory.mktemp("groups")
    return [
        trained("torch-ddp", folder / str(index), 1, optimizer=each).weights
        for index, each in enumerate(OPTIMIZERS)
    ]


@pytest.mark.parametrize(("backend", "strategy", "optimizer"), CASES)
def test_groups_under_strategies(
    expected: Any, backend: str, strategy: Any, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    result = trained(backend, tmp_path / "run", strategy=strategy, optimizer=optimizer)
    assert any("3 layers" in note and "0.25" in note for note in result.plan["notes"])
    for name, weight in result.weights.items():
        np.testing.assert_allclose(
            weight, expected[OPTIMIZERS.index(optimizer)][name], rtol=0, atol=1e-12, err_msg=name
        )


def test_servers_refuse_a_schedule_of_a_group(tmp_path: Path) -> None:
    with pytest.raises(isotrain.UnsupportedError, match=r"optimizer\.groups: schedule: strategy"):
        trained("torch-ddp", tmp_path, strategy="parameter-server", optimizer=SCHEDULED)


def test_a_schedule_changes_the_momentum_of_all_groups(tmp_path: Path) -> None:
    schedule = {"name": "one-cycle", "momentum_range": [0.5, 0.875]}
    groups = [{"weights": "*bias", "weight_decay": 0}]
    optimizer = {"name": "sgd", "lr": 0.0625, "momentum": 0.875, "weight_decay": 0.125}
    weights = [
        trained(
            backend,
            tmp_path / backend,
            1,
            schedule=schedule,
            optimizer={**optimizer, "groups": groups},
        ).weights
        for backend in ("torch-ddp", "tf-mirrored")
    ]
    for name, weight in weights[0].items():
        np.testing.assert_allclose(weight, weights[1][name], rtol=0, atol=1e-12, err_msg=name)


def net() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))


def beside_torch(session: isotrain.Session) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Final weights of a session, and of a plain loop with parameter groups from the same start."""
    import torch

    plain = net()
    state = session.read_state(["trainable"])
    plain.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in state.items()})
    named = dict(plain.named_parameters())
    biases = {name for name in named if name.endswith("bias") or name.startswith("1.")}
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for name, each in named.items() if name not in biases]},
            {"params": [named[name] for name in biases], "lr": 1e-3 * 0.1, "weight_decay": 0.0},
        ],
        lr=1e-3,
        eps=1e-7,
        weight_decay=0.1,
    )
    for batch in session.batches():
        optimizer.zero_grad()
        micro_batch = batch.slices[0][0]
        loss = torch.nn.functional.cross_entropy(plain(micro_batch.inputs), micro_batch.targets)
        loss.backward()
        optimizer.step()
        session.step(batch)
    expected = {name: value.detach().numpy() for name, value in named.items()}
    return session.read_state(["trainable"]), expected


@pytest.mark.parametrize("backend", ["torch-ddp", "horovod-torch"])
def test_native_groups_are_torchs_parameter_groups(backend: str, tmp_path: Path) -> None:
    """To the bit, at a constant rate."""
    groups = [{"weights": ["*bias", "1.*"], "lr_factor": 0.1, "weight_decay": 0}]
    spec = load("no_decay_on_biases").spec.replace(
        model={"torch": net},
        threads=1,
        epochs=1,
        loss="torch.nn:CrossEntropyLoss",
        optimizer={"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "groups": groups},
    )
    weights, expected = isotrain.launch(
        beside_torch, spec, backend=backend, replicas=1, output=tmp_path / "run"
    )[0]
    for name, weight in expected.items():
        np.testing.assert_array_equal(weights[name], weight, err_msg=name)


def test_a_run_goes_on_with_other_groups_on_another_framework(tmp_path: Path) -> None:
    first = trained("torch-ddp", tmp_path / "first", checkpoint={"every_steps": 1})
    before = {name: np.array(weight) for name, weight in first.weights.items()}
    changed = {**OPTIMIZER, "groups": [{"weights": "*bias", "lr_factor": 0}]}
    spec = load("no_decay_on_biases").spec.replace(
        precision="float64", threads=1, optimizer=changed, epochs=2, checkpoint={"every_steps": 1}
    )
    texts: list[str] = []
    second = isotrain.resume(
        first.run_directory,
        spec=spec,
        backend="tf-mirrored",
        replicas=1,
        on_event=lambda event: texts.append(str(event)),
    )
    assert any("optimizer.groups" in text and "in the checkpoint" in text for text in texts)
    for name, weight in second.weights.items():
        is_equal = np.array_equal(weight, before[name])
        assert is_equal == name.endswith("bias"), name
