"""Programs in which users of torch, Lightning or Keras met wrong numbers or crashes, with isotrain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.errors import RunFailedError, SpecError
from isotrain.testing.consecutive_sessions import launched_in_turn

DRAW = np.random.default_rng(0)
INPUTS, TARGETS = DRAW.normal(size=(26, 6)), DRAW.normal(size=(26, 1))
WORDS = DRAW.integers(0, 11, (26, 5))


def network() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def scripted() -> Any:
    import torch

    return torch.jit.script(network())  # type: ignore[no-untyped-call]


def spectral() -> Any:
    """Its buffers change in every forward pass of training."""
    from torch import nn
    from torch.nn.utils import spectral_norm

    return nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 1))


def bounded() -> Any:
    from torch import nn

    return nn.Sequential(nn.Embedding(11, 6, max_norm=0.7), nn.Flatten(), nn.Linear(30, 1))


ARRAYS: dict[str, Callable[[], Any]] = {
    "plain": lambda: (INPUTS, TARGETS),
    "reversed": lambda: (INPUTS[::-1].copy()[::-1], TARGETS),  # torch takes no negative strides
    "other byte order": lambda: (INPUTS.astype(">f8"), TARGETS.astype(">f8")),
    "read-only": lambda: (np.frombuffer(INPUTS.tobytes()).reshape(INPUTS.shape), TARGETS),
    "column by column": lambda: (np.asfortranarray(INPUTS), TARGETS),
    "every other column": lambda: (np.repeat(INPUTS, 2, 1)[:, ::2], TARGETS),
    "flat targets": lambda: (INPUTS, TARGETS[:, 0]),  # which would broadcast to a matrix
}


def data(kind: str = "plain") -> Any:
    return (WORDS, TARGETS) if kind == "words" else ARRAYS[kind]()


def spec(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": {"torch": network},
        "data": data,
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.0625},
        "global_batch_size": 8,
        "epochs": 2,
        "precision": "float64",
        "threads": 1,
    }
    return fields | changes


CASES = {
    **{name: spec(data_args={"kind": name}) for name in ARRAYS},
    "spectral": spec(model={"torch": spectral}),
}


def losses(session: isotrain.Session, name: str) -> list[float]:
    return [float(session.step(batch)) for batch in session.batches()]


@pytest.fixture(scope="module")
def found() -> dict[int, dict[str, list[float]]]:
    """Losses of all cases, by the number of replicas."""
    return {n: dict(launched_in_turn(CASES, losses, "torch-ddp", n)[0]) for n in (1, 2)}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_one_replica_and_of_plain_arrays(
    found: dict[int, dict[str, list[float]]], name: str
) -> None:
    np.testing.assert_allclose(found[2][name], found[1][name], rtol=1e-12)
    if name != "spectral":
        np.testing.assert_allclose(found[1][name], found[1]["plain"], rtol=1e-12)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_modules_of_torchscript_are_refused() -> None:
    given = spec(model={"torch": scripted})
    with (
        pytest.raises(
            SpecError, match=r"it is a RecursiveScriptModule of TorchScript, which takes no"
        ),
        isotrain.open_session(given, backend="torch-ddp", replicas=1),
    ):
        pass


@pytest.mark.slow
def test_embeddings_that_shorten_rows_are_refused_with_several_replicas() -> None:
    """Each replica would shorten the rows of its own samples, and the weights would part."""
    given = spec(model={"torch": bounded}, data_args={"kind": "words"})
    with pytest.raises(RunFailedError, match=r"model: 0: max_norm=0\.7 lets each forward pass"):
        isotrain.run(given, backend="torch-ddp", replicas=2)
    with isotrain.open_session(given, backend="torch-ddp", replicas=1) as session:
        assert len(losses(session, "bounded")) == 8
