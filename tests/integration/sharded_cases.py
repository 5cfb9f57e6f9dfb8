"""Sessions, one after the other in the same processes, in which sharded runs are compared with others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from integration.checkpoint_reads import restore_own
from integration.sharded_measurements import (
    bytes_sent,
    bytes_taken,
    described_bytes,
    kept_and_sent_by_layers,
    live_bytes,
)
from integration.sharded_models import (
    IN_ORDER,
    WIDE,
    WIDTH,
    branched_model,
    native_batches,
    native_data,
    native_model,
    native_of_tensorflow,
    of_tensorflow_by_hand,
    uneven_model,
    unusual_model,
    wide_batches,
)

from isotrain.core.contracts.state import MODEL_STATE, StateKind
from isotrain.core.session.session import Session
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, next_session

PARALLEL = {"name": "data-parallel"}
ALIKE: tuple[StateKind, ...] = (*MODEL_STATE, "random", "metrics")
"""What such runs have in common: of how they exchange, each keeps its own."""
SAVED = 4
"""Steps after which a run saves: at the end of its first epoch, whose last batch leaves replicas empty."""
BY_NORMS = "adam, by norms"
LAST = "adamw, clipped, accumulated"
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {  # to record takes longest: the last is
    "momentum": {
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "capture": False,
        "epochs": 1,
    },
    BY_NORMS: {
        "optimizer": {"name": "adam", "lr": 0.0625},
        "clip": {"norm": 0.25},
        "capture": False,
        "epochs": 1,
    },
    LAST: {
        "optimizer": {"name": "adamw", "lr": 0.0625, "weight_decay": 0.125},
        "clip": {"global_norm": 0.25},
        "gradient_accumulation_steps": 2,
    },
}
Tried = Mapping[str, Sequence[str]]
"""The kinds of sharded runs that are tried, by optimizer."""
NATIVE = "native"
MEASURED = "measured"
WHOLE = "lamb, recomputed"
OF_MODULES: Mapping[str, Mapping[str, Any]] = {
    **OPTIMIZERS,
    WHOLE: {
        "optimizer": {"name": "lamb", "lr": 0.0625, "weight_decay": 0.125},
        "clip": {"global_norm": 0.25},
        "gradient_accumulation_steps": 2,
        "recompute": ["*"],
    },
}
"""Those, and what looks at all of a weight or computes modules again."""
UNEVEN: Mapping[str, Any] = {
    "model": {"torch": uneven_model},
    "initial_weights": {"freeze": ["0.bias"]},
}


def native(**changes: Any) -> dict[str, Any]:
    """The spec of a run of torch's own model and optimizers."""
    return {
        "name": "native",
        "model": {"torch": native_model, "tensorflow": native_of_tensorflow},
        "data": native_data,
        "loss": "mean_squared_error",
        "metrics": ["mean_absolute_error"],
        "optimizer": {"name": "adam", "lr": 0.0625},
        "global_batch_size": 7,
        "epochs": 2,
        "precision": "float64",
        "threads": 1,
        **changes,
    }


def sharded(stage: int, **options: Any) -> dict[str, Any]:
    """The strategy, with buckets so small that there are several."""
    return {"name": "sharded", "options": {"stage": stage, "bucket_megabytes": 2e-4, **options}}


def spec(strategy: Mapping[str, Any], base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The spec of a run."""
    return {**base, "strategy": strategy, "timeouts": LONG_TIMEOUTS, **changes}


HOST = 2
"""Replicas that count as a host."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    **{f"stage {stage}": sharded(stage) for stage in (1, 2, 3)},
    **{f"hybrid {stage}": sharded(stage, hybrid=True, host_size=HOST) for stage in (1, 2, 3)},
    "few units": sharded(3, hybrid=True, host_size=HOST, bucket_megabytes=8e-3),
}
"""Strategies; the hybrid ones of several hosts where there are more replicas than one has."""


def compared(
    base: Mapping[str, Any], tried: Tried, recomputed: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Specs of runs with some optimizers: one data-parallel, others of some kinds.

    Args:
        base: What all have.
        tried: The optimizers, and the kinds.
        recomputed: Optimizers with which sharded runs compute all layers again in the backward pass.
    """
    found = {
        f"{name}: {kind}": spec(strategy, base, **OF_MODULES[name])
        for name, kinds in tried.items()
        for kind, strategy in {"parallel": PARALLEL, **{k: KINDS[k] for k in kinds}}.items()
    }
    for name in recomputed:
        for kind in tried.get(name, ()):
            found[f"{name}: {kind}"]["recompute"] = "*"
    return found


def measured(kinds: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Specs of runs of which it is looked at what they take and send."""
    bucket = {"bucket_megabytes": 8e-6 * WIDTH * WIDTH}
    strategies = {kind: KINDS[kind]["options"] | bucket for kind in kinds}
    return {
        f"{MEASURED}: {kind}": spec({"name": "sharded", "options": options}, native())
        for kind, options in strategies.items()
    }


UNUSUAL = "unusual"
UNUSUAL_NATIVE: Mapping[str, Any] = {"model": {"torch": unusual_model}, **OF_MODULES[WHOLE]}


def unusual() -> dict[str, dict[str, Any]]:
    """The spec of a run that continues sharded; it is the last, as others follow it."""
    return {UNUSUAL: spec(PARALLEL, native(**UNUSUAL_NATIVE))}


def trained_or_passed_on(session: Session, name: str, *, folder: str) -> dict[str, Any]:
    """As `trained`; a native model continues sharded, and then data-parallel again."""
    if name != UNUSUAL:
        return trained(session, name)
    whole, parts = f"{folder}/whole", f"{folder}/parts"
    stopped(session, 2 * SAVED - 2)
    session.save(whole)
    found = {"parallel": trained(session)}
    strategy = KINDS["few units"]
    with next_session(session, "parts", spec(strategy, native(**UNUSUAL_NATIVE))) as session:
        restore_own(session, Path(whole))
        session.save(parts)
        found["sharded"] = trained(session)
    with next_session(session, "whole", spec(PARALLEL, native(**UNUSUAL_NATIVE))) as session:
        found["whole again"] = gone_on(session, folder=parts)
    return found


def of_native(name: str, kinds: Sequence[str], **changes: Any) -> dict[str, dict[str, Any]]:
    """Specs of runs of native models, whose weights are so many that little else is kept or travels."""
    base = native(data=native_batches, epochs=1, **changes)
    strategies = {"parallel": PARALLEL, **{kind: KINDS[kind] for kind in kinds}}
    return {f"{name}: {kind}": spec(strategy, base) for kind, strategy in strategies.items()}


def trained(session: Session, name: str = "") -> dict[str, Any]:
    """Trains to the end.

    TensorFlow does not evaluate: it would trace that in each session, and has all weights in each process.
    """
    losses, metrics = [], []
    for batch in session.batches():
        losses.append(float(session.step(batch)))
        if batch.is_last_of_epoch:
            metrics.append(session.metrics())
    evaluation = session.evaluate() if session.plan.framework != "tensorflow" else {}
    weights = session.read_state(("trainable", "non-trainable"))
    described = session.group.describe_state(("optimizer",))
    parts = {n: info.nbytes for n, info in described.items() if info.offset is not None}
    counted = {}
    if name.startswith(NATIVE):
        session.seek(0)
        counted = bytes_sent(session, 3 if name.endswith("stage 3") else 6)
        counted["held"] = described_bytes(session, ("trainable",))
        counted["names"] = sorted(session.group.describe_state(("trainable", "optimizer")))
        if name.endswith("stage 3") and session.plan.framework == "torch":
            counted |= bytes_taken(session)
    return {
        **counted,
        "losses": losses,
        "metrics": metrics,
        "evaluation": evaluation,
        "weights": weights,
        "parts": parts,
        "keeps gradients": session.group.keep_gradients(),
        "slots": sum(info.nbytes for info in described.values() if info.shape),
    }


def passed_on(
    session: Session,
    base: Mapping[str, Any],
    folder: str,
    kind: str,
    measures: bool,
) -> dict[str, Any]:
    """Saves in the middle under each strategy, and goes on from there; a whole one is but restored.

    What it has then is what it had when it saved: from there on it is a run like any other.

    Args:
        session: Of a data-parallel run.
        base: Of the specs.
        folder: With a folder of checkpoints for each strategy.
        kind: Of the sharded runs.
        measures: Whether to look besides what a TensorFlow process of a run in stage 3 takes.
    """
    changes = OPTIMIZERS[LAST]
    found = {"parallel": _saved(session, f"{folder}/parallel")}
    with next_session(session, "sharded", spec(KINDS[kind], base, **changes)) as session:
        found["sharded"] = _saved(session, f"{folder}/sharded")
        found["parallel to sharded"] = gone_on(session, folder=f"{folder}/parallel")
        found["sharded to sharded"] = gone_on(session, folder=f"{folder}/sharded")
    with next_session(session, "parallel", spec(PARALLEL, base, **changes)) as session:
        restore_own(session, Path(f"{folder}/sharded"))
        found["restored"] = {"steps": session.steps_done, "saved": session.read_state(ALIKE)}
    if measures:
        fields = native(data=native_batches, **IN_ORDER)
        with next_session(session, "modules", spec(KINDS[kind], fields)) as session:
            modules = trained(session)
            found["modules"] = {**modules, "weights": list(modules["weights"].values())}
        found["by hand"] = of_tensorflow_by_hand()
        strategy = sharded(3, bucket_megabytes=8e-6 * WIDE * WIDE)
        with next_session(session, "measured", spec(strategy, native(**BRANCHED))) as session:
            found["measured"] = kept_and_sent_by_layers(session)
    return found


def _saved(session: Session, folder: str) -> dict[str, Any]:
    """Trains to the end, and saves in the middle."""
    stopped(session)
    session.save(folder)
    saved = session.read_state(ALIKE)
    return {"saved": saved, **trained(session)}


def stopped(session: Session, steps: int = SAVED) -> None:
    """Trains for as long as a run does that saves."""
    for batch in session.batches():
        session.step(batch)
        if batch.step + 1 == steps:
            return


def gone_on(session: Session, name: str = "", *, folder: str) -> dict[str, Any]:
    """Goes on from what other processes have saved."""
    restore_own(session, Path(folder))
    return trained(session)


def saved_in_parts(session: Session, fields: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """What a data-parallel run finds; and saves a hybrid one in stage 3."""
    found = trained(session)
    with next_session(session, "saved", spec(KINDS["hybrid 3"], fields)) as session:
        stopped(session)
        described = session.group.describe_state(("trainable", "optimizer")).items()
        held = {name: [*(info.offset or ()), *(info.shard_shape or ())] for name, info in described}
        session.save(folder)
        session.evaluate()  # brings all weights together, which go again in the next step
        session.save(f"{folder}-whole")
        session.step(next(session.batches()))
    return {"parallel": found, "held": held}


def trained_or_measured(session: Session, name: str) -> dict[str, Any]:
    """As `trained`; or bytes of live tensors, and bytes sent in a step."""
    if name.startswith(MEASURED):
        return {**live_bytes(session), **bytes_sent(session)}
    return trained(session)


BRANCHED: Mapping[str, Any] = {
    "model": branched_model,
    "data": wide_batches,
    "global_batch_size": 4,
    "clip": {"global_norm": 0.25},
    "epochs": 1,
}
"""Layers that are unsharded one after the other, and gradients that all wait for their norm."""
