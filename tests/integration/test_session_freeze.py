"""Weights that a loop freezes and unfreezes: as in plain loops, kept by checkpoints, or refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param
from integration.session_specs import launch, spec

import isotrain
from isotrain.core.errors import IsotrainError, SpecError, UnsupportedError
from isotrain.testing.consecutive_sessions import Work, launched_in_turn

pytestmark = pytest.mark.slow

State = dict[str, np.ndarray]
FROM, TO = 2, 5
"""Steps before which the first layer is frozen and unfrozen, of nine."""
SGD = {"name": "sgd", "lr": 0.0625, "momentum": 0.5, "weight_decay": 0.25}
ADAMW = {"name": "adamw", "lr": 0.0625, "weight_decay": 0.25, "beta_1": 0.5, "beta_2": 0.75}
ADAMW["epsilon"] = 2.0**-10
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}
"""Optimizers by name: each launch trains with both, one after the other."""


def cells(*pairs: tuple[str, int]) -> pytest.MarkDecorator:
    """Parametrization `backend, replicas`; `make test` has two replicas of torch-ddp."""
    cases = [param(*each, features=each != ("torch-ddp", 2)) for each in pairs]
    return pytest.mark.parametrize(("backend", "replicas"), cases)


def by_optimizer(work: Work, backend: str, replicas: int, **fields: Any) -> dict[str, Any]:
    """What rank 0 returns in a session with each optimizer."""
    specs = {name: spec(optimizer=each, **fields) for name, each in OPTIMIZERS.items()}
    return launched_in_turn(specs, work, backend, replicas)[0]


def native() -> Any:
    from collections import OrderedDict

    from torch import nn

    layers = {"first": nn.Linear(3, 5), "tanh": nn.Tanh(), "last": nn.Linear(5, 1)}
    return nn.Sequential(OrderedDict(layers)).double()


NATIVE = {"model": {"torch": native}, "precision": "float64"}


def native_half() -> Any:
    return native().float()


def native_normalized() -> Any:
    from collections import OrderedDict

    from torch import nn

    first = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
    return nn.Sequential(OrderedDict({"first": first, "last": nn.Linear(5, 1)})).double()


def normalized() -> Any:
    import keras

    layers = keras.layers
    inner = [layers.Dense(5), layers.BatchNormalization(), layers.Dropout(0.5)]
    first = keras.Sequential([keras.Input((3,)), *inner], name="first")
    return keras.Sequential([keras.Input((3,)), first, layers.Dense(1, name="last")])


def weights(session: isotrain.Session) -> State:
    return session.read_state(["trainable", "non-trainable"])


def trained(session: isotrain.Session, name: str = "") -> State:
    """Weights after a run in which the first layer is frozen on the way; its state must not move then."""
    before: State = {}
    for batch in session.batches():
        if batch.step == FROM:
            session.freeze("*first/*")
            before = _layer(session.read_state(), "first")
        if batch.step == TO:
            for weight, array in _layer(session.read_state(), "first").items():
                np.testing.assert_array_equal(array, before[weight], err_msg=weight)
            session.unfreeze("*first/*")
        session.step(batch)
    return weights(session)


def _layer(state: State, part: str) -> State:
    """State of the weights with a part of their names, their optimizer state included."""
    return {name: array for name, array in state.items() if part in name}


def batches(
    session: isotrain.Session, name: str
) -> tuple[list[tuple[np.ndarray, np.ndarray]], State]:
    read = [batch.slices[0][0] for batch in session.batches()]
    numpy = session.group.numpy
    return [(numpy(each.inputs), numpy(each.targets)) for each in read], weights(session)


@functools.cache
def read_once() -> dict[str, Any]:
    """Batches and initial weights of a portable run, by optimizer."""
    return by_optimizer(batches, "torch-ddp", 1, precision="float64")


@functools.cache
def portable_twin(name: str) -> State:
    """NumPy's result of a loop over two layers with one of Keras' optimizers."""
    optimizer, (read, start) = OPTIMIZERS[name], read_once()[name]
    values = list(start.values())
    slots = [np.zeros_like(each) for each in values for _ in range(2)]
    for step, (inputs, targets) in enumerate(read):
        first, first_bias, last, last_bias = values
        hidden = np.tanh(inputs @ first + first_bias)
        error = 2 * (hidden @ last + last_bias - targets) / len(inputs)
        inner = error @ last.T * (1 - hidden**2)
        gradients = [inputs.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0)]
        for index, gradient in enumerate(gradients):
            if index > 1 or not FROM <= step < TO:
                _update(
                    optimizer, values[index], gradient, slots[2 * index : 2 * index + 2], step + 1
                )
    return dict(zip(start, values, strict=True))


def _update(
    optimizer: dict[str, Any], weight: np.ndarray, gradient: np.ndarray, slots: Any, count: int
) -> None:
    rate, (first, second) = optimizer["lr"], slots
    weight -= rate * optimizer["weight_decay"] * weight
    if optimizer["name"] == "sgd":
        first *= optimizer["momentum"]
        first -= rate * gradient
        weight += first
        return
    first += 0.5 * (gradient - first)
    second += 0.25 * (gradient**2 - second)
    rate *= np.sqrt(1 - 0.75**count) / (1 - 0.5**count)
    weight -= rate * first / (np.sqrt(second) + optimizer["epsilon"])


def assert_close(result: State, expected: State, tolerance: float) -> None:
    assert result.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(result[name], array, rtol=0, atol=tolerance, err_msg=name)


@cells(
    *(("torch-ddp", 1), ("torch-ddp", 2), ("tf-mirrored", 1), ("tf-mirrored", 2)),
    *(("tf-multiworker", 2), ("horovod-torch", 2), ("horovod-tf", 2)),
)
def test_equals_a_plain_loop(backend: str, replicas: int) -> None:
    for name, result in by_optimizer(trained, backend, replicas, precision="float64").items():
        assert_close(result, portable_twin(name), 1e-12)


def native_twin(session: isotrain.Session, name: str) -> State:
    """Result of a plain torch loop, in a process of its own."""
    import torch

    model = session.model
    options = {"lr": 0.0625, "weight_decay": 0.25}
    if name == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), momentum=0.5, **options)
    else:
        optimizer = torch.optim.AdamW(
            model.parameters(), betas=(0.5, 0.75), eps=ADAMW["epsilon"], **options
        )
    for step, batch in enumerate(session.batches()):
        inputs, targets = batch.slices[0][0].inputs, batch.slices[0][0].targets
        model.first.requires_grad_(not FROM <= step < TO)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return weights(session)


@functools.cache
def native_twins() -> dict[str, State]:
    return by_optimizer(native_twin, "torch-ddp", 1, **NATIVE)


@cells(("torch-ddp", 1), ("torch-ddp", 2), ("horovod-torch", 2))
def test_native_models_equal_a_plain_torch_loop(backend: str, replicas: int) -> None:
    for name, result in by_optimizer(trained, backend, replicas, **NATIVE).items():
        assert_close(result, native_twins()[name], 1e-12)


NORMALIZED = [
    ("torch-ddp", {"model": normalized}),
    ("torch-ddp", {"model": {"torch": native_normalized}, "precision": "float64"}),
    pytest.param("tf-mirrored", {"model": normalized}, marks=pytest.mark.features),
    pytest.param(
        "horovod-torch",
        {"model": {"torch": native_normalized}, "precision": "float64"},
        marks=pytest.mark.features,
    ),
]


def evaluated(session: isotrain.Session) -> tuple[State, State, list[tuple[float, float]]]:
    """Statistics when a layer is frozen and unfrozen; losses of steps and evaluations between."""
    losses, states = [], []
    for batch in session.batches():
        if batch.step == FROM:
            session.freeze("*first*")
        if batch.step in (FROM, TO):
            states.append(_layer(session.read_state(["non-trainable"]), "first"))
        if batch.step == TO:
            session.unfreeze("*first*")
        is_frozen = FROM <= batch.step < TO
        arrays = tuple(
            map(session.group.numpy, (batch.slices[0][0].inputs, batch.slices[0][0].targets))
        )
        expected = session.evaluate(arrays)["loss"] if is_frozen else 0.0
        loss = float(session.step(batch))
        if is_frozen:
            losses.append((loss, expected))
    states.append(_layer(session.read_state(["non-trainable"]), "first"))
    return (*states, losses)


@pytest.mark.parametrize(("backend", "fields"), NORMALIZED)
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.features)])
def test_frozen_layers_compute_as_in_evaluation(
    tmp_path: Path, backend: str, replicas: int, fields: dict[str, Any]
) -> None:
    frozen, unfrozen, end, losses = launch(
        evaluated, tmp_path, replicas, backend, global_batch_size=6, **fields
    )
    floats = {name for name, array in frozen.items() if array.dtype.kind == "f"}
    assert floats
    for name in floats:
        np.testing.assert_array_equal(frozen[name], unfrozen[name], err_msg=name)
        assert not np.array_equal(end[name], unfrozen[name]), name
    if replicas == 1:
        for loss, expected in losses:
            assert loss == pytest.approx(expected, rel=1e-6)


def by_gradients(session: isotrain.Session) -> State:
    """Statistics of a frozen layer, as changes over steps of gradients of slices of unequal sizes."""
    before: State = {}
    for batch in session.batches():
        if batch.step == FROM:
            session.freeze("*first*")
            before = _layer(session.read_state(["non-trainable"]), "first")
        session.apply_gradients(batch, *session.gradients(batch))
    after = _layer(session.read_state(["non-trainable"]), "first")
    return {name: after[name] - value for name, value in before.items() if value.dtype.kind == "f"}


@pytest.mark.parametrize(("backend", "fields"), NORMALIZED[:3])
@pytest.mark.parametrize("on_nan", ["stop", pytest.param("skip", marks=pytest.mark.features)])
def test_gradients_leave_frozen_statistics(
    tmp_path: Path, backend: str, fields: dict[str, Any], on_nan: str
) -> None:
    fields = {"global_batch_size": 7, "drop_remainder": True, "epochs": 6, **fields}
    changes = launch(by_gradients, tmp_path, 3, backend, ema=0.5, on_nan=on_nan, **fields)
    assert changes
    assert all(not change.any() for change in changes.values())


def averaged(session: isotrain.Session) -> tuple[State, State]:
    """Average of the weights by the session, and by hand, while a layer is frozen for some steps."""
    expected = weights(session)
    for batch in session.batches():
        if batch.step == FROM:
            session.freeze("*first/*")
        if batch.step == TO:
            session.unfreeze("*first/*")
        session.step(batch)
        now = weights(session)
        expected = {name: (array + now[name]) / 2 for name, array in expected.items()}
    with session.averaged():
        return weights(session), expected


@pytest.mark.parametrize(
    ("backend", "fields"),
    [
        ("torch-ddp", {"model": {"torch": native_normalized}}),
        ("torch-ddp", {"model": normalized}),
        pytest.param("tf-mirrored", {"model": normalized}, marks=pytest.mark.features),
        pytest.param("horovod-tf", {"model": normalized}, marks=pytest.mark.features),
    ],
)
def test_averages_go_on_while_weights_are_frozen(
    tmp_path: Path, backend: str, fields: dict[str, Any]
) -> None:
    fields = {"ema": 0.5, "precision": "float64", "global_batch_size": 6, **fields}
    result, expected = launch(averaged, tmp_path, 2, backend, **fields)
    floats = {name: array for name, array in result.items() if array.dtype.kind == "f"}
    assert_close(floats, {name: expected[name] for name in floats}, 1e-12)


def scaled(session: isotrain.Session) -> tuple[State, State, float]:
    start = weights(session)
    return start, trained(session), float(session.last_loss or np.nan)


@pytest.mark.parametrize(
    ("backend", "fields"),
    [
        ("torch-ddp", {"model": {"torch": native_half}}),
        ("torch-ddp", {}),
        pytest.param("tf-mirrored", {}, marks=pytest.mark.features),
        pytest.param("horovod-torch", {}, marks=pytest.mark.features),
    ],
)
def test_frozen_weights_rest_under_a_loss_scale(
    tmp_path: Path, backend: str, fields: dict[str, Any]
) -> None:
    """The first scales overflow: steps are skipped while the layer is frozen, and others are not."""
    loss_scale = {"initial": 2.0**20, "growth_steps": 2}
    fields = {"precision": "float16", "loss_scale": loss_scale, "optimizer": ADAMW, **fields}
    start, end, loss = launch(scaled, tmp_path, 2, backend, epochs=6, **fields)
    assert np.isfinite(loss)
    for name, array in end.items():
        assert np.isfinite(array).all(), name
        assert not np.array_equal(array, start[name]), name


def until_the_end(session: isotrain.Session, saves_to: Path | None = None) -> State:
    """State of a run that is frozen before its first step and unfrozen before the sixth, or saves before."""
    if not session.steps_done:
        session.freeze("*first*")
    for batch in session.batches():
        if batch.step == TO:
            session.unfreeze("*first*")
        session.step(batch)
        if saves_to is not None and batch.step == FROM:
            session.save(saves_to)
            return {}
    return session.read_state()


def first_part(session: isotrain.Session, name: str, folder: Path) -> None:
    until_the_end(session, saves_to=folder / name)


def uninterrupted(session: isotrain.Session, name: str) -> State:
    return until_the_end(session)


def resumed(session: isotrain.Session, name: str, folder: Path) -> State:
    session.restore(folder / name)
    with pytest.raises(IsotrainError, match="every weight is frozen"):
        session.freeze("*")
    return until_the_end(session)


@pytest.mark.parametrize(
    ("backend", "fields"),
    [
        ("torch-ddp", NATIVE),
        *(
            pytest.param(*each, marks=pytest.mark.features)
            for each in (("torch-ddp", {}), ("tf-mirrored", {}), ("horovod-torch", NATIVE))
        ),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, backend: str, fields: dict[str, Any]
) -> None:
    by_optimizer(functools.partial(first_part, folder=tmp_path), backend, 2, **fields)
    again = by_optimizer(functools.partial(resumed, folder=tmp_path), backend, 2, **fields)
    for optimizer, whole in by_optimizer(uninterrupted, backend, 2, **fields).items():
        assert whole.keys() == again[optimizer].keys()
        for name, array in whole.items():
            np.testing.assert_array_equal(again[optimizer][name], array, err_msg=name)


def refusals(session: isotrain.Session) -> list[str]:
    texts = []
    for call, pattern in (
        ("freeze", "middle"),
        ("unfreeze", "middle"),
        ("freeze", "*"),
        ("unfreeze", "*last*"),
    ):
        try:
            getattr(session, call)(pattern)
        except (IsotrainError, UnsupportedError) as error:
            texts.append(str(error))
    return texts


def test_refusals_have_reasons(tmp_path: Path) -> None:
    fields = {"initial_weights": {"freeze": "*last*"}}
    missing, missing_too, all_frozen, fixed = launch(refusals, tmp_path, 1, "torch-ddp", **fields)
    assert "'middle' fits none of the names" in missing
    assert "session.unfreeze: 'middle'" in missing_too
    assert "nothing is left to train" in all_frozen
    assert "frozen by initial_weights.freeze, for the whole run" in fixed


def refusal(session: isotrain.Session) -> str:
    try:
        session.freeze("*first*")
    except UnsupportedError as error:
        return str(error)
    return "nothing"


UPDATES = {"one": {"optimizer": {"name": "sgd", "lr": 0.125}}}


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize(
    ("backend", "fields", "reason"),
    [
        ("reference", {}, "is no FreezingGroup"),
        ("torch-ddp", {"strategy": "local-sgd"}, "strategy 'local-sgd' exchanges"),
        ("torch-ddp", {"optimizer": None, "updates": UPDATES}, "the spec has updates"),
        ("tf-mirrored", {"compile": True}, "XLA has compiled"),
    ],
)
def test_refused_where_it_cannot_be(
    tmp_path: Path, backend: str, fields: dict[str, Any], reason: str
) -> None:
    program = {name: value for name, value in spec(**fields).items() if value is not None}
    assert (
        reason
        in isotrain.launch(refusal, program, backend=backend, replicas=2, output=tmp_path / "run")[
            0
        ]
    )


def trainable_flags(session: isotrain.Session) -> dict[str, bool]:
    """Which weights are trainable after a model frozen in part is frozen twice within a run."""
    from isotrain.adapters.keras.weights import Freezing, freeze

    model = normalized()
    freeze(model, lambda name: name.endswith("beta"))
    freezing = Freezing(model)
    names = [variable.path for variable in model.trainable_variables]
    freezing.set_frozen([name for name in names if name.startswith("first")])
    with pytest.raises(SpecError, match="moving_mean"):
        freezing.set_frozen(["first/batch_normalization/moving_mean"])
    freezing.set_frozen(["last/kernel"])
    return {variable.path.split("/")[-1]: variable.trainable for variable in model.weights}


def test_what_was_frozen_at_the_start_stays_so(tmp_path: Path) -> None:
    flags = launch(trainable_flags, tmp_path, 1, "torch-ddp")
    assert not flags["beta"]
    assert flags["gamma"]
