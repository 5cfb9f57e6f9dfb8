"""Averages of the weights over steps: equal to those by hand, kept in checkpoints, evaluated and stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param
from integration import named_updates
from integration.session_specs import launch, samples, spec

import isotrain
from isotrain.core.errors import IsotrainError, SpecError, UnsupportedError

pytestmark = pytest.mark.usefixtures("reference")

BACKENDS = [
    "reference",
    pytest.param("torch-ddp", marks=pytest.mark.slow),
    *(param(name, features=True) for name in ("tf-mirrored", "tf-multiworker")),
]
EMA = {"ema": {"decay": 0.875, "every": 2, "start": 1}, "precision": "float64"}
SWA = {"swa": {"start": 2, "every": 3}, "precision": "float64"}
VALIDATED = {"data": lambda: isotrain.DataSet(samples(), samples())}


def weights(session: isotrain.Session) -> dict[str, np.ndarray]:
    return session.read_state(["trainable", "non-trainable"])


def assert_close(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-14, err_msg=name)


def assert_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def averages_by_hand(session: isotrain.Session) -> Any:
    """The average that the session has, and that of the weights which it had after each step."""
    by_step = [weights(session)]
    for batch in session.batches():
        session.step(batch)
        by_step.append(weights(session))
    with session.averaged():
        average = weights(session)
    assert_equal(weights(session), by_step[-1])
    policy = session.spec.weight_average
    assert policy is not None
    taken = by_step[policy.start :: policy.every]
    if session.spec.ema is None:
        return average, {n: np.mean([each[n] for each in taken], axis=0) for n in taken[0]}
    decay, expected = session.spec.ema.decay, taken[0]
    for each in taken[1:]:
        expected = {n: decay * a + (1 - decay) * each[n] for n, a in expected.items()}
    return average, expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fields", [EMA, SWA], ids=["ema", "swa"])
def test_the_average_is_that_of_the_weights_of_the_steps(
    tmp_path: Path, backend: str, fields: dict[str, Any]
) -> None:
    average, expected = launch(averages_by_hand, tmp_path, 2, backend, **fields)
    assert_close(average, expected)


def averages_of_replaced_weights(session: isotrain.Session, folder: Path) -> Any:
    """The average that the session has, and that of the weights when they were saved, before others came."""
    expected = weights(session)
    for batch in session.batches():
        session.step(batch)
        session.save(folder)
        saved = weights(session)
        expected = {name: a + 0.25 * (saved[name] - a) for name, a in expected.items()}
        session.write_state({name: array / 2 for name, array in saved.items()})
    with session.averaged():
        return weights(session), expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_are_written_are_not_in_the_average_of_those_before(
    tmp_path: Path, backend: str
) -> None:
    average, expected = launch(
        lambda session: averages_of_replaced_weights(session, tmp_path / "checkpoints"),
        tmp_path / "run",
        2,
        backend,
        ema=0.75,
        precision="float64",
    )
    assert_close(average, expected)


@pytest.mark.slow
def test_training_is_the_same_to_the_bit_with_and_without(tmp_path: Path) -> None:
    def trained(session: isotrain.Session) -> Any:
        for batch in session.batches():
            session.step(batch)
            session.evaluate()
        return session.read_state()

    plain = launch(trained, tmp_path / "plain", 2, "torch-ddp", **VALIDATED)
    assert_equal(launch(trained, tmp_path / "ema", 2, "torch-ddp", ema=0.5, **VALIDATED), plain)


def test_evaluations_and_predictions_are_those_of_the_average() -> None:
    fields = {**VALIDATED, **EMA}
    with isotrain.open_session(spec(**fields), backend="reference") as session:
        for batch in session.batches():
            session.step(batch)
        evaluated, predicted = session.evaluate(), session.predict()
        raw = session.call(samples()[0])
        with session.averaged():
            assert session.evaluate() == evaluated
            np.testing.assert_array_equal(session.call(samples()[0]), predicted)
            for refused in (lambda: session.step(batch), session.save, session.restore):
                with pytest.raises(IsotrainError, match=r"within session\.averaged"):
                    refused()
        assert np.abs(raw - predicted).max() > 1e-3
        session.write_state(weights(session))


def test_before_it_begins_the_weights_are_those_of_training() -> None:
    with isotrain.open_session(spec(ema={"start": 5}), backend="reference") as session:
        session.step(next(session.batches()))
        with session.averaged():
            session.step(next(session.batches()))


def half(session: isotrain.Session, folder: Path) -> None:
    for batch in session.batches():
        session.step(batch)
        if batch.step == 4:
            session.save(folder)
            break


def rest(session: isotrain.Session, folder: Path | None) -> Any:
    if folder is not None:
        session.restore(folder)
    for batch in session.batches():
        session.step(batch)
    with session.averaged():
        return weights(session)


@pytest.mark.parametrize(
    ("backend", "replicas"),
    [
        ("reference", 1),
        pytest.param("torch-ddp", 2, marks=pytest.mark.slow),
        *(param(*each, features=True) for each in (("torch-ddp", 1), ("tf-multiworker", 2))),
    ],
)
@pytest.mark.parametrize("fields", [EMA, SWA], ids=["ema", "swa"])
def test_a_resumed_run_has_the_average_of_one_that_went_on(
    tmp_path: Path, backend: str, replicas: int, fields: dict[str, Any]
) -> None:
    models = {"model": spec()["model"]["torch"]} if backend != "reference" else {}
    fields = {**fields, **models, "optimizer": {"name": "adam", "lr": 0.0625}}
    folder = tmp_path / "checkpoints"
    start = "torch-ddp" if models else "reference"
    launch(lambda session: half(session, folder), tmp_path / "half", 2, start, **fields)
    went_on = launch(
        lambda session: rest(session, None), tmp_path / "all", replicas, backend, **fields
    )
    resumed = launch(
        lambda session: rest(session, folder), tmp_path / "rest", replicas, backend, **fields
    )
    if (backend, replicas) == (start, 2):
        assert_equal(resumed, went_on)
    else:
        for name, array in went_on.items():
            np.testing.assert_allclose(resumed[name], array, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch-ddp", param("tf-mirrored", features=True)])
def test_the_result_and_the_best_checkpoint_have_the_average(tmp_path: Path, backend: str) -> None:
    fields = {
        **VALIDATED,
        **EMA,
        "checkpoint": {
            "every_steps": 4,
            "keep_best": {"metric": "validation_loss", "restore": True},
        },
    }
    result = isotrain.run(
        spec(**fields),
        backend=backend,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    expected = launch(lambda session: rest(session, None), tmp_path / "other", 1, backend, **fields)
    assert_close(result.weights, expected)
    predicted = isotrain.predict(result, samples()[0], backend=backend, replicas=1)
    loss = np.mean((predicted - samples()[1]) ** 2)
    np.testing.assert_allclose(loss, result.metrics["validation_loss"], rtol=1e-9)
    checkpoint = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    by_checkpoint = isotrain.predict(checkpoint, samples()[0], spec=spec(**fields))
    np.testing.assert_allclose(by_checkpoint, predicted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("local-sgd", "weights of its own"),
        ("gossip", "weights of its own"),
        ({"name": "pipeline", "options": {"stages": 2}}, "no replica has all weights"),
        ({"name": "sharded", "options": {"stage": 3}}, "no replica has all weights"),
        ("parameter-server", "no replica has all weights"),
    ],
)
def test_strategies_without_common_weights_are_refused(strategy: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^ema: .*{words}"):
        isotrain.plan(spec(ema=0.9, strategy=strategy), backend="torch-ddp", replicas=2)


def test_one_average_is_kept() -> None:
    with pytest.raises(SpecError, match="ema and swa"):
        isotrain.TrainingSpec(**spec(ema=0.9, swa={"start": 1}))


def test_without_an_average_there_is_none_to_see() -> None:
    with (
        isotrain.open_session(spec(), backend="reference") as session,
        pytest.raises(IsotrainError, match="neither"),
        session.averaged(),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch-ddp", param("tf-mirrored", features=True)])
def test_steps_with_several_updates_are_averaged_once(tmp_path: Path, backend: str) -> None:
    def trained(session: isotrain.Session) -> Any:
        by_step = [weights(session)]
        for batch in session.batches():
            session.step(batch, "critic")
            session.step(batch, "generator")
            by_step.append(weights(session))
        with session.averaged():
            average = weights(session)
        expected = by_step[0]
        for each in by_step[1:]:
            expected = {name: a + 0.25 * (each[name] - a) for name, a in expected.items()}
        return average, expected

    average, expected = isotrain.launch(
        trained,
        named_updates.spec(named_updates.portable, ema=0.75),
        backend=backend,
        replicas=2,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )[0]
    assert_close(average, expected)


_LOSS_CALLS: list[int] = []


def counted_loss(targets: Any, predictions: Any) -> Any:
    import keras

    _LOSS_CALLS.append(1)
    return keras.ops.square(predictions - targets)


def loss_calls(session: isotrain.Session, folder: Path) -> int:
    """Calls of a loss, which a graph computes while it is traced alone, in steps around a restore."""
    for batch in session.batches():
        session.step(batch)
        if batch.step == 2:
            session.save(folder)
        if batch.step == 3:
            break
    session.restore(folder)
    for batch in session.batches():
        session.step(batch)
    return len(_LOSS_CALLS)


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.parametrize("backend", ["tf-mirrored", "tf-multiworker"])
def test_a_step_is_traced_once_with_and_without_an_average(tmp_path: Path, backend: str) -> None:
    """Also where the average begins late, rests in some steps, and is restored."""
    averages = {"none": {}, "first": {"ema": 0.5}, "late": {"swa": {"start": 2, "every": 2}}}
    calls = {
        name: launch(
            partial(loss_calls, folder=tmp_path / f"{name}-checkpoints"),
            tmp_path / name,
            2,
            backend,
            loss=counted_loss,
            **fields,
        )
        for name, fields in averages.items()
    }
    assert calls["first"] == calls["late"] == calls["none"] > 0
