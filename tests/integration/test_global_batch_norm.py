"""`batch_norm: global` and `ghost`: results equal those of one replica, on every backend."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated
from integration.session_specs import launch

import isotrain
from isotrain.core.errors import SpecError, UnsupportedError
from isotrain.testing.native_equality import trained

pytestmark = pytest.mark.features

SAMPLES = 26
"""Global batches of 8, 8, 8 and 2: uneven over three replicas, and the last leaves one without samples."""


def images() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = random.integers(3, size=SAMPLES)
    return random.normal(size=(SAMPLES, 5, 5, 2)) + labels[:, None, None, None], labels


def portable() -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Conv2D(3, 3),
            layers.BatchNormalization(momentum=0.75),
            layers.Activation("tanh"),
            layers.Flatten(),
            layers.Dense(4),
            layers.BatchNormalization(scale=False),
            layers.Dense(3),
        ]
    )


def native() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(5, 3, (3, 2)),  # the images' rows are its channels
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(9, 4),
        nn.BatchNorm1d(4, affine=False, momentum=None),
        nn.Linear(4, 3),
    )


MODELS: dict[str, Any] = {"portable": portable, "native": {"torch": native}}


def spec(model: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODELS[model],
        "data": images,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "global_batch_size": 8,
        "epochs": 2,
        "seed": 3,
        "precision": "float64",
        "threads": 1,
        **fields,
    }


@functools.cache
def by_one_replica(model: str) -> dict[str, Any]:
    """Results of one replica with local statistics, as the framework computes them."""
    return trained(spec(model), "torch-ddp", 1)


@pytest.mark.parametrize(
    ("model", "backend", "replicas"),
    [
        ("portable", "torch-ddp", 3),
        ("portable", "tf-mirrored", 3),
        ("portable", "tf-multiworker", 2),
        ("portable", "horovod-torch", 2),
        ("portable", "horovod-tf", 3),
        ("native", "torch-ddp", 1),
        ("native", "torch-ddp", 3),
        ("native", "horovod-torch", 2),
    ],
)
def test_equals_one_replica(model: str, backend: str, replicas: int) -> None:
    """Losses, weights and moving statistics are those of one replica, to 1e-12."""
    found = trained(spec(model, batch_norm="global"), backend, replicas)
    _require_equal(found, by_one_replica(model))


def _require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-12)
    assert set(found["weights"]) == set(expected["weights"])
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weight, rtol=1e-11, atol=1e-12)


GHOSTS = {"batch_norm": "ghost", "ghost_batches": 3, "global_batch_size": 10}
"""Ghost batches of 4, 3 and 3 samples, and 2 each in the last global batch of 6."""


@functools.cache
def by_ghost_batches(model: str) -> dict[str, Any]:
    """Results of one replica."""
    return trained(spec(model, **GHOSTS), "torch-ddp", 1)


@pytest.mark.parametrize(
    ("model", "backend", "replicas"),
    [
        ("portable", "torch-ddp", 2),
        ("portable", "tf-mirrored", 1),
        ("portable", "tf-mirrored", 2),
        ("portable", "tf-multiworker", 3),
        ("portable", "horovod-torch", 3),
        ("portable", "horovod-tf", 2),
        ("native", "torch-ddp", 2),
        ("native", "torch-ddp", 3),
        ("native", "horovod-torch", 2),
    ],
)
def test_ghost_batches_equal_those_of_one_replica(model: str, backend: str, replicas: int) -> None:
    """Two replicas have two ghost batches and one; statistics are of 4, 3 and 3 samples all the same."""
    _require_equal(trained(spec(model, **GHOSTS), backend, replicas), by_ghost_batches(model))


@pytest.mark.parametrize("model", MODELS)
def test_ghost_batches_are_replicas_without_ghosts(model: str) -> None:
    """Three replicas by themselves normalize over the same samples as three ghost batches."""
    fields = {"global_batch_size": 10}
    _require_equal(trained(spec(model, **fields), "torch-ddp", 3), by_ghost_batches(model))


@pytest.mark.parametrize("model", MODELS)
def test_ghost_batches_have_the_same_bits(model: str) -> None:
    """With `reproducible: bits`, the parts of the global batch are the ghost batches.

    They have 4 samples: of 2 that are nearly alike, normalizing magnifies what is rounded.
    """
    fields = {"drop_remainder": True, "global_batch_size": 16, "epochs": 4}
    whole = spec(model, batch_norm="ghost", **fields)
    fields = whole | {"reproducible": {"granularity": 4}}
    one, two = (trained(fields, "torch-ddp", replicas) for replicas in (1, 3))
    assert one["loss"] == two["loss"]
    assert all(
        np.array_equal(one["weights"][name], two["weights"][name]) for name in one["weights"]
    )
    _require_equal(trained(whole | {"ghost_batches": 4}, "torch-ddp", 2), one)


def test_local_statistics_differ() -> None:
    """The same run without the field depends on the number of replicas: the test can fail."""
    found, expected = trained(spec("portable"), "torch-ddp", 2), by_one_replica("portable")
    assert not np.allclose(found["loss"], expected["loss"], rtol=1e-3)


def synchronized() -> Any:
    from torch import nn

    return nn.SyncBatchNorm.convert_sync_batchnorm(native())


@pytest.mark.parametrize("backend", ["torch-ddp", "horovod-torch"])
def test_layers_that_torch_does_not_synchronize_on_cpus(backend: str) -> None:
    """Without the field, torch refuses them, or by Horovod would let each replica normalize alone."""
    fields = spec("native") | {"model": {"torch": synchronized}}
    with pytest.raises(AssertionError, match=r"'1' is a SyncBatchNorm.*batch_norm: global"):
        trained(fields, backend, 2)
    found = isotrain.check(fields, backends=[backend], replicas=[2])
    assert "batch_norm: global" in str(
        [each for each in found if each.code in ("ISO104", "ISO504")]
    )
    fields["batch_norm"] = "global"
    _require_equal(trained(fields, backend, 2), by_one_replica("native"))
    found = isotrain.check(fields, backends=[backend], replicas=[2])
    assert not [each for each in found if each.code in ("ISO101", "ISO104", "ISO504")]
    with pytest.raises(AssertionError, match="1 is a SyncBatchNorm, which sums"):
        trained({**fields, "batch_norm": "ghost"}, backend, 2)


def test_masked_inputs_are_left_out(tmp_path: Path) -> None:
    """With a mask, mean and variance are those of the entries that count."""
    run_isolated(_compare_masked, spec("portable"), "torch-ddp", tmp_path / "run")


def _compare_masked(_: isotrain.Session) -> None:
    import keras

    from isotrain.adapters.keras.batch_norm import normalize_globally

    class Step:
        is_alone = False

        def sum(self, tensor: Any) -> Any:
            return tensor

    random = np.random.default_rng(1)
    inputs, mask = random.normal(size=(4, 6, 3)), random.integers(2, size=(4, 6)).astype(bool)
    layer = keras.layers.BatchNormalization(momentum=0.5, dtype="float64")
    expected = keras.ops.convert_to_numpy(layer(inputs, training=True, mask=mask))
    other = keras.layers.BatchNormalization(momentum=0.5, dtype="float64")
    normalize_globally([other], Step())  # type: ignore[arg-type]
    found = keras.ops.convert_to_numpy(other(inputs, training=True, mask=mask))
    # Keras adds its epsilon of 1e-7 to the number of entries
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "fields",
    [
        {"gradient_accumulation_steps": 2},
        {"recompute": "*"},
        {"compile": True},
    ],
)
@pytest.mark.parametrize("mode", ["global", "ghost"])
def test_refuses_fields_that_split_the_pass(mode: str, fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"batch_norm: got '{mode}'"):
        isotrain.plan(spec("portable", batch_norm=mode, **fields), backend="torch-ddp", replicas=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ghost_batches": 4}, "batch_norm: ghost with ghost_batches"),
        (
            {"batch_norm": "ghost", "ghost_batches": 4, "reproducible": "bits"},
            "8 with reproducible",
        ),
        ({"batch_norm": "ghost", "ghost_batches": 1}, "global batch of 8 samples has 1 ghost"),
    ],
)
def test_refuses_ghost_batches_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(isotrain.IsotrainError, match=message):
        isotrain.plan(spec("portable", **fields), backend="torch-ddp", replicas=2)


def two_views() -> Any:
    """A module that passes each sample twice."""
    import torch

    class TwoViews(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(torch.cat([x, -x]))[: len(x)]

    return TwoViews()


def untracked() -> Any:
    import torch

    norm = torch.nn.BatchNorm1d(3, track_running_stats=False)
    return torch.nn.Sequential(norm, torch.nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (two_views, r"rows of \d samples, so that it is not known"),
        (untracked, "0 has track_running_stats=False"),
    ],
)
def test_refuses_rows_of_unknown_ghost_batches(tmp_path: Path, model: Any, message: str) -> None:
    fields = {"model": model, "batch_norm": "ghost"}
    with pytest.raises(isotrain.IsotrainError, match=message):
        launch(one_step, tmp_path, 2, "torch-ddp", **fields)


def one_step(session: isotrain.Session) -> None:
    session.step(next(iter(session.batches())))


def test_refuses_layers_that_sum_over_replicas_themselves(tmp_path: Path) -> None:
    run_isolated(_require_refusals, spec("portable"), "torch-ddp", tmp_path / "run")


def _require_refusals(_: isotrain.Session) -> None:
    import keras

    from isotrain.adapters.keras.batch_norm import normalize_ghost_batches

    layer = keras.layers.BatchNormalization()
    layer.synchronized = True
    with pytest.raises(SpecError, match="synchronized=True"):
        normalize_ghost_batches([layer], object())  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["global", "ghost"])
@pytest.mark.parametrize("strategy", ["local-sgd", "pipeline", "parameter-server"])
def test_refuses_strategies_that_do_not_compute_together(strategy: str, mode: str) -> None:
    fields = {"batch_norm": mode, "strategy": strategy}
    with pytest.raises(UnsupportedError, match=f"batch_norm: {mode}"):
        isotrain.plan(spec("portable", **fields), backend="torch-ddp", replicas=2)
