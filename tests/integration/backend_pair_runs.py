"""Half of a run on every backend, and its other half on every other one, with another number of replicas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import isotrain
from isotrain.core.checkpoints.folder import checkpoint_at
from isotrain.core.launching.run_directory.return_values import save_value
from isotrain.core.plugins import selection
from isotrain.testing.consecutive_sessions import launched_in_turn

BACKENDS = (
    *("torch-ddp", "tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf"),
    "jax-mesh",
)
FIRST = 2
"""Replicas that save; where one session does both parts, it has one. None goes on with as many as saved."""
GOING_ON = {"torch-ddp": 3, "tf-mirrored": 3}
"""How many go on, in several processes and in one. Others go on by themselves: what each process of theirs
reads is no more, and `test_killed_runs_of_strategies_end_as_if_never_killed` has several."""
STOP, STEPS = 3, 5
"""The second epoch has begun."""
EXACT = {"beta_1": 0.875, "beta_2": 0.96875, "epsilon": 2.0**-20}
"""Numbers that float32 holds: frameworks pass them through it."""
UNRECORDED = {"capture": False}
"""To record takes longest on torch, and what travels is the same: it is tried in one case."""
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": {"name": "adamw", "lr": 0.0625, "weight_decay": 0.125, **EXACT}},
    "momentum": {"optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5}, **UNRECORDED},
    "adam": {"optimizer": {"name": "adam", "lr": 0.0625, **EXACT}, **UNRECORDED},
    "loss scale": {
        **UNRECORDED,
        "optimizer": {"name": "adam", "lr": 2.0**-6, **EXACT},
        "precision": "float16",
        "loss_scale": {"initial": 2.0**6, "growth_steps": 3},
    },
}


GOES_ON: dict[str, dict[str, str]] = {
    "torch-ddp": {
        "horovod-torch": "adamw",
        "tf-mirrored": "adamw",
        "tf-multiworker": "adamw",
        "horovod-tf": "adam",
        "jax-mesh": "adamw",
    },
    "horovod-torch": {
        "torch-ddp": "momentum",
        "tf-mirrored": "loss scale",
        "tf-multiworker": "adamw",
        "horovod-tf": "momentum",
        "jax-mesh": "loss scale",
    },
    "tf-mirrored": {
        "torch-ddp": "momentum",
        "horovod-torch": "adamw",
        "tf-multiworker": "adamw",
        "horovod-tf": "momentum",
        "jax-mesh": "adamw",
    },
    "tf-multiworker": {
        "torch-ddp": "adam",
        "horovod-torch": "loss scale",
        "tf-mirrored": "loss scale",
        "horovod-tf": "adam",
        "jax-mesh": "loss scale",
    },
    "horovod-tf": {
        "torch-ddp": "momentum",
        "horovod-torch": "adamw",
        "tf-mirrored": "adamw",
        "tf-multiworker": "adamw",
        "jax-mesh": "momentum",
    },
    "jax-mesh": {
        "torch-ddp": "momentum",
        "horovod-torch": "adamw",
        "tf-mirrored": "loss scale",
        "tf-multiworker": "adamw",
        "horovod-tf": "momentum",
    },
}
"""From which others each backend goes on, and in which case.

Every case goes from each framework of the native backends to the other. JAX has no part in Adam but AdamW's.
"""


def cases(backend: str, part: str) -> list[str]:
    """Cases in which a backend saves, resumes, or does both."""
    saved = {own[backend] for own in GOES_ON.values() if backend in own}
    met = set(GOES_ON[backend].values())
    wanted = {"first": saved, "rest": met, "both": saved | met}[part]
    return [case for case in CASES if case in wanted]


def data() -> tuple[np.ndarray, np.ndarray]:
    """Two global batches in slices of one size, for which frameworks trace once."""
    inputs = np.random.default_rng(2).standard_normal((12, 4))
    return inputs, np.arange(12) % 3


def model() -> Any:
    import keras
    from keras import layers

    hidden = layers.Dense(8, activation="tanh", name="hidden")
    return keras.Sequential([keras.Input((4,)), hidden, layers.Dense(3, name="head")])


def spec(case: str) -> dict[str, Any]:
    fields = {
        "model": model,
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "metrics": ["accuracy"],
        "precision": "float64",
        "global_batch_size": 6,
        "steps": STEPS,
        "threads": 1,
        "device": "cpu",
    }
    return fields | CASES[case]


Found = dict[str, Any]
Work = Callable[[isotrain.Session, str], Any]


def first(session: isotrain.Session, case: str, *, folder: Path) -> Found:
    """Trains to the end, and saves on the way."""
    before = [float(session.step(batch)) for batch in itertools.islice(session.batches(), STOP)]
    session.save(folder / case)
    return {"before": before, **_trained(session)}


def rest(session: isotrain.Session, case: str, *, folders: Iterable[Path]) -> dict[str, Found]:
    """Goes on from those of several that it does in this case, one after the other, as far as they are."""
    found = {}
    met = GOES_ON[session.plan.backend]
    own = [each for each in folders if met[each.name] == case]
    for folder in (each for each in own if (each / case).is_dir()):
        session.restore(folder / case)
        saved = checkpoint_at(folder / case).read("state")
        carried = [
            np.array_equal(value, saved[name])
            for name, value in session.read_state(("optimizer", "loss-scale")).items()
        ]
        found[folder.name] = {"carried": carried, **_trained(session)}
    return found


def both(
    session: isotrain.Session, case: str, *, folder: Path, folders: Iterable[Path]
) -> dict[str, Any]:
    """Both parts, where all others have done their first."""
    own = first(session, case, folder=folder)
    return {"first": own, "rest": rest(session, case, folders=folders)}


def _trained(session: isotrain.Session) -> Found:
    """What the steps from here on give; the metrics are of the last epoch, which is begun."""
    losses, metrics = [], {}
    for batch in session.batches():
        losses.append(float(session.step(batch)))
        if batch.is_last_of_epoch:
            metrics = session.metrics()
    session.metrics()  # the next run begins with none
    return {"losses": losses, "metrics": metrics, "weights": session.read_state()}


def run(part: str, backend: str, folder: Path, plugins: Sequence[str] = ()) -> None:
    """Runs a part on one backend, in its cases.

    `BACKEND/` has checkpoints, `BACKEND-PART.json` numbers.
    """
    others = [folder / other for other in BACKENDS if other != backend]
    work: dict[str, Work] = {
        "first": functools.partial(first, folder=folder / backend),
        "rest": functools.partial(rest, folders=others),
        "both": functools.partial(both, folder=folder / backend, folders=others),
    }
    specs = {case: spec(case) for case in cases(backend, part)}
    replicas = {"first": FIRST, "rest": GOING_ON.get(backend, 1), "both": 1}[part]
    with selection.using(plugins, []):
        returned = launched_in_turn(specs, work[part], backend, replicas)
    save_value(returned[0], folder, f"{backend}-{part}")
