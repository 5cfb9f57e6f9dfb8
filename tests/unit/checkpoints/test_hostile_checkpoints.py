"""A checkpoint names code, and nobody runs it: only what a person names makes a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.in_process import command

import isotrain
from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.checkpoints.folder import CheckpointFolder, checkpoint_at
from isotrain.core.checkpoints.safetensors_file import SafetensorsFile, write_safetensors
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.state import FORMS
from isotrain.core.errors import IsotrainError, PlanError, SpecError
from isotrain.core.session.checkpointing.resume_check import SavedRun, changes
from isotrain.core.session.weights.weight_readers import open_weights
from isotrain.core.spec.loading import load_spec

pytestmark = pytest.mark.usefixtures("reference")

WEIGHTS = {"head/kernel": np.arange(12.0).reshape(4, 3), "head/bias": np.arange(3.0)}
SAMPLES = np.ones((2, 4))
TARGETS = {"saved-model": "out", "keras": "out.keras", "keras-weights": "out.weights.h5"}
TARGETS |= {"torch": "out.pt", "onnx": "out.onnx"}


@pytest.fixture
def planted(tmp_path: Path) -> Checkpoint:
    """Names `os:system`, and a module that does harm when it is imported, in all places that name code."""
    harm = tmp_path / "harm.py"
    harm.write_text(f"open({str(tmp_path / 'HARM')!r}, 'w').close()\ndata = loss = None\n")
    spec = own_spec() | {
        "model": {"numpy": "os:system"},
        "model_args": {"command": f"touch {tmp_path / 'HARM'}"},
        "data": f"{harm}:data",
        "loss": f"{harm}:loss",
        "plugins": ["isotrain.testing.reference", str(harm)],
    }
    plan = {"backend": "reference", "framework": "numpy", "strategy": "data-parallel"}
    plan |= {"global_batch_size": 2, "launcher": "local", "replicas": 1}
    run = {"format": 1, "trainer_state": {"step": 1}, "spec": spec, "plan": plan}
    run |= {"versions": {}, "replicas_differ": False}
    state = {name: TensorPart(value) for name, value in WEIGHTS.items()}
    folder = CheckpointFolder(tmp_path / "planted" / "checkpoints")
    found = folder.save(1, sections={"state": state}, run=run)
    for place in (Path(folder.location), Path(found.location)):
        write_safetensors(place / "weights.safetensors", state)
        for name, fields in (("spec.json", spec), ("plan.json", plan)):
            (place / name).write_text(json.dumps(fields))
    return found


@pytest.fixture
def unharmed(tmp_path: Path) -> Callable[[], bool]:
    return lambda: not (tmp_path / "HARM").exists()


Place = Callable[[Checkpoint], Any]
PLACES: dict[str, Place] = {
    "object": lambda checkpoint: checkpoint,
    "path": lambda checkpoint: checkpoint.location,
    "folder": lambda checkpoint: Path(checkpoint.location).parent,
    "folder of the folder": lambda checkpoint: Path(checkpoint.location).parents[1],
    "URL": lambda checkpoint: f"file://{checkpoint.location}",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_cannot_make_predict_or_export_import_a_model(
    planted: Checkpoint, unharmed: Callable[[], bool], tmp_path: Path, place: str
) -> None:
    run = PLACES[place](planted)
    with pytest.raises(SpecError, match=r"Pass the spec that was run, as spec=\.\.\., or --spec"):
        isotrain.predict(run, SAMPLES)
    for form in TARGETS.keys() & set(FORMS):
        with pytest.raises(SpecError, match="is not taken at its word"):
            isotrain.export(run, tmp_path / TARGETS[form], to=form, data=SAMPLES)
    isotrain.export(run, tmp_path / "out.safetensors")
    found = SafetensorsFile(tmp_path / "out.safetensors").read_all()
    np.testing.assert_array_equal(found["head/kernel"], WEIGHTS["head/kernel"])
    assert unharmed()


def test_every_form_of_export_is_tried() -> None:
    assert {*TARGETS, "safetensors"} == set(FORMS)


@pytest.mark.parametrize("place", ["path", "folder", "folder of the folder"])
def test_a_checkpoint_cannot_make_a_command_import_a_model(
    planted: Checkpoint, unharmed: Callable[[], bool], tmp_path: Path, place: str
) -> None:
    run = str(PLACES[place](planted))
    np.save(tmp_path / "x.npy", SAMPLES)
    for words in (
        ("predict", run, "--data", "x.npy", "--output", "y.npy"),
        ("export", run, "--output", "out.keras"),
        ("checkpoint", "export", run, "--output", "out.keras"),
    ):
        done = command(*words, folder=tmp_path)
        assert done.returncode == ExitCode.USAGE
        assert "--spec" in done.stderr
    done = command("resume", run, folder=tmp_path)
    assert done.returncode == ExitCode.USAGE
    assert "no run directory" in done.stderr
    assert unharmed()


def test_a_run_directory_gives_no_spec_for_files_below_it(
    planted: Checkpoint, unharmed: Callable[[], bool]
) -> None:
    """A sender of a checkpoint may send a folder around it."""
    around = Path(planted.location).parents[1]
    for name in ("spec.json", "plan.json"):
        (around / name).write_bytes((Path(planted.location) / name).read_bytes())
    for run in (planted.location, Path(planted.location).parent):
        with pytest.raises(SpecError, match="is not taken at its word"):
            isotrain.predict(run, SAMPLES)
        with pytest.raises(PlanError, match="no run directory"):
            isotrain.predict(around, SAMPLES, spec=run)
    assert unharmed()


def test_a_checkpoint_cannot_make_resume_import_a_model(
    planted: Checkpoint, unharmed: Callable[[], bool], tmp_path: Path
) -> None:
    for run in (planted.location, Path(planted.location).parent):
        for spec in (None, own_spec()):
            with pytest.raises(PlanError, match="no run directory"):
                isotrain.resume(run, spec=spec)
        own = tmp_path / f"own-{Path(run).name}"
        with pytest.raises(IsotrainError, match="it is of another run"):
            isotrain.run(own_spec(), backend="reference", output=own, resume=run)
    assert unharmed()


def test_only_the_weights_of_a_checkpoint_are_read(
    planted: Checkpoint, unharmed: Callable[[], bool]
) -> None:
    for place in (planted.location, str(Path(planted.location).parents[1])):
        found = open_weights(place, mock.Mock(spec=ReplicaGroup))
        assert {name: array.tolist() for name, array in found.items()} == {
            name: array.tolist() for name, array in WEIGHTS.items()
        }
    assert unharmed()


def own_spec() -> dict[str, Any]:
    """What the person trains, whose plugins are not the checkpoint's."""
    return {
        "model": {"numpy": "integration.test_predict:network"},
        "data": "integration.test_predict:data",
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 1.0},
        "global_batch_size": 2,
        "epochs": 1,
    }


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Checkpoint of a run between two averages of local SGD."""
    folder = tmp_path_factory.mktemp("sound") / "saved"
    with opened() as session:
        session.step(next(session.batches()))
        session.save(folder)
    return checkpoint_at(folder)


def opened() -> isotrain.Session:
    spec = own_spec() | {"strategy": {"name": "local-sgd", "options": {"every": 4}}}
    return isotrain.open_session(spec, backend="reference", replicas=1)


Edit = Callable[[dict[str, Any]], None]


def put(way: str, value: Any) -> Edit:
    """Sets a field of a run.json, by the names on the way to it."""

    def edit(run: dict[str, Any]) -> None:
        *outer, last = way.split(".")
        for name in outer:
            run = run[name]
        run[last] = value

    return edit


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"a": found}
    return found


def forged(checkpoint: Checkpoint, edit: Edit) -> Checkpoint:
    """The checkpoint with another run.json, whose checksum is right."""
    run = json.loads(json.dumps(checkpoint.run))
    edit(run)
    sections = {
        name: {key: TensorPart(array) for key, array in checkpoint.read(name).items()}
        for name in checkpoint.sections()
    }
    folder = CheckpointFolder(Path(checkpoint.location).parents[1] / "forged")
    return folder.save(checkpoint.step, sections=sections, run=run)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("plan", value) for value in ({}, [], None, "plan")),
        *(("plan.replicas", value) for value in (0, -1, 2**64, "2", None, True)),
        *(
            ("plan.device_mesh", value)
            for value in ([], {"stage": 0}, {"stage": "2"}, {"data": 2**63})
        ),
        *(("plan.processes", value) for value in ({}, [1], "coordinator")),
        *(("plan.backend", value) for value in (None, ["reference"])),
        *(("spec", value) for value in ({}, None, [], {"optimizer": "sgd"})),
        *(("trainer_state.step", value) for value in (0, -1, 2, 2**63, "1", None)),
        *(("trainer_state.rate_factor", value) for value in ("fast", None)),
        *(("trainer_state.notes", value) for value in ([], "notes")),
        ("trainer_state.stream_state", {"epoch": 0}),
        *(("strategy_values", value) for value in ([], None, 3)),
        *(("versions", value) for value in (None, {"isotrain": 1})),
        ("replicas_differ", "no"),
        ("unknown", 1),
    ],
)
def test_the_record_of_a_run_is_validated_by_field(
    sound: Checkpoint, field: str, value: Any
) -> None:
    with pytest.raises(IsotrainError, match=r"run\.json: .*" + field.partition(".")[0]) as told:
        SavedRun(forged(sound, put(field, value)))
    assert str(Path(sound.location).parents[1]) in str(told.value)


def test_a_valid_record_is_accepted(sound: Checkpoint) -> None:
    assert SavedRun(forged(sound, put("versions", {}))).trainer_state.step == 1


@pytest.mark.parametrize("values", [{}, {"steps": 1}])
def test_unknown_strategy_state_is_refused(sound: Checkpoint, values: dict[str, Any]) -> None:
    with opened() as session:
        session.restore(sound.location)
        place = forged(sound, put("strategy_values", values)).location
        with pytest.raises(
            IsotrainError, match=f"{place}: strategy 'local-sgd' could not load its state"
        ):
            session.restore(place)


def test_a_deeply_nested_spec_is_refused(sound: Checkpoint) -> None:
    deep = forged(sound, put("versions", {}))
    deep.run["spec"]["data_args"] = nested(5000)
    with pytest.raises(IsotrainError, match=r"run\.json: spec: it is nested too deeply"):
        changes(SavedRun(deep), load_spec(own_spec()), mock.Mock(spec=Plan))
