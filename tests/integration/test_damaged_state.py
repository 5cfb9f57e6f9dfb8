"""State that no optimizer has made: refused by the name of the slot and of the checkpoint, or begun anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration import native_going_on

import isotrain
from isotrain.core.checkpoints.finding import checkpoint_at
from isotrain.core.checkpoints.folder import CheckpointFolder
from isotrain.core.checkpoints.parts import TensorPart
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


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[isotrain.Session]:
    """Has taken two steps, and saved where it was."""
    spec = native_going_on.spec()
    with isotrain.open_session(spec, backend="torch-ddp") as opened:
        for batch, _ in zip(opened.batches(), range(2), strict=False):
            opened.step(batch)
        opened.notes["folder"] = str(tmp_path_factory.mktemp("saved"))
        opened.save(opened.notes["folder"])
        yield opened


def changed(session: isotrain.Session, folder: Path, slot: str, value: Any) -> str:
    """The session's checkpoint with one tensor replaced; None leaves it out."""
    saved = checkpoint_at(session.notes["folder"])
    sections = {}
    for section in saved.sections():
        tensors = saved.read(section)
        kind = "random" if slot.startswith("random") else "optimizer"
        if any(name.startswith(kind) for name in tensors):
            tensors = {name: array for name, array in tensors.items() if name != slot}
            tensors |= {} if value is None else {slot: value}
        sections[section] = {name: TensorPart(array) for name, array in tensors.items()}
    return CheckpointFolder(folder).save(saved.step, sections=sections, run=saved.run).location


@pytest.mark.parametrize("what", WRONG)
def test_what_no_optimizer_makes_is_refused_by_name(
    what: str, session: isotrain.Session, tmp_path: Path
) -> None:
    slot, value = WRONG[what]
    place = changed(session, tmp_path, slot, value)
    with pytest.raises(IsotrainError) as refused:
        session.restore(place)
    assert place in str(refused.value)
    assert slot.rpartition("/")[0].removeprefix("optimizer/") in str(refused.value)


def test_the_same_is_refused_where_no_slot_is_there_yet(session: isotrain.Session) -> None:
    weights = len(session.read_state(["trainable"]))
    session.write_state({"optimizer/without_slots": np.ones(weights, bool)})
    for what in ("a slot of another shape", "a table for a count", "an unknown slot"):
        slot, value = WRONG[what]
        with pytest.raises(IsotrainError, match=slot.rpartition("/")[0]):
            session.write_state({slot: value})


def test_a_slot_that_is_missing_begins_anew(session: isotrain.Session, tmp_path: Path) -> None:
    weights = len(session.read_state(["trainable"]))
    session.write_state({"optimizer/without_slots": np.ones(weights, bool)})
    session.restore(changed(session, tmp_path, MOMENT, None))
    session.step(next(session.batches()))
