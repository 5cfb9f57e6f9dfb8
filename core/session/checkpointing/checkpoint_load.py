"""Loading a checkpoint, also into another number of replicas, parallel layout or framework."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.contracts.state import StateInfo
from isotrain.core.contracts.strategy import Strategy, StrategyState
from isotrain.core.data.streaming.scheduled_shards import joined_states
from isotrain.core.data.streaming.stream_state import StreamState
from isotrain.core.errors import IsotrainError
from isotrain.core.json_records import record
from isotrain.core.quantities import counted
from isotrain.core.session.checkpointing.checkpoint_save import SHARDS
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
from isotrain.core.session.weights.weights_file import AVERAGE, WEIGHTS

_FIRST_REPLICA = replica_section(0, 0)
_METRICS = "metrics/"
_CARRY = "carry/"
_LOSS_SCALE = "loss-scale/"


def load(
    saved: SavedRun, context: SessionContext, rates: Callable[[], Mapping[int | None, float]]
) -> list[str]:
    """Loads all state of this process's replicas and of the strategy. Collective.

    Args:
        saved: The checkpoint.
        context: Context of the session whose state is set.
        rates: Returns the learning rates of the next step, by index of the optimizer group with a schedule,
            and under None that of the run; needed to convert optimizer state of another framework.

    Returns:
        Descriptions of the state in the checkpoint that could not be loaded.

    Raises:
        IsotrainError: The weights in the checkpoint are not those of this model.
    """
    group, strategy = context.group, context.strategy
    converter = _converter(saved, context)
    if converter is not None:
        lost = _write_converted(saved, group, converter, rates())
        strategy.state_written(group)
        return [*lost, *_write_metrics(saved, context)]
    same_replicas = saved.plan.replicas == group.replicas
    lost = []
    keeps_different = keeps_different_weights(saved, context)
    if saved.identity.replicas_differ and not keeps_different:
        lost.append(
            f"the weights of {counted(saved.plan.replicas, 'replica')}, which differed: all have their mean"
        )
        lost += _write_mean(saved, group)
    elif not saved.identity.replicas_differ:
        lost += _write_shared(saved, group)
    same_layout = same_replicas and saved.stages == _stages(context)
    if same_layout and saved.uses_parameter_server == context.plan.uses_parameter_server:
        lost += _write_per_replica(saved, context, weights=keeps_different)
    else:
        lost += _write_metrics(saved, context)
    return [*lost, *_load_strategy(saved, group, strategy)]


def keeps_different_weights(saved: SavedRun, context: SessionContext) -> bool:
    """Whether each replica gets weights of its own from a checkpoint, as it had then."""
    same_replicas = saved.plan.replicas == context.group.replicas
    same_strategy = saved.plan.strategy == context.strategy.name
    return same_replicas and same_strategy and saved.identity.replicas_differ


def load_weights(saved: SavedRun, context: SessionContext) -> None:
    """Loads weights and other state of the model, without optimizer state. Collective.

    Raises:
        IsotrainError: The weights in the checkpoint are not those of this model.
    """
    group, converter = context.group, _converter(saved, context)
    stored = saved.checkpoint.tensors(_section(saved))
    names = [name for name in group.describe_state(WEIGHTS) if name in stored]
    if converter is not None:
        _write_sources(saved, group, converter, converter.state_sources(stored, group))
    elif saved.identity.replicas_differ:
        _write_mean_portions(saved, group, names)
    else:
        _write_portions(saved, group, names)


def load_stream_state(saved: SavedRun) -> StreamState | None:
    """The state of the data stream, with those of the shards that other processes than rank 0 have read.

    Local.

    Raises:
        IsotrainError: A value is missing or invalid.
    """
    state = saved.trainer_state.stream_state
    if state is None or SHARDS not in saved.checkpoint.sections():
        return state
    where = f"{saved.checkpoint.location}: {SHARDS}"
    texts = saved.checkpoint.read(SHARDS).values()
    others = [record(StreamState, json.loads(text.tobytes()), where) for text in texts]
    return joined_states(state, others)


def load_average(saved: SavedRun, context: SessionContext) -> None:
    """Sets the weights to their average over steps (`ema`, `swa`) in the checkpoint. Local.

    Raises:
        IsotrainError: The weights in the checkpoint are not those of this model.
    """
    group, stored = context.group, saved.checkpoint.tensors(AVERAGE)

    def read(names: Collection[str]) -> dict[str, np.ndarray]:
        return saved.checkpoint.read(AVERAGE, names)

    converter = _converter(saved, context)
    if converter is not None:
        sources = converter.state_sources(stored, group)
        _write_sources(saved, group, converter, sources, read=read)
        return
    _require_all_weights(saved, group, stored)
    for portion in portions(stored, lambda name: stored[name].nbytes):
        _write(saved, group, read(portion))


def _section(saved: SavedRun) -> str:
    """The section with weights and optimizer state: the shared one, or that of replica 0."""
    return _FIRST_REPLICA if saved.identity.replicas_differ else "state"


def _converter(saved: SavedRun, context: SessionContext) -> StateConverter | None:
    """The converter from the framework that saved the checkpoint; None where no conversion is needed."""
    if not StateConverter.is_needed(saved.checkpoint.tensors(_section(saved)), context.group):
        return None
    source = saved.plan.backend, saved.plan.framework
    return StateConverter.between(source, context.plan, context.spec)


def _write_converted(
    saved: SavedRun,
    group: ReplicaGroup,
    converter: StateConverter,
    rates: Mapping[int | None, float],
) -> list[str]:
    """Sets weights, optimizer state and loss scale from a checkpoint of another framework."""
    stored = saved.checkpoint.tensors(_section(saved))
    weights = converter.state_sources(stored, group)
    _require_all_weights(saved, group, weights)
    with_optimizer_state = converter.with_optimizer_state(weights, stored, group, rates)
    group.reshard_weights()
    _write_sources(saved, group, converter, with_optimizer_state or weights)
    loss_scale = [name for name in group.describe_state(("loss-scale",)) if name in stored]
    _write(saved, group, _common_state(saved, loss_scale))
    return [LOST_STATE, LOST_OPTIMIZER_STATE] if with_optimizer_state is None else [LOST_STATE]


def _write_sources(
    saved: SavedRun,
    group: ReplicaGroup,
    converter: StateConverter,
    sources: Mapping[str, StateSource],
    read: Callable[[Collection[str]], dict[str, np.ndarray]] | None = None,
) -> None:
    """Converts and sets state, one portion after the other; `read` reads it, by default the common state."""
    stored = saved.checkpoint.tensors(_section(saved))
    local = [name for name in sources if not group.is_remote(name)]
    for portion in portions(local, lambda name: sum(stored[n].nbytes for n in sources[name].names)):
        names = {n for name in portion for n in sources[name].names}
        state = _common_state(saved, names) if read is None else read(names)
        for name in portion:
            converted = converter.state(name, sources[name], state)
            _write(saved, group, converted, how=", by `checkpoint.map`")


def _common_state(saved: SavedRun, names: Collection[str]) -> dict[str, np.ndarray]:
    """Weights and optimizer state, unsharded shapes by name; the mean over replicas where these differed."""
    if saved.identity.replicas_differ:
        return _mean_state(saved, names)
    return saved.checkpoint.read("state", names)


def _write_shared(saved: SavedRun, group: ReplicaGroup) -> list[str]:
    """Sets replicated and sharded state; returns what this group does not have."""
    stored = saved.checkpoint.tensors("state")
    _require_all_weights(saved, group, stored)
    unknown = _unknown_loss_scales(stored, group)
    group.reshard_weights()
    unshared = [*unknown, *_kept_by_each_replica(saved, group)]
    local = [n for n in stored if n not in unshared and not group.is_remote(n)]
    _write_portions(saved, group, local)
    return [_no_such_state(name) for name in unknown]


def _kept_by_each_replica(saved: SavedRun, group: ReplicaGroup) -> list[str]:
    """Names of weights that each replica keeps for itself, here and in the checkpoint (`per_replica`)."""
    carried = group.describe_state(("carry",))
    if not carried or _FIRST_REPLICA not in saved.checkpoint.sections():
        return []
    kept = carried.keys() & saved.checkpoint.tensors(_FIRST_REPLICA).keys()
    return [n for n in group.describe_state(("non-trainable",)) if f"{_CARRY}{n}" in kept]


def _write_portions(saved: SavedRun, group: ReplicaGroup, names: Iterable[str]) -> None:
    """Reads and sets state one portion after the other: memory never holds a second full copy."""
    stored, infos = saved.checkpoint.tensors("state"), group.describe_state(REPLICATED_STATE)
    for portion in portions(names, lambda name: stored[name].nbytes):
        _write(saved, group, _read_portion(saved, portion, infos))


def _read_portion(
    saved: SavedRun, names: Sequence[str], infos: Mapping[str, StateInfo]
) -> dict[str, np.ndarray]:
    """Reads tensors of the shared state by name; of a sharded tensor only this process's shard's shape."""
    shards = {n: infos[n] for n in names if n in infos and infos[n].offset is not None}
    replicated = saved.checkpoint.read("state", [name for name in names if name not in shards])
    return replicated | {
        name: saved.checkpoint.read_part("state", name, info.offset, info.shard_shape)
        for name, info in shards.items()
    }


def _write_mean(saved: SavedRun, group: ReplicaGroup) -> list[str]:
    """Sets the mean over replicas that differed; returns what this group does not have."""
    stored = saved.checkpoint.tensors(_FIRST_REPLICA)
    names = [name for name in stored if not _is_per_replica(name)]
    _require_all_weights(saved, group, names)
    unknown = _unknown_loss_scales(names, group)
    unshared = [*unknown, *_kept_by_each_replica(saved, group)]
    _write_mean_portions(saved, group, [name for name in names if name not in unshared])
    return [_no_such_state(name) for name in unknown]


def _write_mean_portions(saved: SavedRun, group: ReplicaGroup, names: Iterable[str]) -> None:
    stored = saved.checkpoint.tensors(_FIRST_REPLICA)
    for portion in portions(names, lambda name: stored[name].nbytes):
        _write(saved, group, _mean_state(saved, portion))


def _unknown_loss_scales(names: Iterable[str], group: ReplicaGroup) -> list[str]:
    """Names of loss-scale state that this group does not have."""
    loss_scales = group.describe_state(("loss-scale",))
    return [name for name in names if name.startswith(_LOSS_SCALE) and name not in loss_scales]


def _write(
    saved: SavedRun,
    group: ReplicaGroup,
    state: Mapping[str, np.ndarray],
    replica: int | None = None,
    how: str = "",
) -> None:
    """Sets state; adds the location of the checkpoint to the error of a group that refuses it.

    Raises:
        IsotrainError: The group has no state of a name, or its shape differs.
    """
    try:
        group.write_state(state, replica=replica)
    except IsotrainError as error:
        raise IsotrainError(f"{saved.checkpoint.location}{how}: {error}") from error


def _no_such_state(name: str) -> str:
    return f"{name}: there is no such state here"


def _require_all_weights(saved: SavedRun, group: ReplicaGroup, names: Collection[str]) -> None:
    weights = group.describe_state(WEIGHTS)
    missing = [name for name in weights if name not in names]
    if missing:
        raise IsotrainError(
            f"{saved.checkpoint.location}: it lacks {len(missing)} of the {counted(len(weights), 'weight')}"
            " of this"
            f" model, {missing[0]!r} first. It is the checkpoint of another model; or of this one in another"
            " framework, where `checkpoint.map` in the spec says which weight is which."
        )


def _write_per_replica(saved: SavedRun, context: SessionContext, *, weights: bool) -> list[str]:
    """Sets the state that each local replica has for itself, from the same replica of the saved run.

    Args:
        saved: The checkpoint.
        context: Context of the session.
        weights: Whether weights and optimizer state are among it.

    Returns:
        Descriptions of the state that this group does not have.
    """
    group = context.group
    refused: set[str] = set()
    for replica in group.local_replicas:
        section = replica_section(replica, context.index_in_replica)
        if section not in saved.checkpoint.sections():
            continue
        stored = saved.checkpoint.tensors(section)
        names = [name for name in stored if weights or _is_per_replica(name)]
        if weights:
            _require_all_weights(saved, group, names)
        infos = group.describe_state(REPLICA_STATE, replica=replica)
        present = [name for name in names if name in infos or not _is_per_replica(name)]
        sizes = {name: stored[name].nbytes for name in present}
        for portion in portions(present, sizes.__getitem__):
            _write(saved, group, saved.checkpoint.read(section, portion), replica)
        others = saved.checkpoint.read(section, sorted(set(names).difference(present)))
        refused.update(_write_refused(group, others, replica))
    return [_no_such_state(name) for name in sorted(refused)]


def _write_refused(
    group: ReplicaGroup, state: Mapping[str, np.ndarray], replica: int
) -> Iterator[str]:
    """Writes arrays, any shapes, that a group may refuse before its first step; yields the refused names."""
    for name, array in state.items():
        try:
            group.write_state({name: array}, replica=replica)
        except IsotrainError:
            yield name


def _is_per_replica(name: str) -> bool:
    return name.partition("/")[0] in REPLICA_STATE


def _write_metrics(saved: SavedRun, context: SessionContext) -> list[str]:
    """Distributes the metric accumulators of the saved replicas over a different number of replicas.

    Accumulators are sums, so each replica adds up those of some saved replicas. In a pipeline the first
    process of a replica gets them. Returns descriptions of the per-replica state that is lost.
    """
    group = context.group
    sections = replica_sections(saved.checkpoint.sections())
    stored = {name for section in sections for name in saved.checkpoint.tensors(section)}
    stored = {name for name in stored if _is_per_replica(name)}
    holders = [r for r in group.local_replicas if group.describe_state(("metrics",), replica=r)]
    everywhere = len(group.local_replicas) < group.replicas  # each of the others holds its own too
    lost = {name.partition("/")[0] for name in stored if not name.startswith(_METRICS)}
    for replica in holders:
        infos = group.describe_state(("metrics",), replica=replica)
        sums = {name: np.zeros(info.shape, info.dtype) for name, info in infos.items()}
        count = group.replicas if everywhere else len(holders)
        index = replica if everywhere else holders.index(replica)
        for section in () if context.index_in_replica else sections[index::count]:
            names = [name for name in saved.checkpoint.tensors(section) if name in infos]
            for name, array in saved.checkpoint.read(section, names).items():
                sums[name] = sums[name] + array
        group.write_state(sums, replica=replica)
        lost |= {n for n in stored if n.startswith(_METRICS) and n not in infos}
    if "carry" in lost and _write_equal_carry(saved, group, sections):
        lost.discard("carry")
    now = _layout(group.replicas, _stages(context))
    layouts = f"{_layout(saved.plan.replicas, saved.stages)}, now {now}"
    return [f"{kind} state of {layouts}" for kind in sorted(lost)]


def _write_equal_carry(saved: SavedRun, group: ReplicaGroup, sections: Sequence[str]) -> bool:
    """Sets the state that layers carry over batches, if all saved replicas had the same.

    Returns:
        Whether they had, and this group took it.
    """
    carries = [
        saved.checkpoint.read(section, [n for n in names if n.startswith(_CARRY)])
        for section in sections
        if (names := saved.checkpoint.tensors(section))
    ]
    first, *others = carries
    are_equal = all(
        other.keys() == first.keys() and all(np.array_equal(other[n], first[n]) for n in first)
        for other in others
    )
    return are_equal and not [
        name for replica in group.local_replicas for name in _write_refused(group, first, replica)
    ]


def _stages(context: SessionContext) -> int | list[int]:
    """Number of pipeline stages of this run, as `SavedRun.stages`."""
    return context.plan.device_mesh.to_dict().get(STAGE, 1)


def _layout(replicas: int, stages: int | list[int]) -> str:
    if isinstance(stages, list):
        processes = ", ".join(map(str, stages))
        return f"{counted(replicas, 'replica')} in stages of {processes} processes"
    return counted(replicas, "replica") + (f" in {stages} stages" if stages > 1 else "")


def _mean_state(saved: SavedRun, names: Collection[str]) -> dict[str, np.ndarray]:
    """Mean of the saved replicas' weights and optimizer state; integers are those of replica 0.

    Sums are float64; results have the dtype of the tensor.
    """
    first = saved.checkpoint.read(_FIRST_REPLICA, names)
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
    """Loads the state of the strategy; returns descriptions of what it cannot use."""
    same_replicas = saved.plan.replicas == group.replicas
    same_strategy = saved.plan.strategy == strategy.name
    lost = strategy.resume_notes(saved.plan.strategy, saved.plan.replicas, group.replicas)
    if not (same_replicas and same_strategy):
        strategy.state_written(group)
    if same_strategy:
        state = _strategy_state(saved, group.local_replicas if same_replicas else ())
        try:
            strategy.load_state(group, state)
        except (LookupError, TypeError, ValueError) as error:
            raise IsotrainError(
                f"{saved.checkpoint.location}: strategy {strategy.name!r} could not load its state:"
                f" {type(error).__name__}: {error}. It may have changed since, or have a fault."
            ) from error
    return lost


def _strategy_state(saved: SavedRun, replicas: Sequence[int]) -> StrategyState:
    sections = saved.checkpoint.sections()
    per_replica = {
        replica: saved.checkpoint.read(f"strategy-{replica}")
        for replica in replicas
        if f"strategy-{replica}" in sections
    }
    tensors = saved.checkpoint.read("strategy") if "strategy" in sections else {}
    return StrategyState(values=saved.strategy_values, tensors=tensors, per_replica=per_replica)
