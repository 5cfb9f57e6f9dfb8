"""Going on from a checkpoint: whether that can be, and how its state comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.contracts.group import ReplicaGroup
from isotrain.core.contracts.plan import Plan, plain_differences
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.contracts.strategy_state import StrategyState
from isotrain.core.errors import IsotrainError
from isotrain.core.plain_records import record
from isotrain.core.running.equipment import Equipment
from isotrain.core.running.saver import FORMAT, OWN_STATE, SHARED_STATE, Identity, Position
from isotrain.core.running.translation import LOST, LOST_SLOTS, Translation
from isotrain.core.spec.training_spec import TrainingSpec

_MEANING = (
    *("model", "model_args", "loss", "objective", "precision", "seed"),
    *("data", "data_args", "shuffle", "drop_remainder"),
)
"""Fields of the spec without which the state, or the place in the data, means nothing."""
_LEFT_OUT = ("name", "loggers", "timeouts", "ignore", "checkpoint", "early_stopping", "on_nan")
"""Fields that do not bear on what is computed."""
_METRICS = "metrics/"
_SCALE = "loss-scale/"


class Saved:
    """What a checkpoint says of the run that saved it.

    Attributes:
        checkpoint: It.
        position: Where the run was.
        identity: Whose it is.
        strategy_values: What the strategy kept as JSON.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Reads it.

        Raises:
            IsotrainError: It is none that this version of isotrain resumes from.
        """
        where = f"{checkpoint.location}: run.json"
        run = dict(checkpoint.run)
        found = run.pop("format", None)
        if found != FORMAT:
            raise IsotrainError(
                f"{where}: expected `format` {FORMAT}, received {found!r:.60}. Resume it with the isotrain"
                " that wrote it; its `versions` name that."
            )
        self.checkpoint = checkpoint
        self.position = record(Position, run.pop("position", None), f"{where}: position")
        self.strategy_values: dict[str, Any] = run.pop("strategy_values", {})
        self.identity = record(Identity, run, where)

    @property
    def replicas(self) -> int:
        """Of the run that saved it."""
        return int(self.identity.plan["replicas"])

    @property
    def is_served(self) -> bool:
        """Whether a coordinator kept its state."""
        processes = self.identity.plan.get("processes") or [{}]
        return bool(processes[0].get("role") == "coordinator")

    @property
    def strategy(self) -> str:
        """Its name."""
        return str(self.identity.plan["strategy"])


def changes(saved: Saved, spec: TrainingSpec, plan: Plan) -> list[str]:
    """Says what is another than in the run that saved a checkpoint, of what is computed.

    Raises:
        IsotrainError: The checkpoint means nothing in this run.
    """
    before, now = saved.identity.spec, spec.to_dict()
    found = [
        each
        for each in plain_differences(before, now)
        if each[0].partition(".")[0] not in _LEFT_OUT
    ]
    # In the plan they are resolved, whichever way the spec gives them.
    found = [each for each in found if each[0] not in ("global_batch", "local_batch")]
    for name in ("global_batch", "samples", "replicas", "backend", "framework"):
        one, other = saved.identity.plan.get(name), getattr(plan, name)
        if one != other and None not in (one, other):  # samples are counted once they are loaded
            found.append((name, one, other))
    breaking = [each for each in found if _breaks(each[0], before, now)]
    if breaking:
        raise IsotrainError(
            f"{saved.checkpoint.location}: it is of another run, as these differ:\n"
            + "\n".join(f"  {line}" for line in _lines(breaking))
            + "\nGive the spec of the run that saved it. To begin a new run with its weights, name it as"
            " `initial_weights` in the spec."
        )
    return list(_lines(found))


def _breaks(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    field = name.partition(".")[0]
    if field == "optimizer":  # its rate and other numbers may change, its slots may not
        kinds = ("name", "custom")
        return any(before[field].get(kind) != now[field].get(kind) for kind in kinds)
    return field in _MEANING or name in ("global_batch", "samples")


def _lines(found: Iterable[tuple[str, Any, Any]]) -> Iterable[str]:
    return (
        f"{name}: {one!r:.80} in the checkpoint, {other!r:.80} now" for name, one, other in found
    )


def load(saved: Saved, own: Equipment, rate: Callable[[], float]) -> list[str]:
    """Sets all state of this process's replicas, and the strategy's.

    Args:
        saved: The checkpoint.
        own: Whose state is set.
        rate: Gives that of the next step, for slots that another framework keeps.

    Returns:
        What of the checkpoint's state could not be taken over.

    Raises:
        IsotrainError: Its weights are not those of this model.
    """
    group, strategy = own.group, own.strategy
    translation = _translation(saved, own)
    if translation is not None:
        lost = _write_translated(saved, group, translation, rate())
        strategy.state_written(group)
        return [*lost, *_write_metrics(saved, group)]
    same = saved.replicas == group.replicas
    lost = []
    keep_apart = same and saved.strategy == strategy.name and saved.identity.replicas_differ
    if saved.identity.replicas_differ and not keep_apart:
        lost.append(
            f"the weights of {saved.replicas} replicas, which differed: all have their mean"
        )
        lost += _write_model(saved, group, _mean_state(saved))
    elif not saved.identity.replicas_differ:
        lost += _write_model(saved, group, _state(saved, group))
    if same and saved.is_served == own.plan.is_served:
        lost += _write_own(saved, group, weights=keep_apart)
    else:
        lost += _write_metrics(saved, group)
    return [*lost, *_load_strategy(saved, group, strategy)]


def load_weights(saved: Saved, own: Equipment) -> None:
    """Sets weights and other state of the model alone, optimizer slots left out.

    Raises:
        IsotrainError: They are not those of this model.
    """
    group, translation = own.group, _translation(saved, own)
    state = _mean_state(saved) if saved.identity.replicas_differ else _state(saved, group)
    if translation is not None:
        state = translation.weights(state, group)
    known = group.describe_state(("trainable", "non-trainable"))
    group.write_state({name: array for name, array in state.items() if name in known})


def _translation(saved: Saved, own: Equipment) -> Translation | None:
    """Between the framework that saved a checkpoint and this one, where that takes one."""
    section = "replica-0" if saved.identity.replicas_differ else "state"
    if not Translation.is_needed(saved.checkpoint.tensors(section), own.group):
        return None
    return Translation.between(saved.identity.plan, own.plan, own.spec)


def _write_translated(
    saved: Saved, group: ReplicaGroup, translation: Translation, rate: float
) -> list[str]:
    """Sets weights, slots and the scale of the loss, by their names in this framework."""
    differ = saved.identity.replicas_differ
    state = _mean_state(saved) if differ else saved.checkpoint.read("state")
    weights = translation.weights(state, group)
    _require_all_weights(saved, group, weights)
    slots = translation.slots(state, group, rate)
    scale = {name: state[name] for name in group.describe_state(("loss-scale",)) if name in state}
    try:
        group.write_state(weights | (slots or {}) | scale)
    except IsotrainError as error:
        raise IsotrainError(f"{saved.checkpoint.location}, by `checkpoint.map`: {error}") from error
    return [LOST, LOST_SLOTS] if slots is None else [LOST]


def _state(saved: Saved, group: ReplicaGroup) -> dict[str, np.ndarray]:
    """What all replicas had alike, or in parts; of what this process has a part of, that part alone."""
    stored = saved.checkpoint.tensors("state")
    parts = {
        name: info
        for name, info in group.describe_state(SHARED_STATE).items()
        if info.offset is not None and name in stored
    }
    whole = saved.checkpoint.read("state", stored.keys() - parts.keys())
    return whole | {
        name: saved.checkpoint.read_part("state", name, info.offset, info.part)
        for name, info in parts.items()
    }


def _write_model(saved: Saved, group: ReplicaGroup, state: Mapping[str, np.ndarray]) -> list[str]:
    _require_all_weights(saved, group, state)
    scales = group.describe_state(("loss-scale",))
    unknown = [name for name in state if name.startswith(_SCALE) and name not in scales]
    _write(saved, group, {name: array for name, array in state.items() if name not in unknown})
    return [_not_here(name) for name in unknown]


def _write(
    saved: Saved, group: ReplicaGroup, state: Mapping[str, np.ndarray], replica: int | None = None
) -> None:
    """Sets state, and says of what a group refuses where it comes from.

    Raises:
        IsotrainError: A name is none of this group's, or its state has another shape.
    """
    try:
        group.write_state(state, replica=replica)
    except IsotrainError as error:
        raise IsotrainError(f"{saved.checkpoint.location}: {error}") from error


def _not_here(name: str) -> str:
    return f"{name}: there is no such state here"


def _require_all_weights(
    saved: Saved, group: ReplicaGroup, state: Mapping[str, np.ndarray]
) -> None:
    weights = group.describe_state(("trainable", "non-trainable"))
    missing = [name for name in weights if name not in state]
    if missing:
        raise IsotrainError(
            f"{saved.checkpoint.location}: it lacks {len(missing)} of the {len(weights)} weights of this"
            f" model, {missing[0]!r} first. It is the checkpoint of another model; or of this one in another"
            " framework, where `checkpoint.map` in the spec says which weight is which."
        )


def _write_own(saved: Saved, group: ReplicaGroup, *, weights: bool) -> list[str]:
    """Gives each replica here what that of the same number had, its weights and slots among it or not."""
    lost: set[str] = set()
    for replica in group.local_replicas:
        section = f"replica-{replica}"
        if section not in saved.checkpoint.sections():
            continue
        stored = saved.checkpoint.tensors(section)
        state = saved.checkpoint.read(section, [n for n in stored if weights or _is_own(n)])
        if weights:
            _require_all_weights(saved, group, state)
        known = group.describe_state(OWN_STATE, replica=replica)
        own = {n: a for n, a in state.items() if n in known or not _is_own(n)}
        _write(saved, group, own, replica)
        others = {name: state[name] for name in state.keys() - own.keys()}
        lost.update(_refused(group, others, replica))
    return [_not_here(name) for name in sorted(lost)]


def _refused(group: ReplicaGroup, state: Mapping[str, np.ndarray], replica: int) -> Iterator[str]:
    """Sets state that a group may have from its first step on only; gives what it has no place for."""
    for name, array in state.items():
        try:
            group.write_state({name: array}, replica=replica)
        except IsotrainError:
            yield name


def _is_own(name: str) -> bool:
    return name.partition("/")[0] in OWN_STATE


def _write_metrics(saved: Saved, group: ReplicaGroup) -> list[str]:
    """Shares the accumulators of the epoch's metrics out among other replicas: they are sums over all."""
    sections = [f"replica-{replica}" for replica in range(saved.replicas)]
    there = [name for name in sections if name in saved.checkpoint.sections()]
    kept = {name for section in there for name in saved.checkpoint.tensors(section)}
    kept = {name for name in kept if _is_own(name)}
    holders = [r for r in group.local_replicas if group.describe_state(("metrics",), replica=r)]
    everywhere = len(group.local_replicas) < group.replicas  # each of the others holds its own too
    lost = {name.partition("/")[0] for name in kept if not name.startswith(_METRICS)}
    for replica in holders:
        known = group.describe_state(("metrics",), replica=replica)
        sums = {name: np.zeros(info.shape, info.dtype) for name, info in known.items()}
        count = group.replicas if everywhere else len(holders)
        place = replica if everywhere else holders.index(replica)
        for section in there[place::count]:
            names = [name for name in saved.checkpoint.tensors(section) if name in known]
            for name, array in saved.checkpoint.read(section, names).items():
                sums[name] = sums[name] + array
        group.write_state(sums, replica=replica)
        lost |= {n for n in kept if n.startswith(_METRICS) and n not in known}
    numbers = f"{saved.replicas} replicas, which are {group.replicas} now"
    return [f"{what} state of {numbers}" for what in sorted(lost)]


def _mean_state(saved: Saved) -> dict[str, np.ndarray]:
    """The mean of the replicas' weights and slots; of whole numbers, those of the first."""
    first = {
        name: array
        for name, array in saved.checkpoint.read("replica-0").items()
        if not _is_own(name)
    }
    floating = [name for name, array in first.items() if array.dtype.kind == "f"]
    sums = {name: first[name].astype(np.float64) for name in floating}
    for replica in range(1, saved.replicas):
        for name, array in saved.checkpoint.read(f"replica-{replica}", floating).items():
            sums[name] += array
    return first | {
        name: (total / saved.replicas).astype(first[name].dtype) for name, total in sums.items()
    }


def _load_strategy(saved: Saved, group: ReplicaGroup, strategy: Strategy) -> list[str]:
    """Brings back what the strategy kept, as far as it can use it."""
    same = saved.replicas == group.replicas
    is_own = saved.strategy == strategy.name
    lost = strategy.carries_over(saved.strategy, saved.replicas, group.replicas)
    if not (same and is_own):
        strategy.state_written(group)
    if is_own:
        strategy.load_state(group, _strategy_state(saved, group.local_replicas if same else ()))
    return lost


def _strategy_state(saved: Saved, replicas: Sequence[int]) -> StrategyState:
    there = saved.checkpoint.sections()
    own = {
        replica: saved.checkpoint.read(f"strategy-{replica}")
        for replica in replicas
        if f"strategy-{replica}" in there
    }
    shared = saved.checkpoint.read("strategy") if "strategy" in there else {}
    return StrategyState(values=saved.strategy_values, tensors=shared, of_replicas=own)
