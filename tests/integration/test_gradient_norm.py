"""The recorded norm of the gradients: that of what is applied, before clipping, whatever the replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param
from integration.session_specs import launch, samples, spec

import isotrain
from isotrain.core.errors import UnsupportedError
from isotrain.core.results.result import read_history

pytestmark = pytest.mark.usefixtures("reference")


def linear() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Linear(3, 1)


def steps(session: isotrain.Session) -> list[Any]:
    """The norms of the session, and those of the gradients before each step."""
    norms = []
    for batch in session.batches():
        gradients, _ = session.group.gradients(batch)
        means = session.group.all_reduce(
            [session.group.tensor(_flat(session, gradients[0]))], "mean"
        )
        norms.append(float(np.linalg.norm(session.group.numpy(means[0]))))
        session.step(batch)
        norms.append(session.gradient_norm)
    return norms


def _flat(session: isotrain.Session, gradients: Any) -> np.ndarray:
    return np.concatenate([session.group.numpy(each).ravel() for each in gradients])


@pytest.mark.parametrize(
    ("backend", "clip"),
    [
        ("reference", {"global_norm": 0.01}),
        pytest.param("torch-ddp", {"global_norm": 0.01}, marks=pytest.mark.slow),
        pytest.param("tf-mirrored", {"value": 0.01}, marks=pytest.mark.slow),
    ],
)
def test_it_is_that_before_clipping(tmp_path: Path, backend: str, clip: Any) -> None:
    fields = {"precision": "float64", "gradient_norm": True, "clip": clip, "epochs": 1}
    replicas = 1 if backend == "tf-mirrored" else 2
    norms = launch(steps, tmp_path, replicas, backend, **fields)
    assert norms[1::2] == pytest.approx(norms[::2], rel=1e-12)
    assert read_history(tmp_path / "run").scalars["gradient_norm"] == dict(enumerate(norms[1::2]))


def norms(session: isotrain.Session) -> list[float | None]:
    """The norm after each step."""
    found = []
    for batch in session.batches():
        session.step(batch)
        found.append(session.gradient_norm)
    return found


@pytest.mark.parametrize(
    ("backend", "model", "precision"),
    [
        ("reference", None, "float64"),
        *(
            pytest.param("torch-ddp", *case, marks=pytest.mark.slow)
            for case in ((None, "float64"), ({"torch": linear}, "float32"), (None, "float16"))
        ),
        pytest.param("tf-mirrored", None, "float64", marks=pytest.mark.slow),
        param("horovod-tf", None, "float64", features=True),
    ],
)
def test_clipping_records_it_unless_told_otherwise(
    tmp_path: Path, backend: str, model: Any, precision: str
) -> None:
    fields = {"clip": {"global_norm": 0.01}, "precision": precision, "epochs": 1}
    fields |= {} if model is None else {"model": model}
    by_clipping = launch(norms, tmp_path / "clip", 2, backend, **fields)
    requested = launch(norms, tmp_path / "all", 2, backend, **fields, gradient_norm=True)
    assert by_clipping == pytest.approx(requested, rel=1e-12)
    assert min(by_clipping) > 0.01
    for changes in ({"gradient_norm": False}, {"clip": {"norm": 0.01}}):
        folder = tmp_path / str(len(changes["clip"]) if "clip" in changes else 0)
        assert set(launch(norms, folder, 2, backend, **{**fields, **changes})) == {None}


@pytest.mark.parametrize("strategy", ["local-sgd", "sharded"])
def test_clipping_elsewhere_records_nothing(tmp_path: Path, strategy: str) -> None:
    fields = {"clip": {"global_norm": 0.01}, "strategy": strategy, "epochs": 1}
    assert set(launch(norms, tmp_path, 2, "reference", **fields)) == {None}


@pytest.mark.parametrize("strategy", ["local-sgd", "sharded"])
def test_it_is_refused_where_no_process_has_all_gradients(strategy: str) -> None:
    fields = spec(gradient_norm=True, strategy=strategy)
    with pytest.raises(UnsupportedError, match=f"gradient_norm: under strategy '{strategy}'"):
        isotrain.plan(fields, backend="reference", replicas=2)


def test_patterns_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(isotrain.RunFailedError, match=r"gradient_norm\.tail: 'tail\*' fits none"):
        launch(steps, tmp_path, 1, "reference", gradient_norm={"tail": "tail*"})


@pytest.mark.slow
def test_it_changes_no_bit_of_a_native_run(tmp_path: Path) -> None:
    """Clipped by its global norm, and with the norm recorded or not."""

    def weights(folder: str, **fields: Any) -> Any:
        return isotrain.run(
            spec(model={"torch": linear}, clip={"global_norm": 0.5}, data=samples, **fields),
            backend="torch-ddp",
            replicas=2,
            output=tmp_path / folder,
            on_event=lambda event: None,
        ).weights

    recorded = weights("recorded", gradient_norm={"bias": "bias"})
    plain = weights("plain", gradient_norm=False)
    assert all(np.array_equal(recorded[name], plain[name]) for name in plain)
