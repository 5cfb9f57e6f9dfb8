"""Named updates: several objectives and optimizers for parts of one model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param
from integration import named_updates
from integration.named_updates import native, portable, spec, train_plain

import isotrain
from isotrain.core.results.result import read_history
from isotrain.testing.consecutive_sessions import launched_in_turn

MODELS = {"portable": portable, "native": {"torch": native}}


def trained(session: isotrain.Session, name: str) -> dict[str, Any]:
    """Weights after the updates that are due in each step, or after those that the loop names."""
    for batch in session.batches():
        if name.endswith("by name"):
            session.step(batch, "critic")
            if batch.step % 2:
                session.step(batch, "generator")
        else:
            session.step(batch)
    evaluated = {f"evaluated {name}": value for name, value in session.evaluate().items()}
    rates = [session.learning_rate(0, update) for update in ("critic", "generator")]
    return {**session.read_state(), **evaluated, "rates": rates}


def by_hand(session: isotrain.Session, name: str) -> dict[str, Any]:
    model = session.group.model
    weights = (
        {variable.path: variable.value for variable in model.trainable_variables}
        if hasattr(model, "trainable_variables")
        else dict(model.named_parameters())
    )
    batches = [(each.slices[0][0].inputs, each.slices[0][0].targets) for each in session.batches()]
    for weight in weights.values():
        weight.requires_grad_(True)
    train_plain(model, weights, batches)
    return dict(session.read_state(("trainable",)))


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, np.ndarray]]:
    (told,) = launched_in_turn({n: spec(m) for n, m in MODELS.items()}, by_hand, "torch-ddp", 1)
    return told


@pytest.mark.parametrize(
    ("backend", "replicas"),
    [
        ("torch-ddp", 1),
        pytest.param("torch-ddp", 2, marks=pytest.mark.slow),
        param("tf-mirrored", 2, features=True),
        param("tf-multiworker", 2, features=True),
        param("horovod-torch", 2, features=True),
        param("horovod-tf", 2, features=True),
    ],
)
def test_equals_the_plain_program(
    backend: str, replicas: int, expected: dict[str, dict[str, np.ndarray]]
) -> None:
    specs = {f"{n}{by}": spec(m) for n, m in MODELS.items() for by in ("", ", by name")}
    if "torch" not in backend:
        specs = {name: each for name, each in specs.items() if name.startswith("portable")}
    for told in launched_in_turn(specs, trained, backend, replicas):
        for name, state in told.items():
            for weight, array in expected[name.removesuffix(", by name")].items():
                np.testing.assert_allclose(state[weight], array, rtol=0, atol=1e-12)
            total = state["evaluated critic_loss"] + state["evaluated generator_loss"]
            assert state["evaluated loss"] == pytest.approx(total, rel=1e-12)
            assert state["rates"] == [0.0625, 0.125]


@pytest.mark.slow
def test_updates_are_recorded_and_resumed(tmp_path: Path) -> None:
    fields = spec(MODELS["native"], checkpoint={"every_steps": 3})
    whole = isotrain.run(fields, backend="torch-ddp", replicas=2, output=tmp_path / "whole")
    first = {**fields, "epochs": 1, "checkpoint": {"every_epochs": 1}}
    isotrain.run(first, backend="torch-ddp", replicas=2, output=tmp_path / "first")
    resumed = isotrain.resume(tmp_path / "first", spec=fields)
    for name, array in whole.weights.items():
        assert np.array_equal(array, resumed.weights[name]), name
    fields["updates"]["critic"]["weights"] = "*"
    with pytest.raises(isotrain.IsotrainError, match=r"updates\.critic\.weights"):
        isotrain.resume(tmp_path / "first", spec=fields)
    scalars = whole.history.scalars
    assert len(scalars["critic_loss"]) == 8
    assert list(scalars["generator_loss"]) == [1, 3, 5, 7]
    last = {name.removeprefix("validation_"): value for name, value in whole.metrics.items()}
    assert isotrain.evaluate(whole, replicas=1) == pytest.approx(last, rel=1e-12)
    assert isotrain.evaluate(whole, spec=fields, metrics=[]) == pytest.approx(last, rel=1e-12)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("torch-ddp", "tf-mirrored", marks=pytest.mark.slow),
        param("tf-multiworker", "torch-ddp", features=True),
        param("horovod-tf", "horovod-torch", features=True),
    ],
)
def test_another_framework_resumes_all_updates(first: str, second: str, tmp_path: Path) -> None:
    """Each update's optimizer state and its steps so far: one has done half as many as the other."""
    fields = spec(portable, checkpoint={"every_steps": 2, "keep_last": None})
    whole = isotrain.run(fields, backend=second, replicas=1, output=tmp_path / "whole")
    isotrain.run({**fields, "epochs": 1}, backend=first, replicas=2, output=tmp_path / "first")
    events: list[Any] = []
    resumed = isotrain.run(
        fields,
        backend=second,
        replicas=2,
        output=tmp_path / "second",
        resume=tmp_path / "first",
        on_event=events.append,
    )
    for name, array in whole.weights.items():
        np.testing.assert_allclose(resumed.weights[name], array, rtol=0, atol=1e-12, err_msg=name)
    assert resumed.history.loss == pytest.approx(whole.history.loss[4:], rel=1e-10)
    (told,) = [event for event in events if event["event"] == "resumed"]
    assert not any("optimizer" in text for text in told["lost"])


def saved_between(session: isotrain.Session) -> list[float]:
    losses = []
    for batch in session.batches():
        loss = float(session.step(batch, "critic"))
        session.save()
        losses.append(loss + float(session.step(batch, "generator")))
        session.save_if_due()
        if batch.is_last_of_epoch:
            session.end_epoch(batch.epoch, {})
    return losses


@pytest.mark.slow
def test_a_record_has_all_updates_of_a_step_that_is_saved_between_them(tmp_path: Path) -> None:
    fields = spec(MODELS["native"], checkpoint={"every_steps": 3})
    (losses,) = isotrain.launch(
        saved_between, fields, backend="torch-ddp", replicas=1, output=tmp_path / "run"
    )
    history = read_history(tmp_path / "run")
    assert history.loss == pytest.approx(losses, rel=1e-12)
    assert len(history.learning_rate) == len(losses)
    means = [np.average(losses[start:][:4], weights=[8, 8, 8, 4]) for start in (0, 4)]
    assert [epoch["loss"] for epoch in history.epochs] == pytest.approx(means, rel=1e-12)


def saved_too_early(session: isotrain.Session, name: str, folder: Path) -> dict[str, Any]:
    """Weights of a loop whose checkpoint of step 2 lacks an update, unless the next save replaces it."""
    if name == "resumed":
        session.restore(folder)
    for batch in session.batches():
        session.step(batch, "critic")
        if name == "saved" and batch.step == 2:
            session.save_if_due()
        session.step(batch, "generator")
        if name == "saved" and batch.step == 2:
            session.save_if_due()
            break
    return session.read_state()


def test_a_save_between_updates_is_told_and_done_again(tmp_path: Path) -> None:
    fields = spec(MODELS["native"], checkpoint={"every_steps": 3})
    events: list[Any] = []
    told = {}
    for name in ("whole", "saved", "resumed"):
        (told[name],) = isotrain.launch(
            functools.partial(saved_too_early, name=name, folder=tmp_path / "saved"),
            fields,
            backend="torch-ddp",
            replicas=1,
            output=tmp_path / name,
            on_event=events.append,
        )
    for weight, array in told["whole"].items():
        assert np.array_equal(told["resumed"][weight], array), weight
    (warning,) = [event["text"] for event in events if event["event"] == "warning"]
    assert "after step 2 was saved before update 'generator'" in warning


def test_a_pattern_that_fits_no_weight_is_refused() -> None:
    fields = spec(MODELS["native"])
    fields["updates"]["critic"]["weights"] = "discriminator/*"
    with pytest.raises(isotrain.IsotrainError, match=r"critic.weights: 'discriminator/\*' fits"):
        isotrain.run(fields, backend="torch-ddp", replicas=1)


def weighted_critic(model: Any, batch: Any, step: isotrain.StepContext) -> Any:
    return named_updates.critic(model, batch) * step.values["weight"]


def test_values_are_for_the_updates_whose_objective_takes_a_step(
    expected: dict[str, dict[str, np.ndarray]],
) -> None:
    fields = spec(MODELS["native"], values={"weight": 1.0})
    with pytest.raises(isotrain.IsotrainError, match=r"values: .*critic, .*generator has no third"):
        isotrain.run(fields, backend="torch-ddp", replicas=1)
    fields["updates"]["critic"]["objective"] = weighted_critic
    result = isotrain.run(fields, backend="torch-ddp", replicas=1)
    for weight, array in expected["native"].items():
        np.testing.assert_allclose(result.weights[weight], array, rtol=0, atol=1e-12)


def test_other_strategies_refuse_updates() -> None:
    fields = spec(MODELS["native"], strategy="local-sgd")
    with pytest.raises(isotrain.IsotrainError, match="Use strategy data-parallel"):
        isotrain.plan(fields, backend="torch-ddp", replicas=2)


def test_the_plan_names_the_updates() -> None:
    plan = isotrain.plan(spec(named_updates.portable), backend="tf-mirrored", replicas=2)
    assert "updates.critic: weights d/* by sgd" in plan.notes
    assert "updates.generator: weights g/* by sgd, every 2 steps" in plan.notes


def test_weights_of_several_updates_and_of_none() -> None:
    """Both updates train the output of the generator, and none trains its hidden layer."""
    fields = spec(MODELS["native"])
    fields["updates"]["critic"]["weights"] = ["d/*", "g/2/*"]
    fields["updates"]["generator"]["weights"] = "g/2/*"
    runs = [isotrain.run(fields, backend="torch-ddp", replicas=count) for count in (1, 2)]
    start = isotrain.run(fields | {"epochs": None, "steps": 1}, backend="torch-ddp", replicas=1)
    for name, array in runs[0].weights.items():
        np.testing.assert_allclose(runs[1].weights[name], array, rtol=0, atol=1e-12, err_msg=name)
        assert np.array_equal(array, start.weights[name]) == name.startswith("g.0"), name


@pytest.mark.parametrize("backend", ["torch-ddp", param("tf-mirrored", features=True)])
def test_the_measured_plan_names_weights_of_no_update(backend: str) -> None:
    fields = spec(MODELS["portable"])
    plan = isotrain.measured_plan(fields, backend=backend, replicas=2)
    assert not any("fit no update" in note for note in plan.notes)
    fields["updates"]["critic"]["weights"] = "d/*/kernel"
    plan = isotrain.measured_plan(fields, backend=backend, replicas=2)
    (note,) = (note for note in plan.notes if "fit no update" in note)
    assert note.endswith("are not trained: d/d_hidden/bias, d/d_out/bias")


def test_the_check_finds_shared_weights_and_updates_that_never_come() -> None:
    fields = spec(MODELS["native"], ignore=["ISO1", "ISO4"])
    assert not isotrain.check(fields, backends="torch-ddp", replicas=1).findings
    fields["updates"]["critic"]["weights"] = "*"
    fields["updates"]["generator"]["every"] = 9
    found = isotrain.check(fields, backends="torch-ddp", replicas=1).findings
    assert [(each.code, each.field, each.detail) for each in found] == [
        ("ISO219", "updates.generator", "the run has 8 steps"),
        ("ISO306", "updates", "g.0.weight, g.0.bias, g.2.weight, g.2.bias"),
    ]
