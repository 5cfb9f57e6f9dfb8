"""Every example, run as a person runs it: as a program of its own, in an empty folder."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pickle
import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.in_process import command, script
from integration.session_specs import digits_for_one

import isotrain
from isotrain.core.cli.app import parser
from isotrain.core.session.session import Session
from isotrain.core.spec.loading import load_spec
from isotrain.testing import digits
from isotrain.testing.reference.adapter import Reference

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 200.0
"""More than any example takes on a busy machine, so that one that hangs is noticed."""

Importer = Callable[[str], ModuleType]


def execute(folder: Path, *command: str | Path, code: int = 0) -> str:
    """Runs Python with arguments in a folder; gives what it printed, its errors too if it failed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if code == 0 else done.stdout + done.stderr


def example(folder: Path, name: str, *arguments: str | Path) -> str:
    """Runs an example in this process, in a folder that it makes for itself."""
    folder.mkdir(parents=True)
    done = script(EXAMPLES / name, *map(str, arguments), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_digits_at_hand_are_those_of_the_package(request: pytest.FixtureRequest) -> None:
    expected = digits.images()
    standins = request.getfixturevalue("digits_at_hand")
    datasets = importlib.import_module("sklearn.datasets")
    assert Path(datasets.__file__).is_relative_to(standins)
    images, labels = datasets.load_digits(return_X_y=True)
    np.testing.assert_array_equal(images / 16, expected[0])
    np.testing.assert_array_equal(labels, expected[1])


def result(folder: Path) -> dict[str, Any]:
    """What the only run in a folder left there."""
    (path,) = folder.glob("runs/*/result.json")
    fields: dict[str, Any] = json.loads(path.read_text())
    return fields


def on(backend: str, replicas: int = 2) -> tuple[str, ...]:
    return "--backend", backend, "--replicas", str(replicas)


def losses(fields: dict[str, Any]) -> np.ndarray:
    return np.array(isotrain.read_result(fields["run_directory"]).history.loss)


# --- digits --------------------------------------------------------------------------------------


@pytest.mark.examples
def test_digits_learn_within_two_epochs(tmp_path: Path) -> None:
    """The example runs as a program of its own."""
    printed = execute(tmp_path, EXAMPLES / "digits.py", *on("torch-ddp", 1), "--epochs", "2")
    found = result(tmp_path)
    assert found["metrics"]["validation_accuracy"] > 0.9
    assert f"final loss {found['final_loss']:.8f}" in printed


@pytest.mark.examples
@pytest.mark.usefixtures("few_digits")
def test_digits_give_the_same_losses_under_every_backend(
    tmp_path: Path, examples: Importer
) -> None:
    curves = {}
    for backend in examples("demo").BACKENDS:
        example(tmp_path / backend, "digits.py", *on(backend), "--epochs", "2")
        found = result(tmp_path / backend)
        assert (found["plan"]["backend"], found["plan"]["replicas"]) == (backend, 2)
        assert "validation_accuracy" in found["metrics"]
        curves[backend] = losses(found)
    assert len(curves) == 5
    for backend, curve in curves.items():
        assert len(curve) == 2 * 2
        np.testing.assert_allclose(curve, curves["torch-ddp"], rtol=1e-4, err_msg=backend)


def test_the_yaml_file_is_the_spec_of_the_script(examples: Importer) -> None:
    given = load_spec(EXAMPLES / "digits.yaml").to_dict()
    script = examples("digits").spec.to_dict()
    for field in ("model", "data"):
        assert Path(given[field]).name == f"digits.py:{field}"
        script[field] = given[field]
    assert given == script


@pytest.mark.examples
@pytest.mark.usefixtures("digits_at_hand")
def test_the_yaml_file_runs_from_the_command_line(tmp_path: Path) -> None:
    asked = ["run", str(EXAMPLES / "digits.yaml"), *on("torch-ddp"), "--json", "--set", "epochs=1"]
    last = json.loads(command(*asked, folder=tmp_path).stdout.splitlines()[-1])
    assert last["metrics"]["validation_accuracy"] > 0.8


@pytest.mark.examples
@pytest.mark.usefixtures("digits_at_hand")
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_native_digits(tmp_path: Path, backend: str) -> None:
    example(tmp_path / "run", "digits_native.py", *on(backend), "--epochs", "3")
    found = result(tmp_path / "run")
    assert len(losses(found)) == 3 * 24
    assert found["metrics"]["validation_accuracy"] > 0.9


@pytest.mark.examples
@pytest.mark.usefixtures("digits_at_hand")
def test_an_own_loop_prints_the_same_under_two_frameworks(tmp_path: Path) -> None:
    texts = [
        example(tmp_path / backend, "digits_own_loop.py", *on(backend))
        for backend in ("torch-ddp", "tf-mirrored")
    ]
    assert texts[0] == texts[1]
    epochs, last = texts[0].splitlines()[:-1], texts[0].splitlines()[-1]
    assert float(last.split()[-1]) == max(float(line.split()[-1]) for line in epochs) > 0.95
    assert len(epochs) < 20


def test_the_own_loop_page_is_up_to_date(examples: Importer) -> None:
    page = (EXAMPLES.parent / "docs" / "own-loop.md").read_text(encoding="utf-8")
    assert inspect.getsource(examples("digits_own_loop").train) in page
    public = {name for name in vars(Session) if not name.startswith("_")}
    public |= {"group", "notes", "plan", "rank", "run_directory", "spec", "stopwatch"}
    missing = {name for name in public if f"session.{name}" not in page}
    assert not missing
    named = set(re.findall(r"session\.([a-z_]+)", page))
    assert named <= public


# --- fine-tuning -----------------------------------------------------------------------------------


@pytest.mark.examples
@pytest.mark.usefixtures("digits_at_hand")
def test_fine_tuning_beats_training_from_scratch(tmp_path: Path) -> None:
    printed = example(tmp_path / "run", "fine_tuning.py", *on("torch-ddp", 1))
    tuned, from_nothing = map(float, re.findall(r"validation accuracy (\S+)", printed)[-2:])
    assert tuned > from_nothing + 0.05
    assert "6 are frozen: features_edges/kernel" in printed


# --- the text transformer ------------------------------------------------------------------------


@pytest.mark.examples
def test_the_transformer_beats_token_frequencies(tmp_path: Path, examples: Importer) -> None:
    example(tmp_path / "run", "text_transformer.py", *on("torch-ddp", 1), "--steps", "30")
    found = result(tmp_path / "run")
    entropy = examples("text_transformer").unigram_entropy()
    assert found["metrics"]["validation_loss"] < entropy - 0.2


# --- CIFAR-10 ------------------------------------------------------------------------------------

FILES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
PER_FILE = 2
IMAGES = dict.fromkeys(FILES, PER_FILE) | {"test_batch": 5 * PER_FILE}
"""As many to evaluate on as to train on: frameworks trace anew for every size."""
Batch = tuple[np.ndarray, list[int]]


def cifar_batches() -> dict[str, Batch]:
    """Images as the files hold them, uint8 [images, 3072]: red, green, blue planes; and labels."""
    random = np.random.Generator(np.random.PCG64(5))
    return {
        name: (
            random.integers(0, 256, (count, 3072), dtype=np.uint8),
            random.integers(0, 10, count).tolist(),
        )
        for name, count in IMAGES.items()
    }


def binary(pixels: np.ndarray, labels: list[int]) -> bytes:
    return b"".join(
        bytes([label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True)
    )


def python3_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({b"labels": labels, b"data": pixels, b"filenames": [b"a.png"]}, 4)


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """Byte for byte the kind of pickle that the original files are: Python 2's, protocol 2."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def numbers(*values: int) -> bytes:
        return b"".join(b"J" + struct.pack("<i", value) for value in values)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + numbers(0, 1) + b"\x87R"
    dtype += b"(" + numbers(3) + text(b"|") + b"NNN" + numbers(-1, -1, 0) + b"tb"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    made += numbers(0) + b"\x85" + text(b"b") + b"\x87R"
    state = b"(" + numbers(1) + numbers(*pixels.shape) + b"\x86" + dtype
    state += b"\x89" + text(pixels.tobytes()) + b"tb"
    listed = b"](" + numbers(*labels) + b"e"
    named = text(b"batch_label") + text(b"training batch 1 of 5")
    named += text(b"labels") + listed + text(b"data") + made + state
    return b"\x80\x02}(" + named + b"u."


def write_cifar(folder: Path, encode: Callable[..., bytes], suffix: str = "") -> Path:
    folder.mkdir()
    for name, batch in cifar_batches().items():
        (folder / (name + suffix)).write_bytes(encode(*batch))
    return folder


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Importer:
    """Imports modules of the examples folder by name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.mark.parametrize(
    ("encode", "suffix"), [(binary, ".bin"), (python2_pickle, ""), (python3_pickle, "")]
)
def test_cifar_is_read_in_every_form(
    tmp_path: Path, examples: Importer, encode: Callable[..., bytes], suffix: str
) -> None:
    folder = write_cifar(tmp_path / "cifar", encode, suffix)
    train, test = examples("cifar10_data").load(folder)
    batches = cifar_batches()
    assert train[0].shape == (5 * PER_FILE, 32, 32, 3)
    assert train[0].dtype == np.uint8
    assert train[1].tolist() == [x for name in FILES[:5] for x in batches[name][1]]
    pixels = batches["data_batch_2"][0]
    for plane in range(3):  # one pixel of the second image of the second file
        assert train[0][PER_FILE + 1, 3, 7, plane] == pixels[1, plane * 1024 + 3 * 32 + 7]
    np.testing.assert_array_equal(
        test[0][..., 0].reshape(IMAGES["test_batch"], -1), batches["test_batch"][0][:, :1024]
    )
    assert test[1].tolist() == batches["test_batch"][1]


class Malicious:
    """Writes a file when it is unpickled the usual way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "it ran")


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_runs_code_is_refused(
    tmp_path: Path, examples: Importer, protocol: int
) -> None:
    folder = write_cifar(tmp_path / "cifar", python2_pickle)
    proof = tmp_path / "proof"
    attack = pickle.dumps({b"data": Malicious(proof), b"labels": [1]}, protocol)
    (folder / "data_batch_3").write_bytes(attack)
    data = examples("cifar10_data")
    with pytest.raises(data.Cifar10Error, match=r"data_batch_3.*refused"):
        data.load(folder)
    assert not proof.exists()
    pickle.loads(attack)  # noqa: S301  # the attack is real: opened the usual way, it does run
    assert proof.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c__builtin__\ngetattr\n.",
        b"cnumpy\nload\n.",
        pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [0, 1]}, 4),
        pickle.dumps({b"data": np.zeros((2, 3072), np.float32), b"labels": [0, 1]}, 4),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, 4),
        pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, 4),
        pickle.dumps({b"labels": [0]}, 4),
        pickle.dumps([1, 2]),
        python2_pickle(*cifar_batches()["test_batch"])[:5000],
        b"",
    ],
)
def test_other_pickles_are_refused(tmp_path: Path, examples: Importer, content: bytes) -> None:
    folder = write_cifar(tmp_path / "cifar", python3_pickle)
    (folder / "test_batch").write_bytes(content)
    data = examples("cifar10_data")
    with pytest.raises(data.Cifar10Error, match="test_batch: "):
        data.load(folder)


def test_a_damaged_binary_file_is_refused(tmp_path: Path, examples: Importer) -> None:
    folder = write_cifar(tmp_path / "cifar", binary, ".bin")
    with (folder / "data_batch_1.bin").open("ab") as file:
        file.write(b"\0")
    data = examples("cifar10_data")
    with pytest.raises(data.Cifar10Error, match="no multiple of 3073"):
        data.load(folder)


def test_a_missing_or_incomplete_folder_shows_the_layout(tmp_path: Path) -> None:
    script = EXAMPLES / "cifar10_resnet50v2.py"
    missing = execute(tmp_path, script, "--data", "nowhere", code=2)
    assert "there is no folder 'nowhere'" in missing
    folder = write_cifar(tmp_path / "cifar", binary, ".bin")
    (folder / "data_batch_4.bin").unlink()
    incomplete = execute(tmp_path, script, "--data", folder, code=2)
    assert "lacks data_batch_4.bin" in incomplete
    for text in (missing, incomplete):
        assert all(name in text for name in ("cifar-10-batches-bin/", "data_batch_1.bin"))
        assert "Traceback" not in text


@pytest.mark.examples
def test_cifar_trains_alike_under_two_frameworks(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "data", python2_pickle)
    sizes = ("--image-size", "32", "--batch", str(5 * PER_FILE))
    options = ["--data", folder, *sizes, "--epochs", "1"]
    first_losses = []
    for backend in ("torch-ddp", "tf-mirrored"):
        example(tmp_path / backend, "cifar10_resnet50v2.py", *on(backend, 1), *options)
        # a second step would be recorded on torch, which takes longer than all the rest
        (loss,) = losses(result(tmp_path / backend))
        first_losses.append(loss)
    assert np.isfinite(first_losses).all()
    assert first_losses[1] == pytest.approx(first_losses[0], rel=1e-3)


# --- the README ----------------------------------------------------------------------------------


@pytest.mark.examples
def test_parity_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """A reader's first steps: the model of `isotrain init` with one more layer, and a difference."""
    readme = (EXAMPLES.parent / "README.md").read_text()
    shown = readme.partition("```text\ntorch-ddp@2: difference\n")[2].partition("```")[0]
    assert command("init", "spirals", folder=tmp_path).returncode == 0
    model = tmp_path / "spirals" / "model.py"
    layer = '            layers.Dense(32, activation="tanh"),\n'
    more = f"{layer}            layers.BatchNormalization(),\n"
    model.write_text(model.read_text().replace(layer, more, 1))
    done = command(
        "parity", "train.yaml", *on("torch-ddp", 1)[:2], "--replicas", "1,2", folder=model.parent
    )
    lines = [line.removesuffix("...").rstrip() for line in shown.splitlines()]
    assert len(lines) == 7
    assert [line for line in lines if line not in done.stdout] == []


# --- the demo ------------------------------------------------------------------------------------


@pytest.mark.examples
@pytest.mark.usefixtures("few_digits")
def test_the_demo_compares_its_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples: Importer
) -> None:
    """It compares backends of one framework; the digits run under all backends in another test."""
    monkeypatch.setattr(isotrain, "compare", functools.partial(isotrain.compare, run_limit=0.1))
    backends = ("torch-ddp", "horovod-torch")
    asked = ("--json", "--epochs", "2", "--replicas", "2", "--backends", *backends)
    found = json.loads(example(tmp_path / "run", "demo.py", *asked))
    cells = found["cells"]
    assert [cell["name"] for cell in cells] == [f"{backend}@2" for backend in backends]
    assert cells[0]["loss_difference"] == 0
    assert all(cell["loss_difference"] < 1e-4 for cell in cells)
    assert all(0 < cell["metrics"]["validation_accuracy"] < 1 for cell in cells)
    assert found["agree"]
    read = json.loads(Path(found["folder"], "comparison.json").read_text())
    few_steps = 2 * 2
    assert [len(cell["losses"]) for cell in read["cells"]] == [few_steps] * 2, "those of all steps"


@pytest.mark.slow
def test_an_epoch_of_the_demo_is_one_of_the_digits(examples: Importer) -> None:
    images = len(examples("digits").data().train[0])
    steps = -(-images // examples("digits").spec.global_batch_size)
    assert steps == examples("demo").STEPS_PER_EPOCH


@pytest.fixture
def brief_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is in NumPy, whose processes start fast, and its speed is measured briefly."""
    fields = digits.spec(adapter=Reference(), plugins=["isotrain.testing.reference"])
    monkeypatch.setitem(sys.modules, "digits", SimpleNamespace(spec=load_spec(fields)))
    monkeypatch.setattr(isotrain, "compare", functools.partial(isotrain.compare, run_limit=0.1))


@pytest.mark.examples
@pytest.mark.usefixtures("without_plots", "brief_demo")
def test_a_failed_cell_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = digits.spec(
        adapter=Reference(), plugins=["isotrain.testing.reference"], data=digits_for_one
    )
    monkeypatch.setitem(sys.modules, "digits", SimpleNamespace(spec=load_spec(fields)))
    asked = ("--epochs", "1", "--replicas", "1", "2", "--backends", "reference")
    done = script(EXAMPLES / "demo.py", *asked, folder=tmp_path)
    printed = done.stdout + done.stderr
    assert done.returncode == 1, printed
    assert "reference@2: " in printed
    assert "1 of 2 cells failed" in " ".join(printed.split())
    (page,) = tmp_path.glob("comparisons/*/report.html")
    assert str(page.resolve()) in printed


@pytest.mark.usefixtures("brief_demo")
def test_an_unknown_backend_is_told_before_the_demo_begins(tmp_path: Path) -> None:
    asked = ("--backends", "torch-ddpp", "reference")
    done = script(EXAMPLES / "demo.py", *asked, folder=tmp_path)
    assert done.returncode == 1
    assert "unknown backend 'torch-ddpp'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_command_that_the_demo_suggests_is_valid(examples: Importer) -> None:
    demo = examples("demo")
    shown = demo.thorough_comparison(["torch-ddp", "tf-mirrored"], [1, 2])
    program, *arguments = shlex.split(shown)
    assert Path(program).resolve() == Path(sys.executable).with_name("isotrain").resolve()
    options = parser().parse_args(arguments)
    assert (options.command, options.backend) == ("compare", ["torch-ddp", "tf-mirrored"])
    assert (options.replicas, options.repeats) == ([1, 2], 3)
    assert load_spec(options.spec).name == "digits"


def test_the_demo_detects_different_curves(examples: Importer) -> None:
    demo = examples("demo")

    def cell(name: str, apart: float | None, status: str = "finished") -> SimpleNamespace:
        return SimpleNamespace(name=name, loss_difference=apart, status=status)

    cells = [cell("a@1", 0.0), cell("b@2", 0.01)]
    agree, text = demo.conclusion(cells)
    assert not agree
    assert "do NOT agree: they are at most 1.0e-02 apart (b@2)" in text
    agree, text = demo.conclusion([*cells[:1], cell("c@1", 2e-6)])
    assert agree
    assert "at most 2.0e-06 apart (c@1)" in text
    agree, text = demo.conclusion([*cells[:1], cell("c@1", None, "failed")])
    assert not agree
    assert "1 of 2 cells failed" in text
