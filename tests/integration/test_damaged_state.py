"""State that no optimizer has made: refused by the name of the slot and of the checkpoint, or begun anew."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.isolated import run_isolated
from integration import native_resume_models

import isotrain
from isotrain.core.checkpoints.folder import CheckpointFolder, checkpoint_at
from isotrain.core.checkpoints.tensor_part import TensorPart
from isotrain.core.errors import IsotrainError

pytestmark = pytest.mark.slow

MOMENT = "optimizer/head.bias/exp_avg"
WRONG: dict[str, tuple[str, np.ndarray]] = {
    "a slot of another shape": (MOMENT, np.zeros(2, np.float32)),
    "a table for a count": ("optimizer/head.bias/step", np.zeros((2, 2), np.float32)),
    "an unknown slot": ("optimizer/head.bias/moment", np.zeros(3, np.float32)),
    "flags of other weights": ("optimizer/without_slots", np.ones(9, bool)),
    "a slot of no weight": ("optimizer/tail.bias/exp_avg", np.zeros(3, np.float32)),
    "a generator of no numbers": ("random/torch", np.zeros(5, np.uint8)),
    "another type of generator state": ("random/torch", np.zeros(5056, np.float32)),
}
OF_THE_SHAPE = ("a slot of another shape", "a table for a count", "an unknown slot")
SAVED = "saved"
NOT_REFUSED = ""


def changed(folder: Path, slot: str, value: Any) -> str:
    """The saved checkpoint with one tensor replaced; None leaves it out."""
    saved = checkpoint_at(str(folder / SAVED))
    sections = {}
    for section in saved.sections():
        tensors = saved.read(section)
        kind = "random" if slot.startswith("random") else "optimizer"
        if any(name.startswith(kind) for name in tensors):
            tensors = {name: array for name, array in tensors.items() if name != slot}
            tensors |= {} if value is None else {slot: value}
        sections[section] = {name: TensorPart(array) for name, array in tensors.items()}
    copies = CheckpointFolder(folder / str(len(list(folder.iterdir()))))
    return copies.save(saved.step, sections=sections, run=saved.run).location


def refusal(function: Callable[..., None], *arguments: Any) -> str:
    """The text of the error; `NOT_REFUSED` where there is none."""
    try:
        function(*arguments)
    except IsotrainError as error:
        return str(error)
    return NOT_REFUSED


def try_all(session: isotrain.Session, *, folder: Path) -> dict[str, Any]:
    """Takes two steps, saves, and tries every damaged copy of it; what each is refused with."""
    for batch, _ in zip(session.batches(), range(2), strict=False):
        session.step(batch)
    session.save(folder / SAVED)
    places = {what: changed(folder, *WRONG[what]) for what in WRONG}
    restored = {what: (place, refusal(session.restore, place)) for what, place in places.items()}
    begins = {"optimizer/without_slots": np.ones(len(session.read_state(["trainable"])), bool)}
    session.write_state(begins)
    written = {what: refusal(session.write_state, dict([WRONG[what]])) for what in OF_THE_SHAPE}
    session.write_state(begins)
    session.restore(changed(folder, MOMENT, None))
    session.step(next(session.batches()))
    anew = session.read_state()[MOMENT]
    return {"restored": restored, "written": written, "anew": anew}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("damaged")
    work = functools.partial(try_all, folder=folder)
    spec = native_resume_models.spec()
    return dict(run_isolated(work, spec, "torch-ddp", tmp_path_factory.mktemp("runs") / "run"))


def named(what: str) -> str:
    """The weight, or what else, that is wrong."""
    return WRONG[what][0].rpartition("/")[0]


@pytest.mark.parametrize("what", WRONG)
def test_impossible_optimizer_state_is_refused_by_name(what: str, told: dict[str, Any]) -> None:
    place, text = told["restored"][what]
    assert place in text
    assert named(what).removeprefix("optimizer/") in text


@pytest.mark.parametrize("what", OF_THE_SHAPE)
def test_impossible_optimizer_state_is_refused_before_slots_exist(
    what: str, told: dict[str, Any]
) -> None:
    assert named(what) in told["written"][what]


def test_a_missing_slot_starts_at_its_initial_value(told: dict[str, Any]) -> None:
    assert np.any(told["anew"])
