"""Specs of pipeline runs, and what is done in their sessions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from integration.checkpoint_reads import restore_own
from integration.pipeline_models import data, even, modules, sequential, skipping, written

import isotrain
from isotrain.core.contracts.backend.group_protocols import ActionTimingGroup
from isotrain.core.contracts.state import StateKind
from isotrain.core.pipeline.partition import PipelineSplit
from isotrain.core.session.weights.weights_file import WEIGHTS
from isotrain.core.worker.fit import fit
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, Work, next_session
from isotrain.testing.launching import try_run
from isotrain.testing.native_equality import train

ADAM = {"name": "adam", "lr": 2.0**-6, "beta_1": 0.875, "beta_2": 0.96875, "epsilon": 2.0**-13}
BASE: dict[str, Any] = {
    "model": skipping,
    "data": data,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "metrics": ["accuracy"],
    "optimizer": ADAM,
    "clip": {"global_norm": 0.25},
    "precision": "float64",
    "global_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "epochs": 2,
    "threads": 1,
    "capture": False,
    "timeouts": LONG_TIMEOUTS,
}
CASES: dict[str, dict[str, Any]] = {
    "skipping": {},
    "sequential": {
        "model": sequential,
        "data": even,
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "clip": None,  # so that a sum for a mean would be seen
        "capture": True,  # with layers whose evaluation is recorded; training in stages is not
    },
    "one micro-batch": {"gradient_accumulation_steps": 1},
    "native": {"model": {"torch": modules}},
    "written": {"model": {"torch": written}},
    "nothing dropped": {"model_args": {"dropped": 0.0}, "data": even},
}
PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpipe": ("skipping", {"schedule": "gpipe"}),
    "1f1b": ("skipping", {"schedule": "1f1b"}),
    "interleaved": ("skipping", {"schedule": "interleaved", "chunks": 2}),
    "cut": ("skipping", {"cut": ["dropout"]}),
    "sequential": ("sequential", {}),
    "one micro-batch": ("one micro-batch", {}),
    "native": ("native", {}),
    "listed, interleaved": (
        "written",
        {
            "schedule": "interleaved",
            "chunks": 2,
            "cut": ["bend", "blocks.0", "head"],
            "modules": ["first", "bend", "blocks.*", "head"],
        },
    ),
    "named": ("written", {}),
}
RECOMPUTED = ("cut", "listed, interleaved")
"""Pipelines whose layers are computed again in the backward pass, with the same dropped."""


def under(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"strategy": {"name": "pipeline", "options": {"stages": 2, **options}}}


def again(name: str) -> str | None:
    return "*" if name in RECOMPUTED else None


def under_way(communicator: Any) -> list[int]:
    """Numbers of micro-batches whose tensors were kept, at each send of a stage."""
    send, found = communicator.send, []

    def noting(*given: Any) -> None:
        send(*given)
        found.append(len(communicator.pending_sends))

    communicator.send = noting
    return found


def followed(session: isotrain.Session, name: str = "") -> dict[str, Any]:
    """Trains and evaluates; what each process then has."""
    group = session.group
    if isinstance(group, ActionTimingGroup):
        group.set_action_timing(True)
    communicator = getattr(group, "communicator", None)
    kept = under_way(communicator) if hasattr(communicator, "pending_sends") else []
    found = train(session)
    evaluated, state = session.evaluate(), session.read_state(("optimizer",))
    found["sending"] = max(kept, default=0)
    actions = group.last_actions() if isinstance(group, ActionTimingGroup) else ()
    found["taken"] = [(each.name, each.begin, each.end) for each in actions]
    return {**found, "evaluated": evaluated, "train": session.metrics(), "slots": state}


STOP = 4
"""Steps after which a checkpoint is saved: the second epoch has begun."""
SAVED = ("skipping", "sequential")
"""Cases of which the stages save checkpoints; the latter draws nothing, and others go on as they would."""


def saving(session: isotrain.Session, name: str, *, folder: Path) -> dict[str, Any]:
    """Saves in the middle, and goes on to the end, twice; then from where all weights were everywhere.

    They are where a batch is evaluated, of which nothing else remains.
    """
    for batch in itertools.islice(session.batches(), STOP):
        session.step(batch)
    session.save(folder / name)
    whole = ended(session)
    found = {"whole": whole, "again": going_on(session, name, folder=folder)}
    session.restore(folder / name)
    session.try_metrics(next(session.batches()))
    session.save(folder / f"{name}-joined")
    return found | {"joined": going_on(session, f"{name}-joined", folder=folder)}


def saving_listed(session: isotrain.Session, name: str, *, folder: Path) -> dict[str, Any]:
    """As `saving`; also errors for lists that are not the model, and slot sizes before stages are known."""
    from isotrain.adapters.tensorflow.pipeline.modules import PipelineModules
    from isotrain.adapters.tensorflow.pipeline.replica_group import PipelineTrainer

    found = saving(session, name, folder=folder)
    slots = PipelineTrainer(session.spec).update.variables
    found["first slots"] = max(each.shape.num_elements() for each in slots)
    session.seek(0)
    given = next(session.batches()).slices[0][0].inputs
    trainer: Any = session.group.trainer  # type: ignore[attr-defined]
    for patterns in (("blocks.*", "noise"), ("blocks.*", "noise", "head")):
        try:
            cut = PipelineSplit(2, modules=patterns)
            PipelineModules(trainer, session.spec, cut).check_equivalence(given)
        except isotrain.SpecError as error:
            found[patterns[-1]] = str(error)
    return found


def saving_and_profiled(session: isotrain.Session, name: str, *, folder: Path) -> dict[str, Any]:
    """As `saving`; also bytes of weights after one more step, when all of them were here."""
    found = saving(session, name, folder=folder) | {"profile": profiled(session, name)}
    session.step(next(session.batches()))
    return found | {"held": bytes_of_weights(session)}


def bytes_of_weights(session: isotrain.Session) -> int:
    trainer: Any = session.group.trainer  # type: ignore[attr-defined]
    if session.plan.framework == "torch":
        return sum(each.untyped_storage().nbytes() for each in trainer.trainable.values())
    return sum(each.read_value().numpy().nbytes for each in trainer.part("trainable"))


def going_on(session: isotrain.Session, name: str, *, folder: Path) -> dict[str, Any]:
    restore_own(session, folder / name)
    return ended(session)


def unsaved(session: isotrain.Session, name: str, *, folder: Path) -> dict[str, Any]:
    """Trains without any checkpoint; then from that of others."""
    return {"whole": ended(session), "again": going_on(session, name, folder=folder)}


def ended(session: isotrain.Session) -> dict[str, Any]:
    """What each process has after all the steps that are left."""
    losses = [float(session.step(batch)) for batch in session.batches()]
    found = {"loss": losses, "train": session.metrics(), "evaluated": session.evaluate()}
    kinds: dict[str, tuple[StateKind, ...]] = {
        "weights": WEIGHTS,
        "slots": ("optimizer",),
        "random": ("random",),
    }
    return found | {name: session.read_state(kind) for name, kind in kinds.items()}


def first_loss(session: isotrain.Session, name: str) -> float:
    """Loss of a step in which activations and gradients are sent between stages."""
    return float(session.step(next(session.batches())))


def fitted(session: isotrain.Session, name: str) -> dict[str, Any]:
    """Trained by the built-in loop, which keeps the best weights and ends early."""
    metrics = fit(session)
    found = {"steps": session.steps_done, "best": session.best_step, "metrics": metrics}
    return found | {"weights": session.read_state(WEIGHTS)}


def profiled_and_sent(session: isotrain.Session, name: str) -> dict[str, Any]:
    """The layers; and how many bytes of activations and their gradients this stage sends in a step."""
    found = {"layers": profiled(session, name)}
    communicator: Any = session.group.communicator  # type: ignore[attr-defined]
    send, sent = communicator.send, [0]

    def counting(tensor: Any, *given: Any) -> None:
        sent.append(tensor.nbytes if tensor.is_floating_point() else 0)  # whole numbers tell shapes
        send(tensor, *given)

    communicator.send = counting
    session.step(next(session.batches()))
    return {**found, "sent": sum(sent), "held": held(session)}


def held(session: isotrain.Session) -> list[int]:
    """Bytes that weights, gradients and slots take on this stage after a step."""
    trainer: Any = session.group.trainer  # type: ignore[attr-defined]
    weights = list(trainer.trainable.values())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    slots = [s for own in trainer.optimizer.state.values() for s in own.values() if s.dim()]
    return [
        sum(t.untyped_storage().nbytes() for t in those) for those in (weights, gradients, slots)
    ]


def profiled(session: isotrain.Session, name: str) -> list[dict[str, Any]]:
    """The layers of all stages, timed."""
    session.seek(0)
    batch = next(iter(session.batches()))
    return [asdict(layer) for layer in session.group.profile_layers(batch).layers]


FITTED = {
    "model": sequential,
    "optimizer": {"name": "sgd", "lr": 4.0},
    "clip": None,
    "epochs": 9,
    "early_stopping": {"metric": "validation_loss", "patience": 2},
}


def fitting(folder: Path) -> dict[str, Any]:
    best = {"metric": "validation_loss", "restore": True}
    return {**BASE, **FITTED, "checkpoint": {"keep_best": best, "folder": str(folder)}}


Tasks = Mapping[str, tuple[Mapping[str, Any], Work]]
"""By name: a spec, and what is done in a session of it."""


def work(session: isotrain.Session, tasks: Tasks) -> dict[str, Any]:
    """Does one after the other; a run's work."""
    found = {}
    for name, (spec, task) in tasks.items():
        with next_session(session, name.replace("/", "-"), spec) as session:
            found[name] = task(session, name.partition("/")[2])
    return found


def done(tasks: Tasks, replicas: int, backend: str = "torch-ddp") -> Sequence[dict[str, Any]]:
    first, _ = next(iter(tasks.values()))
    run = try_run(partial(work, tasks=tasks), first, backend, replicas)
    assert run.failure is None, run.failure
    return run.returned
