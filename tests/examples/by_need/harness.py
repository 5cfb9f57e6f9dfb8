"""Trains the examples in `examples/by_need/` and compares final weights with a plain program's.

A test file has the plain program, the *twin*: a function of `Plain` that trains `plain.model` in place, as a
person would who has one process and no isotrain. `check` runs the example under a backend, and compares.
Keras keeps learning rates in float32, in float64 runs too: give rates that float32 holds, such as 0.125.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.spec import import_strings
from isotrain.core.spec.loading import load_spec
from isotrain.core.worker.fit import fit

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "by_need"
BACKENDS = ("torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")
WEIGHTS = ("trainable", "non-trainable")


@dataclass
class Plain:
    """What a twin starts from.

    Attributes:
        example: The example's module.
        model: The model that the example's function built, with its initial weights; trained in place.
        batches: Global batches of the run in order, as (inputs, targets) on the device; none without data.
    """

    example: ModuleType
    model: Any
    batches: list[tuple[Any, Any]]


Twin = Callable[[Plain], None]
_TRAINED_TWINS: dict[tuple[Any, ...], dict[str, np.ndarray]] = {}


def load(name: str) -> ModuleType:
    """The module of an example, loaded from its file as a spec file's references are."""
    path = str(FOLDER / f"{name}.py")
    load_spec(f"{path}:spec")  # its functions are then sent to other processes by value
    return import_strings.load_module(path)


def cells(name: str) -> pytest.MarkDecorator:
    """Parametrization `backend, replicas`: the backends that an example declares, on one and two replicas."""
    backends = getattr(load(name), "BACKENDS", BACKENDS)
    return pytest.mark.parametrize(
        ("backend", "replicas"), [(each, count) for each in backends for count in (1, 2)]
    )


def check(
    name: str,
    twin: Twin,
    backend: str,
    replicas: int,
    folder: Path,
    *,
    tolerance: float = 1e-12,
    twin_backend: str = "torch-ddp",
    **changes: Any,
) -> None:
    """Trains an example and its twin, and asserts that their final weights are equal.

    Args:
        name: Name of the example's file.
        twin: The plain program, a function of a module.
        backend: Backend of the example's run.
        replicas: Number of replicas of the example's run.
        folder: Folder for the runs.
        tolerance: Largest absolute difference of any final weight.
        twin_backend: Backend whose process the twin runs in: it decides Keras' framework.
        changes: Fields of the spec to change; float64 by default.
    """
    weights = _launched(_train, name, backend, replicas, folder / "run", changes)
    check_weights(weights, name, twin, tolerance=tolerance, twin_backend=twin_backend, **changes)


def check_weights(
    weights: Mapping[str, np.ndarray],
    name: str,
    twin: Twin,
    *,
    tolerance: float = 1e-12,
    twin_backend: str = "torch-ddp",
    **changes: Any,
) -> None:
    """Asserts that final weights of an example, by name, are those of its twin; arguments as of `check`."""
    expected = _twin_weights(name, twin, twin_backend, changes)
    assert weights.keys() == expected.keys()
    for weight, array in expected.items():
        np.testing.assert_allclose(
            weights[weight], array, rtol=0, atol=tolerance, err_msg=f"{weight} of {name}"
        )


def _twin_weights(
    name: str, twin: Twin, backend: str, changes: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Final weights of a twin, which gets whole batches and model; trained once in a test process."""
    key = name, twin, backend, repr(sorted(changes.items()))
    if key not in _TRAINED_TWINS:
        work = functools.partial(_train_twin, twin=twin)
        whole = {**changes, "gradient_accumulation_steps": 1, "strategy": "data-parallel"}
        with tempfile.TemporaryDirectory() as folder:
            _TRAINED_TWINS[key] = _launched(work, name, backend, 1, Path(folder) / "twin", whole)
    return _TRAINED_TWINS[key]


def _launched(
    work: Callable[..., Any],
    name: str,
    backend: str,
    replicas: int,
    folder: Path,
    changes: dict[str, Any],
) -> dict[str, np.ndarray]:
    """Final weights by name after `work(session, name)` on every process of a run."""
    spec = load(name).spec.replace(**{"precision": "float64", "threads": 1, **changes})
    returned: dict[str, np.ndarray] = isotrain.launch(
        functools.partial(work, name=name),
        spec,
        backend=backend,
        replicas=replicas,
        output=folder,
        on_event=lambda event: None,
    )[0]
    return returned


def _train(session: isotrain.Session, name: str) -> dict[str, np.ndarray]:
    """Final weights by the example's own loop `train(session)` if it has one, else as `isotrain.run` does."""
    loop = getattr(load(name), "train", None)
    if loop is not None:
        loop(session)
    else:
        fit(session)
    has_average = session.spec.weight_average is not None
    with session.averaged() if has_average else contextlib.nullcontext():
        return session.read_state(WEIGHTS)


def _train_twin(session: isotrain.Session, name: str, twin: Twin) -> dict[str, np.ndarray]:
    read = () if session.spec.data is None else session.batches()
    batches = [(each.slices[0][0].inputs, each.slices[0][0].targets) for each in read]
    twin(Plain(load(name), session.group.model, batches))
    return session.read_state(WEIGHTS)
