"""Trained models leave isotrain: whoever opens them predicts the same, without it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import jax_install
from helpers.in_process import command
from helpers.isolated import run_isolated
from integration import exported_models

import isotrain
from isotrain.adapters.weight_files import load_weight_arrays
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.safetensors_file import SafetensorsFile
from isotrain.core.contracts.state import ExportForm
from isotrain.core.errors import IsotrainError, SpecError, UnsupportedError
from isotrain.core.session.weights.initial_weights import load_initial_weights
from isotrain.core.session.weights.weights_file import save_weights
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

pytestmark = pytest.mark.usefixtures("reference")

GENERATOR = np.random.default_rng(5)
IMAGES = GENERATOR.standard_normal((21, 6, 6, 1)).astype(np.float32)
LABELS = np.arange(21) % 3

run = functools.partial(isotrain.run, on_event=lambda event: None)


def data() -> Any:
    return IMAGES, LABELS


def spec(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": exported_models.portable,
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "adam", "lr": 0.0625},
        "global_batch_size": 7,
        "epochs": 1,
        "threads": 1,
        "device": "cpu",
        "capture": False,  # what is written is not the record
    }
    return fields | changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of exported models and of the samples to predict."""
    found = tmp_path_factory.mktemp("exported")
    np.save(found / "samples.npy", IMAGES)
    return found


@pytest.fixture(scope="module")
def trained(folder: Path) -> isotrain.RunResult:
    return run(spec(), backend="torch-ddp", output=folder / "run")


@pytest.fixture(scope="module")
def inside(trained: isotrain.RunResult) -> np.ndarray:
    found: np.ndarray = isotrain.predict(trained, IMAGES)
    return found


@pytest.fixture(scope="module")
def by_keras(
    folder: Path, trained: isotrain.RunResult, inside: np.ndarray
) -> dict[str, np.ndarray]:
    """What is to be predicted by what Keras opens, on any framework."""
    assert trained.export(folder / "model.keras") == folder / "model.keras"
    isotrain.export(trained.run_directory, folder / "model.weights.h5", to="keras-weights")
    return {"by_keras": inside, "by_keras_weights": inside}


@pytest.fixture(scope="module")
def native(folder: Path) -> isotrain.RunResult:
    given = spec(model={"torch": exported_models.torch_net})
    return run(given, backend="torch-ddp", output=folder / "native")


def assert_outside(
    folder: Path, keras_backend: str, wanted: Mapping[str, np.ndarray], **variables: str
) -> None:
    """What others predict, in a process of their own; names all that do not as wanted."""
    program = Path(exported_models.__file__)
    done = subprocess.run(
        [sys.executable, program, folder, *wanted],
        env=os.environ | {"KERAS_BACKEND": keras_backend} | variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    faults = "\n".join(filter(None, (fault(folder, *each) for each in wanted.items())))
    assert not faults, faults


def fault(folder: Path, name: str, wanted: np.ndarray) -> str:
    """What is wrong with the predictions of one way; nothing where nothing is."""
    told = folder / f"{name}.fault"
    if told.exists():
        return f"{name}: {told.read_text()}"
    try:
        found = np.load(folder / f"{name}.npy")
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=name)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.features
def test_torch_and_onnx_open_their_exports(
    folder: Path,
    trained: isotrain.RunResult,
    inside: np.ndarray,
    by_keras: dict[str, np.ndarray],
    native: isotrain.RunResult,
) -> None:
    """One program opens portable models and native ones of torch."""
    isotrain.export(trained, folder / "model.pt", to="torch")
    isotrain.export(trained, folder / "model.onnx")
    isotrain.export(native, folder / "native.pt")
    isotrain.export(native, folder / "native.onnx")
    taken = load_weight_arrays(folder / "native.onnx", None)
    for name, weight in native.weights.items():
        if weight.dtype.kind == "f":
            np.testing.assert_array_equal(taken[name], weight, err_msg=name)
    of_native = isotrain.predict(native, IMAGES)
    wanted = {
        **by_keras,
        **dict.fromkeys(("by_keras_on_torch", "by_onnx"), inside),
        **dict.fromkeys(("by_torch", "by_onnx_of_torch"), of_native),
    }
    assert_outside(folder, "torch", wanted)


@pytest.mark.features
def test_keras_opens_exports_on_another_framework(
    folder: Path, trained: isotrain.RunResult, by_keras: dict[str, np.ndarray]
) -> None:
    jax = {
        "PYTHONPATH": str(jax_install.folder()),
        "XLA_FLAGS": " ".join(jax_install.QUICK_TO_COMPILE),
    }
    assert_outside(folder, "jax", by_keras, **jax)


@pytest.mark.features
def test_tensorflow_opens_its_exports(
    folder: Path,
    trained: isotrain.RunResult,
    inside: np.ndarray,
    by_keras: dict[str, np.ndarray],
) -> None:
    """One program opens portable models, wherever they were trained, and native ones of TensorFlow."""
    predicted_by_module = of_module(folder)
    shutil.copytree(folder / "module", folder / "saved")
    isotrain.export(trained, folder / "saved", to="saved-model")  # in place of another
    wanted = {
        **by_keras,
        "by_tensorflow": inside,
        "by_tensorflow_module": predicted_by_module,
        **of_backends(folder, trained),
    }
    assert_outside(folder, "tensorflow", wanted)


def of_module(folder: Path) -> np.ndarray:
    """Predictions of a native model that is exported."""
    module = spec(model={"tensorflow": exported_models.tensorflow_net})
    result = run(module, backend="tf-mirrored", output=folder / "of-module")
    isotrain.export(result, folder / "module", to="saved-model")
    found: np.ndarray = isotrain.predict(result, IMAGES)
    return found


EXPORTED: dict[str, ExportForm] = {
    "tf-mirrored": "keras",
    "tf-multiworker": "keras-weights",
    "horovod-torch": "keras-weights",
    "horovod-tf": "keras",
}
"""What a backend writes is written by Keras, in each form on each framework."""
FILES = {"keras": "model.keras", "keras-weights": "model.weights.h5", "onnx": "model.onnx"}


def of_backends(folder: Path, trained: isotrain.RunResult) -> dict[str, np.ndarray]:
    """Predictions of what each backend exports, by how it is opened."""
    given, wanted = spec(initial_weights=trained), {}
    for backend, form in EXPORTED.items():
        (folder / backend).mkdir()
        work = functools.partial(
            export_and_predict, folder=folder / backend, form=form, samples=IMAGES
        )
        name = f"{backend}/by_{form.replace('-', '_')}"
        wanted[name] = run_isolated(work, given, backend, folder / backend / "run")
    return wanted


def export_and_predict(
    session: isotrain.Session, *, folder: Path, form: ExportForm, samples: np.ndarray
) -> Any:
    session.group.export(form, folder / FILES[form], None)
    return session.predict((samples,))


def test_safetensors_have_the_weights_and_need_no_framework(
    trained: isotrain.RunResult, tmp_path: Path
) -> None:
    isotrain.export(trained, tmp_path / "model.safetensors")
    found = SafetensorsFile(tmp_path / "model.safetensors").read_all()
    assert found.keys() == trained.weights.keys()
    for name, value in trained.weights.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_part_of_the_weights_is_exported(trained: isotrain.RunResult, tmp_path: Path) -> None:
    target = tmp_path / "biases.safetensors"
    first, *others = [name for name in sorted(trained.weights) if name.endswith("bias")]
    trained.export(target, include="*bias", exclude=first.replace("/", "."))
    assert sorted(SafetensorsFile(target).read_all()) == others != []
    run = str(trained.run_directory)
    command("export", run, "--output", str(target), "--include", first, folder=tmp_path)
    assert list(SafetensorsFile(target).read_all()) == [first]
    with pytest.raises(
        SpecError, match=r"export: 'none/\*' matches none of the weights, which are"
    ):
        trained.export(target, include=["*bias", "none/*"])
    with pytest.raises(UnsupportedError, match="keras holds the whole model"):
        trained.export(tmp_path / "model.keras", include="*bias")


def in_sequence() -> Any:
    import keras
    from keras import layers

    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(3)]
    )


@pytest.mark.features
def test_a_sequential_model_runs_under_onnx(tmp_path: Path) -> None:
    import onnxruntime

    samples = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
    own = spec(model=in_sequence, data=(samples, samples[:, :3]), loss="mse")
    work = functools.partial(export_and_predict, folder=tmp_path, form="onnx", samples=samples)
    inside = run_isolated(work, own, "torch-ddp", tmp_path / "run")
    runtime = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = runtime.run(None, {runtime.get_inputs()[0].name: samples})
    np.testing.assert_allclose(found, inside, rtol=1e-5, atol=1e-6)


@pytest.mark.features
def test_formats_that_a_torch_module_lacks(native: isotrain.RunResult, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no backend that is available"):
        isotrain.export(native, tmp_path / "saved", to="saved-model")
    with pytest.raises(isotrain.RunFailedError, match="a torch module has no form 'keras'"):
        isotrain.export(native, tmp_path / "model.keras")
    assert not list(tmp_path.iterdir())


SUFFIXES = {".pt", ".safetensors"}


def tied() -> Any:
    """Two layers with one weight, and a buffer that is not persistent."""
    import torch

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(inputs) * self.scale))

    return Tied()


def load_by_hand(session: isotrain.Session, *, file: Path, samples: np.ndarray) -> Any:
    """Missing and unexpected names of what was trained, and what both modules predict."""
    import safetensors.torch
    import torch

    for batch in session.batches():
        session.step(batch)
    save_weights(session.group, file)
    module = tied()
    found = module.load_state_dict(safetensors.torch.load_file(file), strict=False)
    by_hand = module(torch.from_numpy(samples)).detach().numpy()
    keys = {"missing": found.missing_keys, "unexpected": found.unexpected_keys}
    return keys, by_hand, session.predict((samples,)), tied_weights_taken(session, module)


def tied_weights_taken(session: isotrain.Session, module: Any) -> dict[str, str]:
    """What starts with weights in a file of torch: nothing, if as the module's, or why it is refused."""
    import safetensors.torch
    import torch

    def taken(file: Path) -> str:
        session.write_state({name: np.zeros_like(value) for name, value in trained.items()})
        own = session.spec.replace(initial_weights={"source": file, "exclude": "scale"})
        try:
            load_initial_weights(own, session.plan, session.group, resumes=False)
        except isotrain.SpecError as error:
            return str(error)
        now = session.read_state(["trainable"])
        return ", ".join(name for name, value in trained.items() if (now[name] != value).any())

    trained, whole = session.read_state(["trainable"]), module.state_dict()
    second = {name: value for name, value in whole.items() if name != "first.weight"}
    folder = session.run_directory
    torch.save(whole, folder / "whole.pt")
    torch.save({**whole, "second.weight": whole["second.weight"] + 1}, folder / "different.pt")
    safetensors.torch.save_file(second, folder / "second.safetensors")
    return {file.name: taken(file) for file in folder.iterdir() if file.suffix in SUFFIXES}


@pytest.mark.features
def test_tied_weights_of_torch_are_loaded_as_the_documentation_says(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    own = spec(model={"torch": tied}, data=(samples, samples), loss="mse")
    work = functools.partial(load_by_hand, file=tmp_path / "weights.safetensors", samples=samples)
    keys, by_hand, inside, begun = run_isolated(work, own, "torch-ddp", tmp_path / "run")
    assert keys == {"missing": ["second.weight"], "unexpected": ["scale"]}
    np.testing.assert_array_equal(by_hand, inside)
    refused = begun.pop("different.pt")
    assert "first.weight and second.weight are one weight of the model, and differ" in refused
    assert set(begun.values()) == {""}, begun


def narrow_net() -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(36, 3).bfloat16()

        def forward(self, images: Any) -> Any:
            return self.head(images.flatten(1).bfloat16()).float()

    return Net()


def first_weights(session: isotrain.Session) -> dict[str, np.ndarray]:
    return session.read_state(["trainable"])


@pytest.mark.features
def test_bfloat16_is_exported_and_read_as_bfloat16(tmp_path: Path) -> None:
    native = spec(model={"torch": narrow_net}, optimizer={"name": "sgd", "lr": 0.125})
    result = run(native, backend="torch-ddp", output=tmp_path / "run")
    kept = SafetensorsFile(result.run_directory / "weights.safetensors")
    assert set(kept.dtypes.values()) == {"bfloat16"}
    isotrain.export(result, tmp_path / "narrow.pt")
    begins = native | {"initial_weights": tmp_path / "narrow.pt"}
    found = run_isolated(first_weights, begins, "torch-ddp", tmp_path / "again")
    for name, value in result.weights.items():
        np.testing.assert_array_equal(found[name], value)


def network() -> Network:
    return Network([Dense(4, 3, name="head")])


def test_impossible_exports_are_refused_before_anything_starts(tmp_path: Path) -> None:
    samples = np.zeros((8, 4), np.float32)
    small = spec(model={"numpy": network}, data=(samples, np.zeros(8, np.int64)), optimizer="adam")
    result = run(small, backend="reference", output=tmp_path / "run")
    with pytest.raises(
        UnsupportedError, match="no backend that is available here writes this model"
    ):
        result.export(tmp_path / "model.keras")
    with pytest.raises(IsotrainError, match="does not say the form"):
        result.export(tmp_path / "model")
    with pytest.raises(IsotrainError, match=r"'torch' is written to a file \.pt or \.pth"):
        result.export(tmp_path / "model.keras", to="torch")
    with pytest.raises(IsotrainError, match="Did you mean 'keras'"):
        result.export(tmp_path / "model.keras", to="kera")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    target = tmp_path / "file" / "model.safetensors"
    with pytest.raises(IsotrainError, match=f"{target} cannot be written: [A-Z][a-z ]+. Choose"):
        result.export(target)
    (tmp_path / "file").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_target_folder_is_created_and_removed_if_the_export_fails(
    tmp_path: Path,
) -> None:
    from isotrain.core.results.predict_and_export import atomically_replaced

    target = tmp_path / "new" / "newer" / "model.safetensors"
    with pytest.raises(KeyError), atomically_replaced(target):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with atomically_replaced(target) as new:
        new.write_text("weights")
    assert target.read_text() == "weights"


def test_the_command_writes_a_file(trained: isotrain.RunResult, tmp_path: Path) -> None:
    options = ("--output", "model.safetensors", "--json")
    done = command("export", str(trained.run_directory), *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"output": "model.safetensors"' in done.stdout
    assert (tmp_path / "model.safetensors").is_file()


def test_the_model_of_a_checkpoint_is_exported(tmp_path: Path) -> None:
    plain_run(tmp_path / "run", checkpoint={"every_steps": 1, "keep_last": None})
    saved = CheckpointFolder(tmp_path / "run" / "checkpoints").complete()
    for path, checkpoint in ((tmp_path / "run", saved[-1]), (saved[0].location, saved[0])):
        options = ("--output", "model.safetensors")
        done = command("checkpoint", "export", str(path), *options, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        weights = SafetensorsFile(tmp_path / "model.safetensors").read_all()
        assert weights
        for name, value in checkpoint.read("state", weights).items():
            np.testing.assert_array_equal(weights[name], value)


def other_model() -> Network:
    return Network([Dense(4, 8, "tanh", name="hidden"), Dense(8, 3, name="head")])


def smaller_model() -> Network:
    return Network([Dense(4, 3, name="head")])


def plain_run(folder: Path, **changes: Any) -> isotrain.RunResult:
    inputs = GENERATOR.standard_normal((21, 4))
    given = spec(model={"numpy": smaller_model}, data=lambda: (inputs, LABELS), **changes)
    return run(given, backend="reference", output=folder)


def test_a_folder_with_other_files_is_not_overwritten(tmp_path: Path) -> None:
    from isotrain.core.results.predict_and_export import atomically_replaced

    results = tmp_path / "results"
    results.mkdir()
    (results / "dear.txt").write_text("mine")
    for target in (results, tmp_path / "." / "results" / ".."):
        with pytest.raises(IsotrainError, match="which would be lost"), atomically_replaced(target):
            pass
    assert (results / "dear.txt").read_text() == "mine"


def test_a_changed_model_is_refused(tmp_path: Path) -> None:
    result = plain_run(tmp_path / "run")
    inputs = np.zeros((2, 4))
    changed = spec(model={"numpy": other_model}, data=lambda: (inputs, LABELS[:2]))
    with pytest.raises(IsotrainError, match="it has no weights for"):
        isotrain.predict(result, inputs, spec=changed, backend="reference")
