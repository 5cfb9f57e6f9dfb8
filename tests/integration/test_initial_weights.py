"""Runs that start with weights from elsewhere: every form, every backend, parts of them, frozen layers."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import isotrain
from isotrain.adapters.weight_files import load_weight_arrays
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.safetensors_file import write_safetensors
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.session.weights import weight_readers
from isotrain.core.session.weights.weight_readers import open_weights
from isotrain.testing.reference.layers import BatchNormalization, Dense
from isotrain.testing.reference.network import Network
from isotrain.testing.reference.replica_group import ReferenceGroup

pytestmark = pytest.mark.usefixtures("reference")

GENERATOR = np.random.default_rng(3)
BACKBONE = {
    "backbone/kernel": GENERATOR.normal(size=(4, 6)) / 2,
    "backbone/bias": GENERATOR.normal(size=6) / 2,
    "backbone_norm/moving_mean": GENERATOR.normal(size=6) / 4,
    "backbone_norm/moving_variance": GENERATOR.uniform(0.5, 2.0, size=6),
}
OTHER_HEAD = {"head/kernel": np.ones((6, 9)), "head/bias": np.ones(9)}


def network() -> Network:
    dense, head = Dense(4, 6, "tanh", name="backbone"), Dense(6, 3, name="head")
    return Network([dense, BatchNormalization(6, name="backbone_norm"), head])


def portable() -> Any:
    import keras
    from keras import layers

    inputs = keras.Input((4,))
    hidden = layers.Dense(6, activation="tanh", name="backbone")(inputs)
    normal = layers.BatchNormalization(center=False, scale=False, name="backbone_norm")(hidden)
    return keras.Model(inputs, layers.Dense(3, name="head")(normal))


def data() -> Any:
    generator = np.random.default_rng(2)
    return generator.standard_normal((21, 4)), generator.integers(0, 3, 21)


def spec(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": {"numpy": network, "torch": portable, "tensorflow": portable},
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "precision": "float64",
        "global_batch_size": 7,
        "epochs": 2,
        "threads": 1,
        "device": "cpu",
    }
    return fields | changes


run = functools.partial(isotrain.run, on_event=lambda event: None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a backbone, and of a head for other classes."""
    path = tmp_path_factory.mktemp("source") / "pretrained.npz"
    np.savez(path, **BACKBONE, **OTHER_HEAD)  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def tuned(source: Path, tmp_path_factory: pytest.TempPathFactory) -> isotrain.RunResult:
    folder = tmp_path_factory.mktemp("tuned") / "run"
    wanted = {"source": source, "include": "backbone*", "freeze": ["backbone*"]}
    return run(spec(initial_weights=wanted), backend="reference", output=folder)


def test_frozen_weights_stay_and_others_are_trained(tuned: isotrain.RunResult) -> None:
    for name, value in BACKBONE.items():
        np.testing.assert_array_equal(tuned.weights[name], value)
    assert np.abs(tuned.weights["head/bias"]).min() > 0


@pytest.mark.parametrize(
    ("backend", "replicas"),
    [
        ("reference", 3),
        pytest.param("torch-ddp", 2, marks=pytest.mark.slow),
        pytest.param("tf-mirrored", 2, marks=pytest.mark.slow),
        pytest.param("horovod-torch", 2, marks=pytest.mark.slow),
        pytest.param("horovod-tf", 2, marks=pytest.mark.slow),
    ],
)
def test_every_framework_and_horovod_start_and_end_alike(
    source: Path, tuned: isotrain.RunResult, backend: str, replicas: int, tmp_path: Path
) -> None:
    wanted = {"source": source, "include": "backbone*", "freeze": ["backbone*"]}
    found = run(
        spec(initial_weights=wanted),
        backend=backend,
        replicas=replicas,
        output=tmp_path / "run",
    )
    np.testing.assert_allclose(found.history.loss, tuned.history.loss, rtol=1e-12)
    for name, value in tuned.weights.items():
        if name in BACKBONE:
            np.testing.assert_array_equal(found.weights[name], value)
        np.testing.assert_allclose(found.weights[name], value, rtol=1e-11, atol=1e-13)


def test_the_report_says_what_happened_to_each_weight(
    tuned: isotrain.RunResult, source: Path
) -> None:
    report = json.loads((tuned.run_directory / "initial-weights.json").read_text())
    for name in ("loaded", "frozen"):
        assert sorted(report[name]) == sorted(BACKBONE)
    assert report == {
        "source": str(source),
        "loaded": report["loaded"],
        "kept": ["head/kernel", "head/bias"],
        "left_over": [*OTHER_HEAD],
        "frozen": report["frozen"],
    }
    notes = [each for each in tuned.plan["notes"] if each.startswith("initial_weights")]
    assert notes[0] == f"initial_weights: 4 of 6 weights are from {source}"
    assert "2 start as the model makes them: head/kernel, head/bias" in notes[1]
    assert len(notes) == 4


def functions() -> dict[str, np.ndarray]:
    return {**BACKBONE, "head/kernel": np.ones((6, 3)), "head/bias": np.zeros(3)}


def first_state(session: isotrain.Session) -> dict[str, np.ndarray]:
    return session.read_state(["trainable", "non-trainable"])


def started(initial: Any, **changes: Any) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = isotrain.launch(
        first_state,
        spec(initial_weights=initial, **changes),
        backend="reference",
        replicas=2,
        on_event=lambda event: None,
    )[1]
    return found


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs leave their folders here."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_weights_come_from_runs_checkpoints_and_functions(
    tuned: isotrain.RunResult, tmp_path: Path
) -> None:
    parts = as_inputs_and_targets(functions())
    slots = {f"optimizer/{name}": part for name, part in parts.items()}
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.save(5, sections={"state": parts | slots}, run={})
    write_safetensors(tmp_path / "file.safetensors", parts)
    for source in (functions, "file.safetensors", "checkpoints", "checkpoints/step-000000005"):
        for name, value in started(source).items():
            np.testing.assert_array_equal(value, functions()[name])
    for run_of in (tuned, tuned.run_directory):
        for name, value in started(run_of).items():
            np.testing.assert_array_equal(value, tuned.weights[name])


def test_initial_weights_are_read_in_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each portion is read after the one before is written."""
    sizes, real = [], ReferenceGroup.write_state

    def noting(group: ReferenceGroup, state: Any, **options: Any) -> None:
        sizes.append([array.nbytes for array in state.values()])
        real(group, state, **options)

    write_safetensors(tmp_path / "file.safetensors", as_inputs_and_targets(functions()))
    monkeypatch.setattr(weight_readers, "PORTION_BYTES", 100)
    monkeypatch.setattr(ReferenceGroup, "write_state", noting)
    given = spec(initial_weights="file.safetensors")
    with isotrain.open_session(given, backend="reference") as session:
        found = first_state(session)
    for name, value in functions().items():
        np.testing.assert_array_equal(found[name], value)
    assert len(sizes) > 2
    assert all(len(portion) == 1 or sum(portion) <= 100 for portion in sizes)


def as_inputs_and_targets(weights: dict[str, np.ndarray]) -> dict[str, TensorPart]:
    return {name: TensorPart(array) for name, array in weights.items()}


def test_a_resumed_run_does_not_need_the_source(tmp_path: Path) -> None:
    source, folder = tmp_path / "pretrained.npz", tmp_path / "run"
    np.savez(source, **BACKBONE)  # type: ignore[arg-type]
    wanted = {"source": source, "include": "backbone*", "freeze": ["backbone*"]}
    given = spec(initial_weights=wanted, checkpoint={"every_epochs": 1})
    run(given | {"epochs": 1}, backend="reference", output=folder)
    told = (folder / "initial-weights.json").read_text()
    source.unlink()
    found = isotrain.resume(folder, spec=given, on_event=lambda event: None)
    assert (folder / "initial-weights.json").read_text() == told
    for name, value in BACKBONE.items():
        np.testing.assert_array_equal(found.weights[name], value)


def test_names_and_axes_are_mapped() -> None:
    names = {
        "backbone/kernel": {"name": "0.weight", "axes": "IO->OI"},
        "backbone/bias": "0.bias",
        "backbone_norm/moving_mean": "1.mean",
        "backbone_norm/moving_variance": "1.variance",
    }
    found = started({"source": native, "map": {"numpy": names}, "exclude": "head*"})
    for name, value in BACKBONE.items():
        np.testing.assert_array_equal(found[name], value)


def native() -> dict[str, np.ndarray]:
    kernel, bias, mean, variance = BACKBONE.values()
    return {"0.weight": kernel.T, "0.bias": bias, "1.mean": mean, "1.variance": variance}


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({}, r"Only in the model: head/kernel, head/bias\. Only in the source: none"),
        ({"include": "head*"}, "Only in the model: head/kernel, head/bias"),
        ({"include": "hed*", "exclude": "head*"}, "'hed\\*' fits none of the names"),
        ({"exclude": ["head*", "backbone/*"], "freeze": "tail*"}, "freeze: 'tail\\*' fits none"),
        ({"exclude": "head*", "freeze": "*"}, "nothing is left to train"),
        (
            {"exclude": "head*", "map": {"numpy": {"backbone/kernel": "k"}}},
            "Only in the model: b",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(wanted: dict[str, Any], told: str) -> None:
    with pytest.raises(isotrain.RunFailedError, match=told):
        started({"source": backbone, **wanted})


def backbone() -> dict[str, np.ndarray]:
    return BACKBONE


def test_an_unused_name_or_another_shape_is_refused(source: Path) -> None:
    with pytest.raises(isotrain.RunFailedError, match=r"head/kernel: \(6, 9\), here \(6, 3\)"):
        started(source)
    with pytest.raises(isotrain.RunFailedError, match="Only in the source: tail"):
        started(with_tail)


def with_tail() -> dict[str, np.ndarray]:
    return functions() | {"tail": np.zeros(1)}


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"include": "a"}, "source: missing"),
        ({}, "source: missing"),
        (3, "source: got 3"),
        ({"source": "x.npz", "map": {"torch": {"a": 3}}}, "map: .* expected a name map"),
    ],
)
def test_the_spec_is_checked_before_anything_starts(wanted: Any, told: str) -> None:
    with pytest.raises(isotrain.SpecError, match=told):
        isotrain.TrainingSpec(**spec(initial_weights=wanted))


def test_a_missing_or_unknown_file_is_refused() -> None:
    with pytest.raises(isotrain.RunFailedError, match="there is no file or folder"):
        started("missing.npz")
    Path("weights.txt").write_text("none")
    with pytest.raises(
        isotrain.RunFailedError, match=r"reads weights from \.safetensors and \.npz"
    ):
        started("weights.txt")


def test_onnx_has_weights_by_name_and_reaches_no_other_file(tmp_path: Path) -> None:
    file, secret = tmp_path / "model.onnx", tmp_path / "secret"
    kernel, half = BACKBONE["backbone/kernel"], np.ones(3, ml_dtypes.bfloat16)
    tensors = [numpy_helper.from_array(kernel, "kernel"), numpy_helper.from_array(half, "half")]
    file.write_bytes(onnx_file(tensors))
    found = load_weight_arrays(file, None)
    np.testing.assert_array_equal(found["kernel"], kernel)
    assert (found["half"].dtype, found["half"].tolist()) == (np.float32, [1.0, 1.0, 1.0])
    secret.write_bytes(bytes(kernel.nbytes))
    onnx.external_data_helper.set_external_data(tensors[0], "secret")
    tensors[0].ClearField("raw_data")
    for content in (onnx_file(tensors), b"nonsense"):
        file.write_bytes(content)
        with pytest.raises(isotrain.IsotrainError, match=re.escape(f"initial_weights: {file}")):
            load_weight_arrays(file, None)


def onnx_file(tensors: list[Any]) -> bytes:
    graph = onnx.helper.make_graph([], "weights", [], [], initializer=tensors)
    content: bytes = onnx.helper.make_model(graph).SerializeToString()
    return content


def with_dropout() -> Any:
    import keras
    from keras import layers

    inputs = keras.Input((4,))
    hidden = layers.Dense(5, name="hidden")(inputs)
    normal = layers.Dropout(0.5, name="noise")(layers.BatchNormalization(name="norm")(hidden))
    return keras.Model(inputs, layers.Dense(3, name="head")(normal))


def files_of_the_framework(session: isotrain.Session) -> list[str]:
    """Reads the files of Keras and of torch that a model of this very framework has written."""
    from isotrain.plugin import keras_private

    with keras_private.without_tensorflow():  # which takes as long to import as all else here
        return files_read(session)


def files_read(session: isotrain.Session) -> list[str]:
    """Their names."""
    model, folder = session.group.model, session.run_directory  # type: ignore[attr-defined]
    for batch in session.batches():
        session.step(batch)
    everything = session.read_state(["trainable", "non-trainable"])
    weights = {name: value for name, value in everything.items() if value.dtype.kind == "f"}
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    files = ["model.keras", "model.weights.h5"]
    if session.plan.framework == "torch":
        import torch

        torch.save(model.state_dict(), folder / "model.pt")
        files.append("model.pt")
    before = session.read_state()
    for name in files:
        found = open_weights(str(folder / name), session.group)
        assert weights.keys() <= found.keys() <= everything.keys(), (name, sorted(found))
        for each, value in weights.items():
            np.testing.assert_array_equal(found[each], value, err_msg=f"{name}: {each}")
    for each, value in session.read_state().items():
        np.testing.assert_array_equal(value, before[each])
    found = open_weights(functools.partial(copy_of, folder / "model.keras"), session.group)
    assert weights.keys() <= found.keys() <= everything.keys(), sorted(found)
    for each, value in weights.items():
        np.testing.assert_array_equal(found[each], value, err_msg=each)
    return files


def copy_of(file: Path) -> Any:
    """A Keras model with weights, as an application is that Keras has."""
    import keras

    return keras.models.load_model(file)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_files_of_frameworks_are_read_by_the_models_names(backend: str) -> None:
    changes = {"model": with_dropout, "precision": "float32", "capture": False}
    (found,) = isotrain.launch(
        files_of_the_framework,
        spec(**changes),
        backend=backend,
        replicas=1,
        on_event=lambda event: None,
    )
    assert len(found) >= 2
