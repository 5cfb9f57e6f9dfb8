"""Which types of weights a run keeps, and what becomes of a run whose weights it cannot keep."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.contracts.events import Event, RunFailed
from isotrain.core.launching.run_directory.run_directory import RunDirectory
from isotrain.core.launching.run_directory.run_listing import summarize_run
from isotrain.core.session.weights.weights_file import (
    WEIGHTS,
    WEIGHTS_FILE,
    read_weights,
    require_storable,
    save_weights,
)
from isotrain.testing.consecutive_sessions import launched_in_turn
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

TORCH_KEEPS = ("complex64", "uint16", "uint32", "uint64", "int8", "bfloat16", "bool", "sparse")
TORCH_REFUSES = ("complex128", "complex32", "float8_e4m3fn", "float8_e5m2", "quint8")
TF_KEEPS = ("complex64", "uint16", "uint32", "uint64", "bfloat16", "half")
TF_REFUSES = ("complex128", "string", "float8_e4m3fn")


def samples(folder: str | None = None) -> Any:
    """Eight of them; where the weights would go, a folder may be in the way."""
    if folder is not None:
        Path(folder, "in the way").mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(3)
    return draw.normal(size=(8, 4)).astype("float32"), draw.normal(size=(8, 1)).astype("float32")


def torch_model(kind: str) -> Any:
    import torch

    model = torch.nn.Linear(4, 1)
    if kind == "sparse":
        odd = torch.ones(3).to_sparse()
    elif kind == "quint8":
        odd = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8)
    else:
        odd = torch.ones(3).to(getattr(torch, kind))
    model.register_buffer("odd", odd)
    return model


def tf_model(kind: str) -> Any:
    import tensorflow as tf

    class Model(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(tf.ones((4, 1)))
            ones = ["one"] if kind == "string" else tf.cast(tf.ones(3), tf.as_dtype(kind))
            self.odd = tf.Variable(ones, trainable=False, name="odd")

        def __call__(self, inputs: Any) -> Any:
            return tf.matmul(inputs, self.weight)

    return Model()


def spec(model: Any, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": samples,
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 4,
        "epochs": 1,
        "threads": 1,
        **fields,
    }


def kept(session: isotrain.Session, name: str) -> Any:
    """What is refused, or what the file of weights has."""
    try:
        require_storable(session.group, WEIGHTS)
    except isotrain.SpecError as error:
        return str(error)
    target = session.run_directory / f"{name}.safetensors"
    save_weights(session.group, target)
    return np.real(read_weights(target)["odd"]).tolist()


@pytest.mark.parametrize(
    ("backend", "framework", "model", "keeps", "refuses"),
    [
        ("torch-ddp", "torch", torch_model, TORCH_KEEPS, TORCH_REFUSES),
        pytest.param(
            *("tf-mirrored", "tensorflow", tf_model, TF_KEEPS, TF_REFUSES), marks=pytest.mark.slow
        ),
    ],
)
def test_dtypes_are_kept_or_refused(
    backend: str, framework: str, model: Any, keeps: tuple[str, ...], refuses: tuple[str, ...]
) -> None:
    specs = {
        kind: spec({framework: model}, model_args={"kind": kind}) for kind in (*keeps, *refuses)
    }
    (found,) = launched_in_turn(specs, kept, backend, 1)
    for kind in keeps:
        assert found[kind] == [1, 1, 1], kind
    for kind in refuses:
        assert f"odd ({kind}): what a run has trained is kept in" in found[kind], found[kind]


def test_a_run_is_refused_before_its_first_step() -> None:
    given = spec({"torch": torch_model}, model_args={"kind": "complex128"})
    with pytest.raises(isotrain.RunFailedError, match=r"before its first step.*[\s\S]*odd \(compl"):
        isotrain.run(given, backend="torch-ddp", replicas=1)


def network() -> Network:
    return Network([Dense(4, 1, name="last")])


@pytest.mark.usefixtures("reference")
def test_unwritable_weights_lose_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = spec(network, data_args={"folder": str(folder / WEIGHTS_FILE)})
    with pytest.raises(isotrain.RunFailedError, match=f"{WEIGHTS_FILE} could not be") as failed:
        isotrain.run(given, backend="reference", replicas=2, output=folder)
    result = isotrain.read_result(folder)
    assert failed.value.result.to_dict() == result.to_dict()
    assert result.history.loss[-1] == pytest.approx(result.last_loss)
    found = summarize_run(folder)
    assert (found.state, found.done) == ("failed", 2)
    assert "all steps were taken" in (found.why or "")


def refuses_failures(directory: RunDirectory, event: Event) -> None:
    """Refuses failure events, as where no room is left for one."""
    if isinstance(event, RunFailed):
        raise OSError(errno.ENOSPC, "No space left on device")
    append_event(directory, event)


append_event = RunDirectory.append_event


@pytest.mark.usefixtures("reference")
def test_lost_weights_are_reported_without_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDirectory, "append_event", refuses_failures)
    given = spec(network, data_args={"folder": str(tmp_path / "run" / WEIGHTS_FILE)})
    with pytest.raises(isotrain.RunFailedError, match=f"{WEIGHTS_FILE} could not be written"):
        isotrain.run(given, backend="reference", replicas=2, output=tmp_path / "run")
