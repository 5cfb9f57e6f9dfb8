"""The reference backend: fast, without a framework, and equal to what frameworks compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.resume_runs import data
from integration.resume_runs import plain as network

import isotrain
from isotrain.core.errors import PlanError, RunFailedError
from isotrain.testing.reference.layers import Dense, Dropout
from isotrain.testing.reference.network import Network

pytestmark = pytest.mark.usefixtures("reference")

FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "horovod"}


def portable() -> Any:
    import keras
    from keras import layers

    hidden = layers.Dense(8, activation="tanh", name="hidden")
    return keras.Sequential([keras.Input((4,)), hidden, layers.Dense(3, name="head")])


def spec(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": {"numpy": network, "torch": portable},
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "metrics": ["accuracy"],
        "optimizer": {"name": "sgd", "lr": 0.125},
        "precision": "float64",
        "global_batch_size": 7,
        "epochs": 2,
        "threads": 1,
    }
    return fields | changes


def data_of_each(folder: str, kind: str) -> isotrain.DataSet:
    """Other data in the process that comes first: samples, their order, or their number."""
    first, train = True, data().train
    try:
        (Path(folder) / kind).mkdir()
    except FileExistsError:
        first = False
    (inputs, labels), validation = train, data().validation
    order = np.roll(np.arange(30), int(first)) if kind == "order" else np.arange(30 - 3 * first)
    if kind == "validation":
        order, validation = np.arange(30), tuple(part[: 9 - first] for part in validation)
    if kind == "samples":
        order = np.arange(30)
        inputs[-1] += first
    return isotrain.DataSet((inputs[order], labels[order]), validation)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("samples", "rank 1 on .* has other training samples than rank 0, though as many"),
        ("order", "rank 1 on .* has other training samples than rank 0"),
        ("fewer", "rank 1 on .* has (27|30) training samples where rank 0 has (27|30)"),
        ("validation", "rank 1 on .* has (8|9) validation samples where rank 0 has (8|9)"),
    ],
)
def test_processes_that_load_other_data_end_the_run(tmp_path: Path, kind: str, told: str) -> None:
    changes = {"data": data_of_each, "data_args": {"folder": str(tmp_path), "kind": kind}}
    with pytest.raises(RunFailedError, match=told):
        isotrain.run(spec(**changes), backend="reference", replicas=2, output=tmp_path / "run")


class SlowToSave(list[Any]):
    """Whoever saves it takes a while, and then looks whether a process is still there."""

    def __init__(self, other: Path) -> None:
        super().__init__()
        self._other = other

    def __iter__(self) -> Iterator[Any]:
        time.sleep(1.0)
        state = (
            Path(f"/proc/{self._other.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
        )
        yield state != "Z"


def saved_late(session: isotrain.Session) -> Any:
    """Rank 1 is a second behind when it saves what it returns."""
    number = session.run_directory / "rank-0-number"
    if session.is_main:
        number.write_text(str(os.getpid()))
    session.barrier()
    return None if session.is_main else SlowToSave(number)


def quiet_from_the_third_step(session: isotrain.Session) -> None:
    for batch in session.batches():
        if batch.step == 2:
            session.disable_progress_reports()
        session.step(batch)


def run(folder: Path, backend: str, replicas: int = 2, **changes: Any) -> isotrain.RunResult:
    return isotrain.run(
        spec(**changes),
        backend=backend,
        replicas=replicas,
        output=folder / backend,
        on_event=lambda event: None,
    )


EXACT = {"lr": 0.0625, "beta_1": 0.875, "beta_2": 0.96875, "epsilon": 2.0**-20}
"""Numbers that float32 holds: frameworks pass them through it."""
CASES = [
    {
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5, "nesterov": True},
        "clip": {"global_norm": 0.25},
        "schedule": {"name": "step", "every_steps": 3, "factor": 0.5},
    },
    {
        "optimizer": {"name": "adamw", "weight_decay": 0.25, **EXACT},
        "clip": {"norm": 0.125},
        "gradient_accumulation_steps": 2,
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES)
def test_training_equals_that_of_a_framework(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours, theirs = (run(tmp_path, name, **changes) for name in ("reference", "torch-ddp"))
    np.testing.assert_allclose(ours.history.loss, theirs.history.loss, rtol=1e-12)
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-12)
    for name, value in theirs.weights.items():
        own = ours.weights[name.removeprefix("sequential/")]
        np.testing.assert_allclose(own, value, rtol=1e-10, atol=1e-13)


def test_no_process_loads_a_framework(tmp_path: Path) -> None:
    def loaded(session: isotrain.Session) -> list[str]:
        for batch in session.batches():
            session.step(batch)
        session.evaluate()
        return sorted({name.partition(".")[0] for name in sys.modules})

    found = isotrain.launch(
        loaded,
        spec(),
        backend="reference",
        replicas=2,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    for modules in found:
        assert not FRAMEWORKS & {*modules}


def test_any_number_of_replicas_trains_alike_in_float32(tmp_path: Path) -> None:
    one, three = (run(tmp_path / str(n), "reference", n, precision="float32") for n in (1, 3))
    assert one.weights["head/kernel"].dtype == np.float32
    np.testing.assert_allclose(one.history.loss, three.history.loss, rtol=1e-5)


def test_a_random_layer_draws_anew_in_each_step_and_not_in_evaluation(tmp_path: Path) -> None:
    def work(session: isotrain.Session) -> list[Any]:
        before = [session.evaluate()["loss"] for _ in range(2)]
        batch = next(session.batches())
        return [*before, *(float(session.step(batch)) for _ in range(2))]

    found = isotrain.launch(
        work,
        spec(
            model=lambda: Network([Dropout(0.5), Dense(4, 3)]),
            optimizer={"name": "sgd", "lr": 2.0**-40},
        ),
        backend="reference",
        output=tmp_path / "run",
        on_event=lambda event: None,
    )[0]
    assert found[0] == found[1]
    assert abs(found[2] - found[3]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "bfloat16"}, "has float32 and float64, received 'bfloat16'"),
        ({"optimizer": {"name": "lamb", "lr": 0.5}}, "unknown optimizer 'lamb'"),
        ({"device": "gpu"}, "GPU"),
    ],
)
def test_a_plan_refuses_unknown_features(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(isotrain.IsotrainError, match=words):
        isotrain.plan(spec(**changes), backend="reference")
    with pytest.raises(PlanError):
        isotrain.plan(spec(), backend="reference:ring")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": dict}, "the function returned 'dict'; the NumPy backend trains an"),
        ({"metrics": ["auc"]}, "unknown metrics name 'auc'"),
        ({"loss": "hinge"}, "unknown loss name 'hinge'"),
        ({"loss": "sparse_categorical_crossentropy"}, "from_logits: true"),
        ({"loss": None, "objective": lambda model, batch: 1.0}, "it returns"),
    ],
)
def test_a_process_refuses_unsupported_models(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(RunFailedError, match=words):
        run(tmp_path, "reference", 1, **changes)


@pytest.mark.slow
def test_the_command_line_loads_it_as_a_plugin(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from isotrain.testing.reference.layers import Dense\n"
        "from isotrain.testing.reference.network import Network\n"
        "from isotrain.testing.digits import data\n"
        "def model(): return Network([Dense(64, 10)])\n"
    )
    (tmp_path / "spec.yaml").write_text(
        "{model: 'net.py:model', data: 'net.py:data', optimizer: adam, global_batch_size: 64, epochs: 1,\n"
        "loss: {name: sparse_categorical_crossentropy, from_logits: true}, metrics: [accuracy]}\n"
    )
    command = [sys.executable, "-m", "isotrain", "run", "spec.yaml", "--backend", "reference"]
    finished = subprocess.run(
        [*command, "--replicas=2", "--plugin=isotrain.testing.reference"],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert "final loss" in finished.stdout


def test_a_quiet_run_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", logger="isotrain.run")
    fields = spec(epochs=2, checkpoint={"every_epochs": 2})
    isotrain.run(fields, backend="reference", replicas=2, output=tmp_path / "run", quiet=True)
    assert capfd.readouterr() == ("", "")
    lines = [text for name, _, text in caplog.record_tuples if name == "isotrain.run"]
    assert [line.partition(":")[0] for line in lines if line.startswith("epoch")] == [
        "epoch 1/2",
        "epoch 2/2",
    ]
    assert any(line.startswith("checkpoint after step") for line in lines)


def test_no_process_ends_before_all_have_finished(tmp_path: Path) -> None:
    returned = isotrain.launch(
        saved_late, spec(), backend="reference", replicas=2, output=tmp_path, on_event=print
    )
    assert returned == [None, [True]]


def test_steps_before_progress_is_disabled_are_reported(tmp_path: Path) -> None:
    isotrain.launch(
        quiet_from_the_third_step,
        spec(),
        backend="reference",
        replicas=1,
        output=tmp_path,
        on_event=lambda event: None,
    )
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert sum(len(json.loads(line)["losses"]) for line in lines) == 2
