"""What loops log: recorded for the step it belongs to, as it was then, on every framework, also resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.session_specs import launch, spec

import isotrain
from isotrain.core.results.result import read_history

pytestmark = pytest.mark.usefixtures("reference")


def logging(session: isotrain.Session) -> list[float]:
    session.log({"before": 1})
    losses = []
    for batch in session.batches():
        loss = session.step(batch)
        session.log({"copy": loss, "squares": np.float32(batch.step**2)})
        if batch.step % 2:
            session.log({"odd": batch.step}, step=batch.step - 1)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    "backend",
    [
        "reference",
        *(
            pytest.param(name, marks=pytest.mark.features)
            for name in ("torch-ddp", "tf-multiworker")
        ),
    ],
)
def test_scalars_are_recorded_for_their_step(tmp_path: Path, backend: str) -> None:
    losses = launch(logging, tmp_path, 2, backend)
    history = read_history(tmp_path / "run")
    steps = range(len(losses))
    assert history.loss == losses
    assert history.scalars == {
        "before": {0: 1.0},
        "copy": dict(enumerate(losses)),
        "squares": {step: step**2 for step in steps},
        "odd": {step - 1: step for step in steps if step % 2},
    }


@pytest.mark.features
def test_a_tensor_is_recorded_as_it_was(tmp_path: Path) -> None:
    def changing(session: isotrain.Session) -> None:
        import torch

        total = torch.zeros(1, requires_grad=True)
        for batch in session.batches():
            session.step(batch)
            session.log({"total": total * 2, "leaf": total})
            with torch.no_grad():
                total += 1

    launch(changing, tmp_path, 1, "torch-ddp")
    scalars = read_history(tmp_path / "run").scalars
    assert scalars["leaf"] == {step: step for step in range(9)}
    assert scalars["total"] == {step: 2 * step for step in range(9)}


def test_a_resumed_run_has_every_scalar_once(tmp_path: Path) -> None:
    def in_parts(session: isotrain.Session) -> None:
        if session.notes.get("tries", 0) == 0:
            for batch in session.batches():
                session.step(batch)
                session.log({"try": 0})
                if batch.step == 3:
                    session.notes["tries"] = 1
                    session.save()
                if batch.step == 6:
                    break
            session.restore()
        for batch in session.batches():
            session.step(batch)
            session.log({"try": 1})

    launch(in_parts, tmp_path)
    scalars = read_history(tmp_path / "run").scalars
    assert scalars["try"] == {step: float(step > 3) for step in range(9)}


@pytest.mark.parametrize(
    ("scalars", "step", "message"),
    [
        ({"loss": 1.0}, None, "expected a name other than .*loss"),
        ({"": 1.0}, None, "expected a name"),
        ({"kl": np.zeros(2)}, None, r"'kl': expected a number or a scalar tensor, .* \[2\]"),
        ({"kl": 1.0}, 2, "expected a step from 0 to the next one, 0, received 2"),
    ],
)
def test_what_cannot_be_recorded_is_refused(scalars: Any, step: int | None, message: str) -> None:
    with (
        isotrain.open_session(spec(), backend="reference") as session,
        pytest.raises(isotrain.IsotrainError, match=message),
    ):
        session.log(scalars, step)
