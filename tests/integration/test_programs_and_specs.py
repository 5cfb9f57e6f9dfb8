"""A program's trace beside a run of a spec, and beside the program of another framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.in_process import command

from isotrain.analysis.program_trace.comparison import compare
from isotrain.analysis.program_trace.reading import ProgramTrace, read_trace

pytestmark = pytest.mark.examples
ZOO = Path(__file__).parent / "program_zoo"
TORCH = """
import sys

import numpy as np
import torch
from portable_spec import data

torch.manual_seed(1)
pictures, labels = data()
inputs = torch.from_numpy(pictures.transpose(0, 3, 1, 2).copy())
convolution, head = torch.nn.Conv2d(2, 6, 3), torch.nn.Linear(6, 3)
pool, flatten = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
model = torch.nn.Sequential(convolution, torch.nn.Tanh(), pool, flatten, head)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
np.savez("start.npz", *(parameter.detach().numpy() for parameter in model.parameters()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for start in range(0, 48, 12):
    rows = slice(start, start + 12)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs[rows]), torch.from_numpy(labels[rows]))
    (loss * float(sys.argv[1])).backward()
    optimizer.step()
"""
KERAS = """
import sys

import keras
import numpy as np
from portable_spec import data, model

net = model()
kernel, bias, *head = np.load("start.npz").values()
net.set_weights([kernel.transpose(2, 3, 1, 0), bias, head[0].T, head[1]])
net.compile(
    keras.optimizers.SGD(float(sys.argv[1]), momentum=0.9),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
net.fit(*data(), batch_size=12, shuffle=False, verbose=0)
"""
SPEC = """
model: portable_spec:model
data: portable_spec:data
loss: {name: sparse_categorical_crossentropy, from_logits: true}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
global_batch_size: 12
epochs: 1
shuffle: false
threads: 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two traces of a program of torch: `right`, and `fifth` of which gradients are a fifth."""
    made = tmp_path_factory.mktemp("programs")
    (made / "portable_spec.py").write_text((ZOO / "portable_spec.py").read_text(encoding="utf-8"))
    (made / "spec.yaml").write_text(SPEC)
    for name, factor in (("fifth", "0.2"), ("right", "1")):
        trace(made, name, TORCH, factor)
    return made


def trace(folder: Path, name: str, program: str, *words: str) -> ProgramTrace:
    """Traces a program, given as text."""
    (folder / f"train_{name}.py").write_text(program)
    start = (sys.executable, "-m", "isotrain", "trace", "--output", name, "--", sys.executable)
    made = subprocess.run(
        [*start, f"train_{name}.py", *words], cwd=folder, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert "not recorded" not in made.stderr
    return read_trace(folder / name)


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (("right", "spec.yaml"), "AGREE: spec.yaml and right train alike in 4 steps"),
        (("fifth", "spec.yaml"), "gradients are multiplied by 5"),
        (("right", "spec.yaml", "--set", "shuffle=true"), "samples come in another order"),
        (
            ("spec.yaml", "right", "--set", "optimizer.lr=0.2"),
            "lr is 0.1, and 0.2 in the reference",
        ),
    ],
)
def test_a_program_of_torch_beside_a_run_of_a_portable_spec(
    folder: Path, order: tuple[str, ...], told: str
) -> None:
    """On two replicas, whose layers have other names and kernels another order of axes."""
    found = command("parity", *order, "--backend", "torch-ddp", "--replicas", "2", folder=folder)
    assert told in found.stdout, found.stdout + found.stderr
    assert "by shape and order: pictures/convolution/kernel is 0.weight" in found.stdout
    assert found.returncode == (0 if told.startswith("AGREE") else 6)


def test_programs_of_two_frameworks(folder: Path) -> None:
    """Weights are matched by shape and order; another rate is found too."""
    right, fifth = read_trace(folder / "right"), read_trace(folder / "fifth")
    keras = trace(folder, "by_keras", KERAS, "0.1")
    found = compare(right, keras)
    assert found.agree, found.differences
    assert "by shape and order: pictures/convolution/kernel is 0.weight" in found.notes[0]
    assert "optimizer state" in found.notes[1]
    assert compare(fifth, keras).causes[0].code == "gradients-scaled"
    assert compare(keras, fifth).causes[0].code == "gradients-scaled"
    found = compare(right, trace(folder, "fast", KERAS, "0.2"))
    assert found.causes[0].code == "learning-rate"


def test_what_a_spec_cannot_be_compared_with_is_told(folder: Path) -> None:
    (folder / "other.yaml").write_text(SPEC.replace("portable_spec:model", "other:model"))
    (folder / "other.py").write_text(
        "from portable_spec import CLASSES\n\ndef model():\n    import keras\n"
        "    flat = keras.layers.Flatten()\n"
        "    return keras.Sequential([keras.Input((6, 6, 2)), flat, keras.layers.Dense(CLASSES)])\n"
    )
    found = command("parity", "right", "other.yaml", "--backend", "torch-ddp", folder=folder)
    assert found.returncode != 0
    assert "the model's weights are not the reference's" in found.stderr
    both = "torch-ddp,tf-mirrored"
    found = command("parity", "right", "spec.yaml", "--backend", both, folder=folder)
    assert "expected one run of spec.yaml" in found.stderr
