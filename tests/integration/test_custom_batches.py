"""Batches that a loop makes of its arrays: any numbers of rows, on every backend, with and without data."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param
from integration.session_specs import launch, samples, spec

import isotrain
from isotrain.core.data.pytree import map_tree
from isotrain.core.errors import DataError, IsotrainError, RunFailedError

pytestmark = pytest.mark.usefixtures("reference")

PRECISE = {"precision": "float64", "shuffle": False}
NO_DATA = {"data": None, "epochs": None, "steps": 6, **PRECISE}
BACKENDS = [
    "reference",
    pytest.param("torch-ddp", marks=pytest.mark.slow),
    *(param(name, features=True) for name in ("tf-mirrored", "tf-multiworker")),
]
ROWS = [(3, 1), (0, 4), (2, 2), (4, 0), (1, 0), (5, 2)]
"""Rows of each of two replicas, by step."""


def part(session: isotrain.Session, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of this process in a step: consecutive ones of the samples, over all replicas."""
    first, second = ROWS[step]
    if len(session.group.local_replicas) == session.replicas:
        rows = slice(0, first + second)
    else:
        rows = slice(0, first) if session.is_main else slice(first, first + second)
    inputs, targets = samples()
    return inputs[rows], targets[rows]


def train_on_parts(session: isotrain.Session) -> dict[str, Any]:
    losses = []
    while not session.is_done:
        batch = session.batch(*part(session, session.steps_done))
        assert batch.size == sum(ROWS[batch.step])
        losses.append(float(session.step(batch)))
    return {"losses": losses, **session.read_state(["trainable"])}


def weights_of(returned: dict[str, Any]) -> list[Any]:
    return [returned[name] for name in returned if name != "losses"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_means_are_exact_for_any_numbers_of_rows(
    tmp_path: Path, backend: str, accumulation: int
) -> None:
    fields = {**NO_DATA, "gradient_accumulation_steps": accumulation}
    (expected,) = isotrain.launch(
        train_on_parts, spec(**NO_DATA), backend=backend, output=tmp_path / "one"
    )
    returned = launch(train_on_parts, tmp_path, 2, backend, **fields)
    np.testing.assert_allclose(returned["losses"], expected["losses"], rtol=1e-12)
    for weight, other in zip(weights_of(returned), weights_of(expected), strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", [*BACKENDS[:2], BACKENDS[3]])
def test_rows_of_the_data_give_the_run_of_the_data(tmp_path: Path, backend: str) -> None:
    def by_data(session: isotrain.Session) -> Any:
        for batch in session.batches():
            session.step(batch)
        return session.read_state()

    def by_arrays(session: isotrain.Session) -> Any:
        inputs, targets = samples()
        for batch in session.batches():
            start = batch.index * 4 + 2 * session.rank
            rows = slice(start, start + 2)
            session.step(session.batch(inputs[rows], targets[rows]))
        return session.read_state()

    expected = launch(by_data, tmp_path / "data", 2, backend, **PRECISE)
    returned = launch(by_arrays, tmp_path / "arrays", 2, backend, **PRECISE)
    for name, array in expected.items():
        np.testing.assert_array_equal(returned[name], array)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_of_one_process_is_what_all_predict(tmp_path: Path, backend: str) -> None:
    def called(session: isotrain.Session) -> Any:
        inputs, _ = samples()
        outputs = session.call(inputs) if session.is_main else None
        predicted = session.predict(inputs)
        session.step(session.batch(*samples()))
        after = session.call(inputs[:1])
        return None if outputs is None else (outputs, predicted, after, session.model is not None)

    outputs, predicted, after, has_model = launch(called, tmp_path, 2, backend, **NO_DATA)
    np.testing.assert_allclose(outputs, predicted, atol=1e-12)
    assert after.shape == (1, 1)
    assert abs(after - outputs[:1]).max() > 1e-6
    assert has_model


@pytest.mark.slow
def test_a_batch_is_not_changed_by_writing_to_the_arrays_it_was_made_of(tmp_path: Path) -> None:
    def overwritten(session: isotrain.Session) -> float:
        inputs, targets = samples()
        batch = session.batch(inputs, targets)
        inputs[:] = np.nan
        return float(session.step(batch))

    assert np.isfinite(launch(overwritten, tmp_path, 1, "torch-ddp", **NO_DATA))


def test_a_run_without_data_resumes(tmp_path: Path) -> None:
    def half(session: isotrain.Session) -> None:
        for _ in range(3):
            session.step(session.batch(*part(session, session.steps_done)))
        session.save(tmp_path / "checkpoints")

    def rest(session: isotrain.Session) -> Any:
        session.restore(tmp_path / "checkpoints")
        return train_on_parts(session)

    expected = launch(train_on_parts, tmp_path / "all", 2, **NO_DATA)
    launch(half, tmp_path / "half", 2, **NO_DATA)
    resumed = launch(rest, tmp_path / "rest", 2, **NO_DATA)
    for weight, other in zip(weights_of(resumed), weights_of(expected), strict=True):
        np.testing.assert_array_equal(weight, other)


def test_validation_data_alone_are_evaluated() -> None:
    fields = {**NO_DATA, "data": lambda: isotrain.DataSet(validation=samples())}
    with isotrain.open_session(spec(**fields), backend="reference") as session:
        assert session.can_evaluate
        before = session.evaluate()["loss"]
        session.step(session.batch(*samples()))
        assert session.evaluate()["loss"] < before


def test_a_plan_and_a_check_need_no_data() -> None:
    plan = isotrain.measured_plan(spec(**NO_DATA), backend="reference", replicas=2)
    assert plan.samples is None
    assert plan.parameters == 26
    checked = isotrain.check(spec(**NO_DATA), backends=["reference"], replicas=[1, 2])
    assert not checked.with_severity("error")


def test_without_data_there_are_no_batches_of_it(tmp_path: Path) -> None:
    with isotrain.open_session(spec(**NO_DATA), backend="reference") as session:
        assert session.next_batch() is None
        with pytest.raises(DataError, match=r"session\.batch\(inputs, targets\)"):
            next(session.batches())
    with pytest.raises(RunFailedError, match=r"isotrain\.launch"):
        isotrain.run(
            spec(**NO_DATA),
            backend="reference",
            output=tmp_path / "run",
            on_event=lambda event: None,
        )


def test_a_step_is_taken_with_one_batch() -> None:
    with isotrain.open_session(spec(epochs=1), backend="reference") as session:
        for batch in session.batches():
            session.step(batch)
            with pytest.raises(IsotrainError, match="into one batch"):
                session.batch(*samples())
            break
        session.step(session.batch(*samples()))
        session.step(session.batch(*samples()))
        with pytest.raises(IsotrainError, match="none is left"):
            session.batch(*samples())


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ((np.ones((2, 3)),), "targets"),
        ((np.ones((2, 3)), np.ones((3, 1))), "equally many"),
        ((np.ones((0, 3)), np.ones((0, 1))), "no process has a row"),
        ((np.ones(()), np.ones(())), "scalar"),
    ],
)
def test_arrays_that_make_no_batch_are_refused(arrays: Any, words: str) -> None:
    with (
        isotrain.open_session(spec(**NO_DATA), backend="reference") as session,
        pytest.raises(DataError, match=words),
    ):
        session.batch(*arrays)


@pytest.mark.slow
def test_a_loss_that_is_no_mean_is_refused(tmp_path: Path) -> None:
    def total(model: Any, batch: Any) -> Any:
        inputs, targets = batch
        return ((model(inputs) - targets) ** 2).sum()

    fields = {**NO_DATA, "loss": None, "objective": {"torch": total}}
    with pytest.raises(RunFailedError, match="ISO"):
        launch(train_on_parts, tmp_path, 2, "torch-ddp", **fields)


def any_structure(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    """Loss of inputs alone, of pairs and of nested pairs, each another one; and of the values of the step."""
    from keras import ops

    factor = 1.0 + 2.0 * step.values.get("double", 0.0) - step.values.get("half", 0.0) / 2
    inputs, targets = batch
    if targets is None:
        return factor * ops.mean((model(inputs["x"]) + ops.tanh(inputs["y"])) ** 2, axis=-1)
    if isinstance(inputs, tuple):
        return factor * ops.mean((model(inputs[0] + inputs[1]) - targets) ** 2, axis=-1)
    if isinstance(targets, tuple):
        return factor * ops.mean((model(inputs) - targets[0] * targets[1]) ** 2, axis=-1)
    return factor * ops.mean((model(inputs) - targets) ** 2, axis=-1)


def train_on_structures(session: isotrain.Session) -> dict[str, Any]:
    x, _ = samples()
    structures = [({"x": x, "y": x[::-1]},), (x, x[::-1]), ((x, 2 * x), x), (x, (2 * x, x))]
    values: list[dict[str, float]] = [{}, {"double": 1.0}, {"half": 1.0}]
    losses = []
    while not session.is_done:
        step = session.steps_done
        count = len(x) // (1 if len(session.group.local_replicas) == session.replicas else 2)
        rows = slice(None, count) if session.is_main else slice(-count, None)
        parts = map_tree(operator.itemgetter(rows), structures[step % 4])
        batch = session.batch(*parts)
        losses.append(float(session.step(batch, values=values[step % 3])))
    evaluated = [session.evaluate(each)["loss"] for each in (structures[1], *structures)]
    return {"losses": losses, "evaluated": evaluated, **session.read_state(["trainable"])}


@pytest.mark.features
@pytest.mark.parametrize(
    "backend", ["tf-mirrored", "tf-multiworker", "horovod-tf", "horovod-torch"]
)
def test_structures_and_values_may_change_from_step_to_step(tmp_path: Path, backend: str) -> None:
    fields = {**NO_DATA, "loss": None, "objective": any_structure, "steps": 12}
    expected = launch(train_on_structures, tmp_path / "one", 1, "torch-ddp", **fields)
    returned = launch(train_on_structures, tmp_path / "two", 2, backend, **fields)
    assert expected.keys() == returned.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(returned[name], array, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS[1:3])
def test_sample_weights_are_told_from_second_targets(tmp_path: Path, backend: str) -> None:
    def objective(model: Any, batch: Any) -> Any:
        *parts, last = batch
        if len(parts) == 2:
            return ((model(parts[0]) - parts[1]) ** 2)[:, 0]
        return ((model(parts[0]) + last[0] * last[1]) ** 2)[:, 0]

    def trained(session: isotrain.Session) -> list[float]:
        x, y = samples()
        batches = [(x, (y, abs(y))), (x, y, abs(y))]
        return [float(session.step(session.batch(*batches[step % 2]))) for step in range(8)]

    fields = {**NO_DATA, "loss": None, "objective": objective, "steps": 8}
    expected = launch(trained, tmp_path / "eager", 1, "torch-ddp", **fields, capture=False)
    returned = launch(trained, tmp_path / "captured", 1, backend, **fields)
    np.testing.assert_allclose(returned, expected, rtol=1e-12)


def mean_over_time(model: Any, batch: Any) -> Any:
    from keras import ops

    outputs = model(ops.sum(batch[0], axis=1))
    return ops.mean((outputs - batch[1]) ** 2, axis=-1)


def train_on_widths(session: isotrain.Session) -> dict[str, Any]:
    """Sequences that each process has padded to a width of its own, which changes from step to step."""
    inputs, targets = samples()
    sequences = np.stack([inputs] * 6, axis=1)
    sequences[:2, 2:] = 0
    is_whole = len(session.group.local_replicas) == session.replicas
    while not session.is_done:
        width = (2, 4, 6, 6)[session.steps_done % 4] if session.is_main and not is_whole else 6
        rows = slice(0, 5) if is_whole else slice(0, 2) if session.is_main else slice(2, 5)
        batch = session.batch(sequences[rows, :width], targets[rows])
        assert batch.varying_widths == (not is_whole and session.steps_done % 4 < 2)
        session.step(batch)
    return session.read_state(["trainable"])


@pytest.mark.features
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-multiworker", "horovod-tf"])
def test_processes_may_have_rows_of_other_widths(tmp_path: Path, backend: str) -> None:
    fields = {**NO_DATA, "loss": None, "objective": mean_over_time, "steps": 8}
    expected = launch(train_on_widths, tmp_path / "one", 1, "torch-ddp", **fields)
    returned = launch(train_on_widths, tmp_path / "two", 2, backend, **fields)
    for name, array in expected.items():
        np.testing.assert_allclose(returned[name], array, rtol=0, atol=1e-12, err_msg=name)


OTHER_PARTS = [
    (
        (2, 3),
        (2, 3, 1),
        "of the same names.*[rows, 3], targets [rows, 1] of replica 0; .*[rows, 3, 1]",
    ),
    (
        (2, 3),
        (0, 4),
        "without rows to be as wide.*[rows, 3].* of replica 0; inputs [rows, 4].* of replica 1",
    ),
]


@pytest.mark.parametrize(("first", "second", "message"), OTHER_PARTS)
def test_parts_of_processes_that_differ_are_named(
    tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...], message: str
) -> None:
    def work(session: isotrain.Session) -> None:
        shape = first if session.is_main else second
        session.batch(np.ones(shape), np.ones((shape[0], 1)))

    with pytest.raises(RunFailedError, match=message.replace("[", r"\[")):
        launch(work, tmp_path, 2, "reference", **NO_DATA)


def local_parts(session: isotrain.Session) -> list[Any]:
    rows = np.arange(7).reshape(7, 1)
    return [session.local_rows(rows)[:, 0].tolist(), list(session.local_rows(range(2)))]


def test_local_rows_are_contiguous_parts_of_all_rows() -> None:
    fields = spec(global_batch_size=6)
    parts = isotrain.launch(local_parts, fields, backend="reference", replicas=3)
    arrays, ranges = zip(*parts, strict=True)
    assert arrays == ([0, 1], [2, 3], [4, 5, 6])
    assert ranges == ([], [0], [1])
