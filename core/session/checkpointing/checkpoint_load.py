"""Taking the state of a run back to what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.contracts.state import StateInfo
from isotrain.core.contracts.strategy import Strategy, StrategyState
from isotrain.core.errors import IsotrainError
from isotrain.core.session.checkpointing.resume_check import SavedRun
from isotrain.core.session.checkpointing.state_snapshot import (
    REPLICA_STATE,
    REPLICATED_STATE,
    replica_section,
    replica_sections,
)
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.weights.state_conversion import (
    LOST_OPTIMIZER_STATE,
    LOST_STATE,
    StateConverter,
    StateSource,
)
from isotrain.core.session.weights.weight_readers import portions
from isotrain.core.session.weights.weights_file import WEIGHTS

_FIRST = replica_section(0, 0)
_METRICS = "metrics/"
_CARRY = "carry/"
_SCALE = "loss-scale/"


def load(saved: SavedRun, own: SessionContext, rate: Callable[[], float]) -> list[str]:
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
        return [*lost, *_write_metrics(saved, own)]
    same = saved.plan.replicas == group.replicas
    lost = []
    keep_apart = same and saved.plan.strategy == strategy.name and saved.identity.replicas_differ
    if saved.identity.replicas_differ and not keep_apart:
        lost.append(
            f"the weights of {saved.plan.replicas} replicas, which differed: all have their mean"
        )
        lost += _write_mean(saved, group)
    elif not saved.identity.replicas_differ:
        lost += _write_shared(saved, group)
    in_place = same and saved.stages == own.plan.device_mesh.size(STAGE)
    if in_place and saved.uses_parameter_server == own.plan.uses_parameter_server:
        lost += _write_own(saved, own, weights=keep_apart)
    else:
        lost += _write_metrics(saved, own)
    return [*lost, *_load_strategy(saved, group, strategy)]


def load_weights(saved: SavedRun, own: SessionContext) -> None:
    """Sets weights and other state of the model alone, optimizer slots left out.

    Raises:
        IsotrainError: They are not those of this model.
    """
    group, translation = own.group, _translation(saved, own)
    stored = saved.checkpoint.tensors(_section(saved))
    names = [name for name in group.describe_state(WEIGHTS) if name in stored]
    if translation is not None:
        _write_origins(saved, group, translation, translation.state_sources(stored, group))
    elif saved.identity.replicas_differ:
        _write_means(saved, group, names)
    else:
        _write_portions(saved, group, names)


def _section(saved: SavedRun) -> str:
    """Where all weights and slots are, if only those of one replica."""
    return _FIRST if saved.identity.replicas_differ else "state"


def _translation(saved: SavedRun, own: SessionContext) -> StateConverter | None:
    """Between the framework that saved a checkpoint and this one, where that takes one."""
    if not StateConverter.is_needed(saved.checkpoint.tensors(_section(saved)), own.group):
        return None
    return StateConverter.between((saved.plan.backend, saved.plan.framework), own.plan, own.spec)


def _write_translated(
    saved: SavedRun, group: ReplicaGroup, translation: StateConverter, rate: float
) -> list[str]:
    """Sets weights, slots and the scale of the loss, by their names in this framework."""
    stored = saved.checkpoint.tensors(_section(saved))
    weights = translation.state_sources(stored, group)
    _require_all_weights(saved, group, weights)
    with_optimizer_state = translation.with_optimizer_state(weights, stored, group, rate)
    group.reshard_weights()
    _write_origins(saved, group, translation, with_optimizer_state or weights, rate)
    scale = [name for name in group.describe_state(("loss-scale",)) if name in stored]
    _write(saved, group, _common_state(saved, scale))
    return [LOST_STATE, LOST_OPTIMIZER_STATE] if with_optimizer_state is None else [LOST_STATE]


def _write_origins(
    saved: SavedRun,
    group: ReplicaGroup,
    translation: StateConverter,
    origins: Mapping[str, StateSource],
    rate: float = 1.0,
) -> None:
    """Translates and sets state a portion after the other."""
    stored = saved.checkpoint.tensors(_section(saved))
    here = [name for name in origins if not group.is_remote(name)]
    for portion in portions(here, lambda name: sum(stored[n].nbytes for n in origins[name].names)):
        found = _common_state(saved, {n for name in portion for n in origins[name].names})
        for name in portion:
            state = translation.state(name, origins[name], found, rate)
            _write(saved, group, state, how=", by `checkpoint.map`")


def _common_state(saved: SavedRun, names: Collection[str]) -> dict[str, np.ndarray]:
    """Weights and slots of all replicas; of those that differed, the mean."""
    if saved.identity.replicas_differ:
        return _mean_state(saved, names)
    return saved.checkpoint.read("state", names)


def _write_shared(saved: SavedRun, group: ReplicaGroup) -> list[str]:
    """Sets what all replicas had alike, or in parts."""
    stored = saved.checkpoint.tensors("state")
    _require_all_weights(saved, group, stored)
    unknown = _unknown_scales(stored, group)
    group.reshard_weights()
    here = [n for n in stored if n not in unknown and not group.is_remote(n)]
    _write_portions(saved, group, here)
    return [_not_here(name) for name in unknown]


def _write_portions(saved: SavedRun, group: ReplicaGroup, names: Iterable[str]) -> None:
    """Reads and sets state a portion after the other: it is never here twice as a whole."""
    stored, described = saved.checkpoint.tensors("state"), group.describe_state(REPLICATED_STATE)
    for portion in portions(names, lambda name: stored[name].nbytes):
        _write(saved, group, _read_portion(saved, portion, described))


def _read_portion(
    saved: SavedRun, names: Sequence[str], described: Mapping[str, StateInfo]
) -> dict[str, np.ndarray]:
    """Tensors of the state; of what this process has a part of, that part alone."""
    parts = {n: described[n] for n in names if n in described and described[n].offset is not None}
    whole = saved.checkpoint.read("state", [name for name in names if name not in parts])
    return whole | {
        name: saved.checkpoint.read_part("state", name, info.offset, info.shard_shape)
        for name, info in parts.items()
    }


def _write_mean(saved: SavedRun, group: ReplicaGroup) -> list[str]:
    """Sets the mean of replicas that differed."""
    stored = saved.checkpoint.tensors(_FIRST)
    names = [name for name in stored if not _is_own(name)]
    _require_all_weights(saved, group, names)
    unknown = _unknown_scales(names, group)
    here = [name for name in names if name not in unknown]
    _write_means(saved, group, here)
    return [_not_here(name) for name in unknown]


def _write_means(saved: SavedRun, group: ReplicaGroup, names: Iterable[str]) -> None:
    stored = saved.checkpoint.tensors(_FIRST)
    for portion in portions(names, lambda name: stored[name].nbytes):
        _write(saved, group, _mean_state(saved, portion))


def _unknown_scales(names: Iterable[str], group: ReplicaGroup) -> list[str]:
    """Those of a loss scale that this group has not."""
    scales = group.describe_state(("loss-scale",))
    return [name for name in names if name.startswith(_SCALE) and name not in scales]


def _write(
    saved: SavedRun,
    group: ReplicaGroup,
    state: Mapping[str, np.ndarray],
    replica: int | None = None,
    how: str = "",
) -> None:
    """Sets state, and says of what a group refuses where it comes from.

    Raises:
        IsotrainError: A name is none of this group's, or its state has another shape.
    """
    try:
        group.write_state(state, replica=replica)
    except IsotrainError as error:
        raise IsotrainError(f"{saved.checkpoint.location}{how}: {error}") from error


def _not_here(name: str) -> str:
    return f"{name}: there is no such state here"


def _require_all_weights(saved: SavedRun, group: ReplicaGroup, names: Collection[str]) -> None:
    weights = group.describe_state(WEIGHTS)
    missing = [name for name in weights if name not in names]
    if missing:
        raise IsotrainError(
            f"{saved.checkpoint.location}: it lacks {len(missing)} of the {len(weights)} weights of this"
            f" model, {missing[0]!r} first. It is the checkpoint of another model; or of this one in another"
            " framework, where `checkpoint.map` in the spec says which weight is which."
        )


def _write_own(saved: SavedRun, own: SessionContext, *, weights: bool) -> list[str]:
    """Gives each replica here what that of the same number had, its weights and slots among it or not."""
    group = own.group
    lost: set[str] = set()
    for replica in group.local_replicas:
        section = replica_section(replica, own.stage)
        if section not in saved.checkpoint.sections():
            continue
        stored = saved.checkpoint.tensors(section)
        names = [name for name in stored if weights or _is_own(name)]
        if weights:
            _require_all_weights(saved, group, names)
        known = group.describe_state(REPLICA_STATE, replica=replica)
        here = [name for name in names if name in known or not _is_own(name)]
        for portion in portions(here, {name: stored[name].nbytes for name in here}.__getitem__):
            _write(saved, group, saved.checkpoint.read(section, portion), replica)
        others = saved.checkpoint.read(section, sorted(set(names).difference(here)))
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
    return name.partition("/")[0] in REPLICA_STATE


def _write_metrics(saved: SavedRun, own: SessionContext) -> list[str]:
    """Shares the accumulators of the epoch's metrics out among other replicas: they are sums over all.

    Of a replica in stages the first gets them.
    """
    group = own.group
    there = replica_sections(saved.checkpoint.sections())
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
        for section in () if own.stage else there[place::count]:
            names = [name for name in saved.checkpoint.tensors(section) if name in known]
            for name, array in saved.checkpoint.read(section, names).items():
                sums[name] = sums[name] + array
        group.write_state(sums, replica=replica)
        lost |= {n for n in kept if n.startswith(_METRICS) and n not in known}
    if "carry" in lost and _write_carried_alike(saved, group, there):
        lost.discard("carry")
    now = _layout(group.replicas, own.plan.device_mesh.size(STAGE))
    numbers = f"{_layout(saved.plan.replicas, saved.stages)}, now {now}"
    return [f"{what} state of {numbers}" for what in sorted(lost)]


def _write_carried_alike(saved: SavedRun, group: ReplicaGroup, sections: Sequence[str]) -> bool:
    """Gives other replicas what layers carried, if all had the same; says whether that could be done."""
    each = [
        saved.checkpoint.read(section, [n for n in names if n.startswith(_CARRY)])
        for section in sections
        if (names := saved.checkpoint.tensors(section))
    ]
    first, *others = each
    alike = all(
        other.keys() == first.keys() and all(np.array_equal(other[n], first[n]) for n in first)
        for other in others
    )
    return alike and not [n for r in group.local_replicas for n in _refused(group, first, r)]


def _layout(replicas: int, stages: int) -> str:
    plural = "" if replicas == 1 else "s"
    return f"{replicas} replica{plural}" + (f" in {stages} stages" if stages > 1 else "")


def _mean_state(saved: SavedRun, names: Collection[str]) -> dict[str, np.ndarray]:
    """The mean of the replicas' weights and slots; of whole numbers, those of the first."""
    first = saved.checkpoint.read(_FIRST, names)
    floating = [name for name, array in first.items() if array.dtype.kind == "f"]
    sums = {name: first[name].astype(np.float64) for name in floating}
    for replica in range(1, saved.plan.replicas):
        for name, array in saved.checkpoint.read(f"replica-{replica}", floating).items():
            sums[name] += array
    return first | {
        name: (total / saved.plan.replicas).astype(first[name].dtype)
        for name, total in sums.items()
    }


def _load_strategy(saved: SavedRun, group: ReplicaGroup, strategy: Strategy) -> list[str]:
    """Brings back what the strategy kept, as far as it can use it."""
    same = saved.plan.replicas == group.replicas
    is_own = saved.plan.strategy == strategy.name
    lost = strategy.resume_notes(saved.plan.strategy, saved.plan.replicas, group.replicas)
    if not (same and is_own):
        strategy.state_written(group)
    if is_own:
        state = _strategy_state(saved, group.local_replicas if same else ())
        try:
            strategy.load_state(group, state)
        except (LookupError, TypeError, ValueError) as error:
            raise IsotrainError(
                f"{saved.checkpoint.location}: strategy {strategy.name!r} did not take up what is kept of it"
                f" there: {type(error).__name__}: {error}. It may have changed since, or have a fault."
            ) from error
    return lost


def _strategy_state(saved: SavedRun, replicas: Sequence[int]) -> StrategyState:
    there = saved.checkpoint.sections()
    own = {
        replica: saved.checkpoint.read(f"strategy-{replica}")
        for replica in replicas
        if f"strategy-{replica}" in there
    }
    shared = saved.checkpoint.read("strategy") if "strategy" in there else {}
    return StrategyState(values=saved.strategy_values, tensors=shared, per_replica=own)
