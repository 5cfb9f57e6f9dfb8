"""A program with several optimizers beside a run of a spec whose named updates are these."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.in_process import command

pytestmark = pytest.mark.examples
PARTS = """
import numpy as np


def data():
    draw = np.random.default_rng(0)
    return draw.normal(size=(48, 3)).astype("float32"), draw.normal(size=(48, 4)).astype("float32")


def model():
    from torch import nn

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.g = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
            self.d = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    return Pair()


def critic(model, batch):
    noise, real = batch
    return (model.d(real)[:, 0] - 1) ** 2 + model.d(model.g(noise))[:, 0] ** 2


def generator(model, batch):
    return (model.d(model.g(batch[0]))[:, 0] - 1) ** 2
"""
PROGRAM = """
import sys

import torch
from parts import critic, data, generator, model

how = sys.argv[1]
torch.manual_seed(1)
pair = model()
critics = torch.optim.SGD(pair.d.parameters(), lr=0.1, momentum=0.9)
generators = torch.optim.Adam(pair.g.parameters(), lr=0.01, eps=1e-7)
noise, real = map(torch.from_numpy, data())
order = list(range(0, 48, 12))
if how == "shuffled":
    order[1:3] = order[2:0:-1]


def update(optimizer, objective, batch):
    optimizer.zero_grad()
    objective(pair, batch).mean().backward()
    optimizer.step()


for step, start in enumerate(order):
    batch = noise[start : start + 12], real[start : start + 12]
    turns = [(critics, critic), (generators, generator)]
    if how == "together":
        for optimizer, objective in turns:
            optimizer.zero_grad()
        for part, (_, objective) in zip((pair.d, pair.g), turns):
            objective(pair, batch).mean().backward(inputs=list(part.parameters()))
        for optimizer, _ in turns:
            optimizer.step()
        continue
    if how == "turned":
        turns.reverse()
    update(*turns[0], batch)
    if how != "rare" or step % 2:
        update(*turns[1], batch)
"""
SPEC = """
model: {torch: "parts.py:model"}
data: parts.py:data
updates:
  critic:
    objective: parts.py:critic
    weights: d.*
    optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
  generator:
    objective: parts.py:generator
    weights: g.*
    optimizer: {name: adam, lr: 0.01, epsilon: 1.0e-7}
global_batch_size: 12
epochs: 1
shuffle: false
threads: 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the spec, and with a trace of each way to train the program."""
    made = tmp_path_factory.mktemp("programs")
    (made / "parts.py").write_text(PARTS)
    (made / "train.py").write_text(PROGRAM)
    (made / "spec.yaml").write_text(SPEC)
    for how in ("right", "rare", "together", "turned", "shuffled"):
        start = (sys.executable, "-m", "isotrain", "trace", "--output", how, "--", sys.executable)
        done = subprocess.run([*start, "train.py", how], cwd=made, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "not recorded" not in done.stderr
    return made


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("right",), "AGREE: spec.yaml and right train alike in 8 steps"),
        (("rare", "--set", "updates.generator.every=2"), "alike in 6 steps"),
        (("right", "--steps", "2"), "alike in 4 steps"),
        (("right", "--set", "updates.critic.optimizer.lr=0.2"), "lr is 0.2, and 0.1 in the"),
        (("right", "--set", "updates.generator.optimizer.lr=0.02"), "lr is 0.02, and 0.01 in the"),
        (("shuffled",), "the samples come in another order"),
        (("together",), "computes the gradients of several optimizers before"),
        (("turned",), "the optimizers take turns in another order"),
    ],
)
def test_each_optimizer_is_the_update_of_its_weights(
    folder: Path, words: tuple[str, ...], told: str
) -> None:
    name, *options = words
    where = ("--backend", "torch-ddp", "--replicas", "2")
    found = command("parity", name, "spec.yaml", *options, *where, folder=folder)
    assert told in found.stdout, found.stdout + found.stderr
    assert found.returncode == (0 if "alike" in told else 6)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("updates.critic.weights=[d.*, g.0.*]", "updates.generator.weights=g.2.*"),
            "expected an update of the spec for each optimizer of the program",
        ),
        (
            ("updates.critic.weights=['*']", "updates.generator.weights=['*']"),
            "updates critic and generator train the same weights",
        ),
    ],
)
def test_what_cannot_be_matched_is_refused(folder: Path, words: tuple[str, ...], told: str) -> None:
    options = [part for word in words for part in ("--set", word)]
    found = command(
        "parity", "right", "spec.yaml", *options, "--backend", "torch-ddp", folder=folder
    )
    assert told in found.stderr, found.stdout + found.stderr
    assert found.returncode not in (0, 6)
