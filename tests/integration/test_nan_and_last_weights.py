"""How runs end before their time: a loss that is NaN, and the weights of runs that fail or are ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.signals import heed_signals

import isotrain
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import exit_code_of
from isotrain.core.errors import NotANumberError
from isotrain.core.launching.run_directory.run_directory import last_weights_file
from isotrain.core.session.weights.weights_file import read_weights
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

pytestmark = pytest.mark.usefixtures("reference")

SAMPLES = 12
STEPS = 9
BROKEN = 6
"""The place of the sample that is not finite: in the second step, in the slice of replica 1."""


def network() -> Network:
    return Network([Dense(3, 5, "tanh", name="first"), Dense(5, 1, name="last")])


def data(broken: bool = False) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    inputs = generator.standard_normal((SAMPLES, 3))
    if broken:
        inputs[BROKEN, 1] = np.nan
    return inputs, generator.standard_normal((SAMPLES, 1))


def fails(inputs: Any, targets: Any, random: Any) -> Any:
    """Fails in rank 1 once it sees the last samples, in the third step."""
    if (inputs == data()[0][-1]).all(1).any():
        raise ValueError("planted")
    return inputs, targets


FIELDS: dict[str, Any] = {
    "model": network,
    "data": data,
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": 0.0625},
    "global_batch_size": 4,
    "epochs": 3,
    "shuffle": False,
}


def run(folder: Path, **changes: Any) -> isotrain.RunResult:
    return isotrain.run(
        FIELDS | changes,
        backend="reference",
        replicas=2,
        output=folder / "run",
        on_event=lambda event: None,
    )


def test_a_nan_loss_stops_the_run_and_names_the_data(tmp_path: Path) -> None:
    with pytest.raises(NotANumberError) as failure:
        run(tmp_path, data_args={"broken": True})
    text = str(failure.value)
    assert "the loss of step 1 is NaN" in text
    assert "in the data: inputs in the slice of replica 1 (rank 1)" in text
    assert exit_code_of(failure.value) == ExitCode.NOT_A_NUMBER
    assert last_weights_file(tmp_path / "run") is None, "weights that are NaN are of no use"


def test_a_too_high_rate_is_distinguished_from_broken_data(tmp_path: Path) -> None:
    with pytest.raises(NotANumberError) as failure:
        run(tmp_path, optimizer={"name": "sgd", "lr": 1e30})
    assert "samples of that step are all finite" in str(failure.value)
    assert "4 of 4 weights are not, 'first/kernel' first" in str(failure.value)


def probability_model() -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((3,)), layers.Dense(1, activation="sigmoid")])


def probability_module() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())


def probability_data() -> Any:
    inputs, targets = data(broken=True)
    return inputs, np.clip(targets, 0.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("model", [probability_model, probability_module])
def test_torch_takes_nan_as_a_probability(tmp_path: Path, model: Any, capture: bool) -> None:
    """Its own kernels refuse them, or abort the process on a GPU; the third step is the first replay."""
    changes = {"model": model, "data": probability_data, "loss": "binary_crossentropy"}
    options = {"metrics": ["binary_crossentropy"], "global_batch_size": 2, "capture": capture}
    with pytest.raises(NotANumberError, match=r"the loss of step 3 is NaN.* in the data"):
        isotrain.run(
            FIELDS | changes | options,
            backend="torch-ddp",
            output=tmp_path / "run",
            on_event=lambda event: None,
        )


def three_classes() -> Any:
    from keras import Input, Sequential, layers

    return Sequential([Input((3,)), layers.Dense(3, activation="softmax")])


def four_classes() -> Any:
    return data()[0], np.arange(SAMPLES) % 4


@pytest.mark.slow
def test_a_target_that_is_no_class_is_named(tmp_path: Path) -> None:
    changes = {"model": three_classes, "data": four_classes}
    expected = "'sparse_categorical_crossentropy' got a target .* expected 0 to 2.* Received 3"
    with pytest.raises(isotrain.IsotrainError, match=expected):
        isotrain.run(
            FIELDS | changes | {"loss": "sparse_categorical_crossentropy"},
            backend="torch-ddp",
            output=tmp_path / "run",
            on_event=lambda event: None,
        )


@pytest.mark.slow
@pytest.mark.features
def test_a_step_that_xla_compiles_names_what_it_does_not_check(tmp_path: Path) -> None:
    changes = {"model": three_classes, "data": four_classes, "compile": True}
    expected = r"a target that is no class .*\(the targets of that step are 0 to 3\)"
    with pytest.raises(NotANumberError, match=expected):
        isotrain.run(
            FIELDS | changes | {"loss": "sparse_categorical_crossentropy"},
            backend="tf-mirrored",
            output=tmp_path / "run",
            on_event=lambda event: None,
        )


@pytest.mark.parametrize("action", ["warn", "ignore"])
def test_a_nan_loss_can_be_allowed(tmp_path: Path, action: str) -> None:
    result = run(tmp_path, data_args={"broken": True}, on_nan=action)
    assert len(result.history.loss) == STEPS
    told = (tmp_path / "run" / "events.jsonl").read_text()
    assert ('"warning"' in told) == (action == "warn")


def test_the_weights_survive_a_failure(tmp_path: Path) -> None:
    with pytest.raises(isotrain.RunFailedError, match="planted") as failure:
        run(tmp_path, transform=fails)
    kept = last_weights_file(tmp_path / "run")
    assert kept is not None
    assert f"the weights so far: {kept}" in str(failure.value)
    steps = int(kept.name.split("-")[2])
    assert 0 < steps <= 2
    until_then = run(tmp_path / "again", steps=steps, epochs=None)
    found = read_weights(kept)
    for name, value in until_then.weights.items():
        np.testing.assert_array_equal(found[name], value)


class Late(dict[str, Any]):
    """What rank 1 returns: asks for long after rank 0 has done all of its work whether that still lives."""

    def items(self) -> Any:
        while not self["returned by rank 0"].exists():
            time.sleep(0.01)
        time.sleep(0.5)
        return {"rank 0": psutil.Process(self["pid"]).status()}.items()


def last_of_all(session: isotrain.Session) -> Any:
    told = session.run_directory / "pid"
    if session.is_main:
        told.write_text(str(os.getpid()))
    session.barrier()
    returned = session.run_directory / "rank-0-returned.json"
    return (
        None
        if session.is_main
        else Late({"returned by rank 0": returned, "pid": int(told.read_text())})
    )


def test_no_process_ends_before_all_have_finished(tmp_path: Path) -> None:
    _, found = isotrain.launch(
        last_of_all, FIELDS, backend="reference", replicas=2, output=tmp_path / "run"
    )
    assert found["rank 0"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def text_data() -> Any:
    return [[b"a"], [b"b"]], [0, 1]


def test_an_error_that_names_the_field_shows_no_internal_frames(tmp_path: Path) -> None:
    with pytest.raises(
        isotrain.RunFailedError, match="expected numbers, booleans or text"
    ) as failure:
        run(tmp_path, data=text_data)
    assert "Traceback" not in str(failure.value)
    assert "isotrain/core" not in str(failure.value).partition("logs:")[0]
    log = (tmp_path / "run" / "rank-1.log").read_text() or (
        tmp_path / "run" / "rank-0.log"
    ).read_text()
    assert "isotrain/core" in log, "all of it is in the log"


def test_an_error_in_user_code_shows_user_frames(tmp_path: Path) -> None:
    with pytest.raises(isotrain.RunFailedError, match="planted") as failure:
        run(tmp_path, transform=fails)
    assert 'raise ValueError("planted")' in str(failure.value)


def test_an_epochs_loss_is_the_mean_over_its_samples(tmp_path: Path) -> None:
    """The last batch of five, five and two samples counts least."""
    result = run(tmp_path, global_batch_size=5, epochs=2)
    for epoch, found in enumerate(result.history.epochs):
        losses = result.history.loss[3 * epoch : 3 * epoch + 3]
        assert found["loss"] == pytest.approx(np.average(losses, weights=[5, 5, 2]), rel=1e-12)


def test_results_and_plans_are_printed_in_a_line(tmp_path: Path) -> None:
    result = run(tmp_path, steps=1, epochs=None)
    assert repr(result) == (
        f"<RunResult final loss {result.final_loss:.6g} in {result.run_directory}>"
    )
    plan = isotrain.plan(
        {
            "model": network,
            "data": data,
            "loss": "mse",
            "optimizer": "adam",
            "global_batch_size": 4,
            "steps": 1,
        },
        backend="reference",
        replicas=2,
    )
    shown = "<Plan of run on reference:tcp, 2 replicas, data-parallel, global batch 4>"
    assert repr(plan) == shown


def test_a_finished_run_leaves_its_final_weights_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    assert [path.name for path in (tmp_path / "run").glob("weights*")] == ["weights.safetensors"]


SCRIPT = """
import time
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network
def model(): return Network([Dense(3, 1)])
def data():
    import numpy as np
    return np.ones((4, 3)), np.ones((4, 1))
"""
SPEC = (
    "{model: 'net.py:model', data: 'net.py:data', optimizer: {name: sgd, lr: 0.001},"
    " loss: mean_squared_error, global_batch_size: 4, steps: 100000000}"
)


@pytest.mark.slow
def test_the_weights_survive_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SCRIPT)
    (tmp_path / "spec.yaml").write_text(SPEC)
    command = [sys.executable, "-m", "isotrain", "run", "spec.yaml", "--backend", "reference"]
    options = ["--replicas=2", "--plugin=isotrain.testing.reference", "--output=run"]
    process = subprocess.Popen(
        [*command, *options],
        cwd=tmp_path,
        env=os.environ,
        preexec_fn=heed_signals,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "steps.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
        assert process.returncode == ExitCode.INTERRUPTED
    finally:
        process.kill()
        process.wait()
    kept = last_weights_file(tmp_path / "run")
    assert kept is not None
    assert said.splitlines()[-4:] == [
        "isotrain: interrupted",
        f"run directory: {tmp_path / 'run'}",
        f"the weights so far: {kept}",
        "There is no checkpoint to go on from: the spec's `checkpoint` says when to save one.",
    ]
    *_, last = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(last)["text"].startswith("the run was interrupted")
    assert (tmp_path / "run" / "rank-0.log").read_text().splitlines()[-1].startswith("isotrain: ")
    assert all(np.isfinite(value).all() for value in read_weights(kept).values())
