"""The session on real replicas: where loops break off, what is frozen, what is refused."""

from __future__ import annotations

import contextlib
import json
import resource
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from integration.session_specs import launch, samples, spec

import isotrain
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.data import sources
from isotrain.core.errors import DataError
from isotrain.core.session.weights.weights_file import save_weights
from isotrain.strategies.data_parallel import DataParallel
from isotrain.testing.reference.layers import BatchNormalization, Dense
from isotrain.testing.reference.network import Network
from isotrain.testing.reference.replica_group import ReferenceGroup

pytestmark = pytest.mark.usefixtures("reference")

EXAMPLES = Path(__file__).parents[2] / "examples"


class Samples:
    """A map-style data set that is given as a class."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(3, index, "float32"), np.full(1, index, "float32")


def test_batches_continue_after_a_break(tmp_path: Path) -> None:
    def epoch_by_epoch(session: isotrain.Session) -> list[int]:
        steps = []
        for _ in range(session.spec.epochs):
            for batch in session.batches():
                session.step(batch)
                steps.append(batch.step)
                if batch.is_last_of_epoch:
                    break
        assert session.is_done
        return steps

    assert launch(epoch_by_epoch, tmp_path) == list(range(9))


@pytest.mark.slow
def test_a_local_run_listens_on_loopback_only(tmp_path: Path) -> None:
    """TensorFlow's multi-worker strategy cannot, and its plan says so."""

    def listening(session: isotrain.Session) -> list[str]:
        for batch in session.batches():
            session.step(batch)
        connections = psutil.Process().net_connections("inet")
        return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]

    addresses = launch(listening, tmp_path, 2, "torch-ddp")
    assert addresses
    assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_seeking_goes_back(tmp_path: Path) -> None:
    def twice(session: isotrain.Session) -> list[int]:
        taken = []
        for _ in range(2):
            session.seek(5)
            taken += [batch.step for batch in session.batches() if session.step(batch) is not None]
        return taken

    assert launch(twice, tmp_path) == [5, 6, 7, 8] * 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_frozen_weights_keep_every_bit(tmp_path: Path, backend: str) -> None:
    def before_and_after(session: isotrain.Session) -> list[Any]:
        before = session.read_state()
        for batch in session.batches():
            session.step(batch)
        return [before, session.read_state()]

    before, after = launch(
        before_and_after, tmp_path, 2, backend, model_args={"frozen": True}, epochs=1
    )
    kernels = {name: name.endswith("first/kernel") for name in before if "kernel" in name}
    assert sorted(kernels.values()) == [False, True]
    for name, is_frozen in kernels.items():
        assert np.array_equal(before[name], after[name]) == is_frozen, name


def test_unknown_attributes_of_a_session_cannot_be_set() -> None:
    with isotrain.open_session(spec(), backend="reference") as session:
        for name in ("learning_rate", "lerning_rate", "is_done"):
            with pytest.raises(isotrain.IsotrainError, match=r"set_learning_rate\(rate\)"):
                setattr(session, name, 1e-4)


def test_a_loop_scales_the_rate_on_top_of_the_schedule(tmp_path: Path) -> None:
    def on_plateau(session: isotrain.Session) -> list[float]:
        for batch in session.batches():
            session.step(batch)
            if batch.is_last_of_epoch:
                session.scale_learning_rate(0.5)
        return [session.learning_rate(0)]

    schedule = {"name": "step", "every_steps": 4, "factor": 0.5}
    assert launch(on_plateau, tmp_path, schedule=schedule) == [0.0625 / 8]
    told = map(json.loads, (tmp_path / "run" / "steps.jsonl").read_text().splitlines())
    rates = [rate for event in told for rate in event["learning_rates"]]
    factors = [1, 1, 1, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]
    assert rates == [0.0625 * factor for factor in factors]


@pytest.mark.parametrize("call", ["scale_learning_rate", "set_learning_rate"])
@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_the_rate_is_set_and_scaled_by_numbers_that_are_not_negative(
    call: str, number: float
) -> None:
    with (
        isotrain.open_session(spec(), backend="reference") as session,
        pytest.raises(isotrain.IsotrainError, match=f"{call}: expected a finite number"),
    ):
        getattr(session, call)(number)


def test_a_loop_sets_the_rate_and_returns_to_the_schedule() -> None:
    schedule = {"name": "step", "every_steps": 1, "factor": 0.5}
    with isotrain.open_session(spec(schedule=schedule), backend="reference") as session:
        session.scale_learning_rate(0.5)
        session.set_learning_rate(0.25)
        assert [session.learning_rate(step) for step in (0, 3)] == [0.25, 0.25]
        session.scale_learning_rate(0.5)
        assert session.learning_rate(3) == 0.125
        session.set_learning_rate(None)
        assert session.learning_rate(3) == 0.0625 / 8


def test_a_momentum_that_cannot_change_is_refused() -> None:
    schedule = {"name": "one-cycle", "momentum_range": [0.75, 0.875]}
    sgd = {"name": "sgd", "lr": 0.0625, "momentum": 0.5}
    with pytest.raises(
        isotrain.UnsupportedError, match=r"one-cycle changes the momentum.*reference"
    ):
        isotrain.open_session(spec(schedule=schedule, optimizer=sgd), backend="reference")


def test_steps_at_rate_0_change_no_weights() -> None:
    with isotrain.open_session(spec(schedule=lambda step: step), backend="reference") as session:
        before = session.read_state(("trainable",))
        batches = session.batches()
        session.step(next(batches))
        at_zero = session.read_state(("trainable",))
        session.step(next(batches))
        after = session.read_state(("trainable",))
    assert all(np.array_equal(before[name], at_zero[name]) for name in before)
    assert not any(np.array_equal(before[name], after[name]) for name in before)


def normalised() -> Network:
    return Network([Dense(3, 5, name="first"), BatchNormalization(5), Dense(5, 1, name="last")])


def test_early_stopping_restores_the_best_moving_statistics_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop is that of the example, and the measured model becomes worse and worse."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = runpy.run_path(str(EXAMPLES / "digits_own_loop.py"))
    fields = spec(
        model=normalised,
        data=lambda: isotrain.DataSet(samples(), samples()),
        epochs=9,
    )
    with isotrain.open_session(fields, backend="reference") as session:
        measured: list[dict[str, float]] = []
        evaluate = session.evaluate

        def noted() -> dict[str, float]:
            found = evaluate()
            measured.append({**found, "accuracy": -len(measured) + 10.0})
            return measured[-1]

        session.__dict__["evaluate"] = noted
        example["train"](session)
    assert len(measured) == 1 + 2 + 1, "one is best, two bring nothing, and the best is asked again"
    assert measured[-1]["loss"] == measured[0]["loss"] != measured[1]["loss"]


def test_each_batch_of_an_evaluation_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    with isotrain.open_session(spec(), backend="reference") as session:
        monkeypatch.setattr(Reporter, "enter", lambda reporter, call: entered.append(call))
        session.evaluate(samples())
        monkeypatch.undo()
    assert entered.count("evaluate") == 1 + 3


def test_a_data_set_class_is_called(tmp_path: Path) -> None:
    def count(session: isotrain.Session) -> int | None:
        return session.plan.samples

    assert launch(count, tmp_path, data=Samples, data_args={"length": 7}) == 7


def torch_net() -> Any:
    import torch

    return torch.nn.Linear(3, 1)


@pytest.mark.slow
def test_momenta_are_averaged_where_a_replica_had_no_samples(tmp_path: Path) -> None:
    def momenta(session: isotrain.Session) -> list[np.ndarray]:
        for batch in session.batches():
            session.step(batch)
        return list(session.read_state(("optimizer",)).values())

    found = isotrain.launch(
        momenta,
        spec(
            model={"torch": torch_net},
            optimizer={"name": "sgd", "lr": 0.0625, "momentum": 0.5},
            global_batch_size=1,
            epochs=None,
            steps=3,
            strategy={"name": "local-sgd", "options": {"every": 1, "average_momenta": True}},
        ),
        backend="torch-ddp",
        replicas=2,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    assert any(np.abs(value).max() > 0 for value in found[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_cap_mb": "big"}, "expected a positive number of MiB, received 'big'"),
        ({"static_graph": "no"}, "expected true or false, received 'no'"),
    ],
)
def test_options_of_ddp_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(isotrain.PlanError, match=words):
        isotrain.plan(spec(backend_options={"torch-ddp": options}), backend="torch-ddp")


def test_native_torch_weight_decay_is_noted() -> None:
    found = isotrain.plan(
        spec(
            optimizer={"name": "adam", "weight_decay": 0.5},
        ),
        backend="torch-ddp",
    )
    assert "adds it to the gradient" in found.notes[0]


def test_a_result_that_diverged_is_strict_json_and_read_back(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    fields = spec(optimizer={"name": "sgd", "lr": 1e30}, on_nan="warn")
    directory = tmp_path / "run"
    result = isotrain.run(
        fields, backend="reference", output=directory, on_event=lambda event: None
    )
    assert np.isnan(result.final_loss)
    for line in (directory / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    json.loads((directory / "result.json").read_text(), parse_constant=refuse)
    again = isotrain.read_result(directory)
    np.testing.assert_array_equal(again.history.loss, result.history.loss)
    assert np.isnan(again.final_loss)
    with pytest.raises(isotrain.IsotrainError, match=r"result\.json cannot be read"):
        isotrain.read_result(tmp_path)


def diverging(on_nan: str) -> None:
    """A loop of one's own that never looks at its losses."""
    fields = spec(optimizer={"name": "sgd", "lr": 1e30}, on_nan=on_nan)
    with isotrain.open_session(fields, backend="reference") as session:
        for batch in session.batches():
            session.step(batch)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_loss_in_a_custom_loop() -> None:
    with pytest.raises(isotrain.NotANumberError, match="is NaN"):
        diverging("stop")
    with pytest.warns(UserWarning, match=r"is NaN.*The run goes on"):
        diverging("warn")
    diverging("ignore")


@pytest.mark.parametrize(
    "walk",
    [
        lambda: isotrain.open_session(spec(), backend="reference").close(),
        lambda: isotrain.measured_plan(spec(), backend="reference", replicas=2),
        lambda: isotrain.check(spec(), backends="reference", replicas=[1, 2]),
    ],
    ids=["open_session", "measured_plan", "check"],
)
def test_a_process_creates_the_strategy_once(
    walk: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(DataParallel, "__init__", lambda self: made.append(self))
    walk()
    assert len(made) == 1


def test_a_plan_opens_its_data_once(tmp_path: Path) -> None:
    def batches() -> Any:
        with (tmp_path / "begun").open("a") as file:
            file.write("once ")
        inputs, targets = samples()
        yield from zip(np.split(inputs, 3), np.split(targets, 3), strict=True)

    fields = {"data": sources.stream(batches, 12), "metrics": ["mean_absolute_error"]}
    isotrain.measured_plan(spec(**fields), backend="reference")
    assert (tmp_path / "begun").read_text() == "once "


def test_weights_are_counted_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("weights were copied")

    monkeypatch.setattr(ReferenceGroup, "read_state", refuse)
    with isotrain.open_session(spec(), backend="reference") as session:
        assert session.plan.parameters == (3 * 5 + 5) + (5 * 1 + 1)


class Named:
    """A data set as Hugging Face has it, without names of input and target columns."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"image": np.ones(3), "label": np.ones(1)}


def test_samples_without_targets_are_refused_where_the_loss_compares_with_them() -> None:
    named = sources.MapStyle(Named(), inputs="image", targets="label")
    for data, told in (
        (
            Named(),
            r"Each is a dict of 'image', 'label'.*isotrain\.sources\.MapStyle\(data, inputs=",
        ),
        ([np.ones((8, 3))], r"have no targets.*Give pairs \(inputs, targets\)"),
        (named, ""),
    ):
        refused = pytest.raises(DataError, match=told) if told else contextlib.nullcontext()
        given = spec(data=data)
        with isotrain.open_session(given, backend="reference") as session, refused:
            session.step(next(session.batches()))


def compares(targets: Any, predictions: Any) -> Any:
    difference = predictions - targets
    return (difference**2).sum(1), 2 * difference


def objective(model: Any, batch: Any) -> Any:
    return model(batch[0])


@pytest.mark.parametrize("case", ["first step", "second step", "objective"])
def test_an_error_in_the_first_step_says_that_nothing_names_the_targets(case: str) -> None:
    loss = {"loss": None, "objective": objective} if case == "objective" else {"loss": compares}
    with isotrain.open_session(spec(data=Named(), **loss), backend="reference") as session:
        if case == "second step":
            session.step(session.batch(np.ones((4, 3)), np.ones((4, 1))))
        with pytest.raises(ValueError, match="matmul") as caught:
            session.step(next(session.batches()))
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == (case == "first step")
    for note in notes:
        assert "a dict of 'image', 'label'. If the loss needs targets: isotrain" in note
        assert "isotrain.sources.MapStyle(data, inputs=" in note


def test_a_failed_write_of_weights_keeps_the_earlier_file(tmp_path: Path) -> None:
    target, limits = tmp_path / "weights.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    with isotrain.open_session(spec(), backend="reference") as session:
        save_weights(session.group, target)
        before = target.read_bytes()
        session.step(next(session.batches()))
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                save_weights(session.group, target)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert target.read_bytes() == before
        assert list(tmp_path.iterdir()) == [target]
        save_weights(session.group, target)
    assert target.read_bytes() != before
