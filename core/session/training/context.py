"""Set-up of a session: builds replica group, data loaders, initial weights and strategy."""

from __future__ import annotations

from dataclasses import dataclass

from isotrain.core.contracts.backend.adapter_protocols import NamedUpdatesBackend
from isotrain.core.contracts.backend.group_protocols import GROUP_PROTOCOLS
from isotrain.core.contracts.backend.protocol_checks import require, require_protocols
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.backend.step_context import takes_step
from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.contracts.events import Warned
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import ProcessContext, ServerConnection
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.contracts.state import ALL_STATE, ModelBytes
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.data.dataset import DataSet
from isotrain.core.data.identity import DataIdentity
from isotrain.core.data.sources import ShardedStream
from isotrain.core.data.streaming.streams import BatchStream
from isotrain.core.errors import PluginError, SpecError, UnsupportedError, first_of
from isotrain.core.planning.model_stats import ModelStats, complete_plan
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.session.training.consensus import require_same_data
from isotrain.core.session.training.dataloaders import DataLoaders, load_data
from isotrain.core.session.training.named_updates import NamedUpdatesGroup
from isotrain.core.session.training.part_shares import PartShares
from isotrain.core.session.training.shared_streams import share_streams
from isotrain.core.session.training.slow_links import replicas_with_slow_links
from isotrain.core.session.weights.frozen_models import spec_with_models
from isotrain.core.session.weights.initial_weights import LoadReport, load_initial_weights
from isotrain.core.session.weights.weights_file import require_storable
from isotrain.core.spec import import_strings
from isotrain.core.spec.initial_weights import matches
from isotrain.core.spec.optimizer_groups import group_notes, require_match
from isotrain.core.spec.optimizers import CustomOptimizer
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.process import gc_paused
from isotrain.core.system.version import versions

_MAX_LISTED = 6

_OWN_SCHEDULE_NOTE = (
    "optimizer.custom: the rate of each step is that of the optimizer's own learning-rate schedule; `lr` is"
    " only an argument of the function"
)

_OWN_SCHEDULER_NOTE = (
    "optimizer.custom: its own learning-rate scheduler sets the rates; shown are those of its first parameter"
    " group"
)
_EMA_NOTE = (
    "optimizer.custom: when training ends, the moving averages of the optimizer (use_ema) replace the"
    " weights; evaluations and checkpoints before that use the weights themselves"
)


@dataclass(frozen=True)
class SessionContext:
    """The objects that one process trains with, built once.

    Attributes:
        spec: The training spec.
        plan: The plan of the run, completed with the numbers of samples and parameters.
        group: The replica group of this process.
        index_in_replica: Index of this process among those of its replica's pipeline; 0 without a pipeline.
        strategy: The strategy that takes the training steps.
        loaders: Data loaders for training and evaluation.
        initial_weights: Report on the initial weights that the spec names; None where it names none.
        packages: Names of the packages that take part in the run.
        compared_data: Identity of the data, which is that of all processes; None in a run of one.
        shares: Shares of the replicas in each global batch; None where these stay as they are planned.
    """

    spec: TrainingSpec
    plan: Plan
    group: ReplicaGroup
    index_in_replica: int
    strategy: Strategy
    loaders: DataLoaders
    initial_weights: LoadReport | None
    packages: tuple[str, ...]
    compared_data: DataIdentity | None
    shares: PartShares | None

    def versions(self) -> dict[str, str]:
        """Versions of Python and of the packages, by name."""
        return versions(self.packages)


def build_session_context(
    resolved_spec: ResolvedSpec,
    plan: Plan,
    context: ProcessContext,
    reporter: Reporter,
    server_connection: ServerConnection | None,
    *,
    resumes: bool,
    data: DataSet | None = None,
) -> SessionContext:
    """Builds the model, connects to the other processes and loads the data, as `Session` says. Collective.

    Args:
        data: Data set that this process has loaded already; None: it is loaded.
    """
    reporter.enter("build model")
    spec, adapter = resolved_spec.spec, resolved_spec.plugins.backend(plan.backend)
    with gc_paused():  # it imports the framework
        strategy = resolved_spec.strategy
        group = open_group(resolved_spec, plan, context, server_connection)
    _require_objective_with_step(spec, plan.framework)
    if spec.checkpoint is not None:
        require_storable(group, ALL_STATE)
    reporter.enter("load data")  # by now the framework is set up, which data may be made with
    loaded = load_data(spec) if data is None else data
    data, reader = share_streams(spec, context, group, loaded)
    loaders = DataLoaders(spec, plan, group, data, context, reader)
    compared_data = require_same_data(group, loaders.data, context.rank, plan)
    if spec.elastic is not None:
        _require_elastic(group, loaders.data)
    initial_weights = load_initial_weights(spec, plan, group, resumes=resumes)
    model_stats = _model_stats(spec, group, loaders, initial_weights)
    completed_plan = complete_plan(plan, resolved_spec, model_stats)
    strategy.started(group)
    mesh = context.device_mesh
    index = mesh.index_in_group(context.rank, STAGE) if STAGE in mesh.sizes else 0
    return SessionContext(
        spec,
        completed_plan,
        group,
        index,
        strategy,
        loaders,
        initial_weights,
        adapter.packages,
        compared_data,
        _part_shares(spec, group, loaders.data, reporter),
    )


def _part_shares(
    spec: TrainingSpec, group: ReplicaGroup, data: DataSet, reporter: Reporter
) -> PartShares | None:
    """Shares by speed; None without `shares`, or in a run of one replica. Collective.

    Raises:
        UnsupportedError: The training data are a stream, with `shares` or `verify_every`.
    """
    if isinstance(data.train, BatchStream | ShardedStream):
        for field in ("shares", "verify_every"):
            if getattr(spec, field) is not None:
                raise UnsupportedError(
                    f"{field}: the training data are a stream, which cannot be cut anew. Give data by"
                    f" position, or leave `{field}` out of the spec."
                )
    if spec.shares is None or spec.parts is None:
        return None
    if group.replicas == 1:
        return None
    reporter.enter("measure links")
    clients = replicas_with_slow_links(group)
    if clients and reporter.rank == 0:
        names = first_of([str(each) for each in clients], _MAX_LISTED)
        text = f"shares: others sum the gradients for replicas whose network is slow: {names}"
        reporter.emit(Warned(text=text))
    return PartShares(group, spec.parts, spec.shares.every, clients)


def _require_elastic(group: ReplicaGroup, data: DataSet) -> None:
    """Refuses elastic runs with data or state that the other processes do not have.

    Raises:
        UnsupportedError: The training data are a stream, or layers or the optimizer keep such state.
    """
    reason = None
    if isinstance(data.train, BatchStream | ShardedStream):
        reason = "the training data are a stream, which cannot be cut anew. Give data by position"
    elif group.describe_state(("carry",)):
        reason = "layers carry state from batch to batch, and that of a lost replica is lost"
    elif group.needs_closure():
        reason = "the optimizer computes the loss several times in a step. Use another"
    if reason:
        raise UnsupportedError(f"elastic: {reason}. Or leave `elastic` out of the spec.")


def _require_objective_with_step(spec: TrainingSpec, framework: str) -> None:
    """Refuses values and frozen models that no objective of the spec or of its updates gets.

    Raises:
        SpecError: None of the objectives takes a step.
    """
    if not (spec.values or spec.frozen):
        return
    updates = spec.update_specs.values()
    functions = [
        import_strings.resolve(each.for_framework("objective", framework))
        for each in updates
        if each.objective is not None
    ]
    if not any(map(takes_step, functions)):
        field = "values" if spec.values else "frozen"
        raise SpecError(
            f"{field}: {', '.join(map(import_strings.describe, functions)) or 'loss'} has no third parameter,"
            " by which an objective gets them. Let it take (model, batch, step)."
        )


def open_group(
    resolved_spec: ResolvedSpec,
    plan: Plan,
    context: ProcessContext,
    server_connection: ServerConnection | None,
) -> ReplicaGroup:
    """Builds the replica group, and checks that it has the methods of what its backend declares. Collective.

    Raises:
        PluginError: It lacks methods.
    """
    adapter = resolved_spec.plugins.backend(plan.backend)
    layout = resolved_spec.strategy.parallel_layout.for_replicas(plan.replicas)
    spec, config = spec_with_models(resolved_spec), plan.backend_config
    try:
        if spec.updates:
            groups = dict(
                require(adapter, NamedUpdatesBackend).start_updates(spec, config, context)
            )
        else:
            groups = {"": layout.open(adapter, spec, config, context, server_connection)}
    except PluginError as error:
        error.args = (f"backend {plan.backend!r}: {error}",)
        raise
    for group in groups.values():
        require_protocols(
            group,
            GROUP_PROTOCOLS,
            adapter.capabilities_for(layout.name).has,
            f"backend {plan.backend!r} with groups {type(group).__name__} of layout {layout.name!r}",
        )
    return NamedUpdatesGroup(groups) if spec.updates else groups[""]


def _model_stats(
    spec: TrainingSpec,
    group: ReplicaGroup,
    loaders: DataLoaders,
    initial_weights: LoadReport | None,
) -> ModelStats:
    weights = group.describe_state(("trainable",)).values()
    return ModelStats(
        samples=loaders.samples_per_epoch,
        steps_per_epoch=loaders.steps_per_epoch,
        parameters=sum(weight.size for weight in weights),
        gradient_bytes=sum(weight.full_nbytes for weight in weights),
        weight_shapes=[weight.shape for weight in weights],
        notes=setup_notes(spec, group, initial_weights, loaders),
        model=model_bytes(spec, group),
    )


def model_bytes(spec: TrainingSpec, group: ReplicaGroup) -> ModelBytes:
    """Bytes of the model's state, read from the group before its strategy starts. Local.

    The number of optimizer slots per weight is the spec's; a custom optimizer's is estimated from the state
    that it has created by now.
    """
    trainable = group.describe_state(("trainable",)).values()
    non_trainable = group.describe_state(("non-trainable",)).values()
    weights = tuple(info.full_nbytes for info in trainable)
    created = sum(info.full_nbytes for info in group.describe_state(("optimizer",)).values())
    optimizers = [each.optimizer for each in spec.update_specs.values()]
    is_custom = any(isinstance(each, CustomOptimizer) for each in optimizers)
    named_slots = max(len(each.slots) for each in optimizers)
    slots = round(created / max(1, sum(weights))) if is_custom else named_slots
    fixed = sum(info.full_nbytes for info in non_trainable)
    return ModelBytes(weights, fixed, slots, sum(info.nbytes for info in trainable))


def setup_notes(
    spec: TrainingSpec,
    group: ReplicaGroup,
    initial_weights: LoadReport | None,
    loaders: DataLoaders,
) -> list[str]:
    """Plan notes on initial weights, data, learning rates and the model's execution. Local."""
    notes = [] if initial_weights is None else initial_weights.notes()
    for name, each in spec.update_specs.items():
        trainable = group.updates[name].describe_state(("trainable",))
        notes += group_notes(each.optimizer, list(trainable))
    for part, patterns in spec.gradient_norm_parts.items():
        names = list(group.describe_state(("trainable",)))
        require_match(f"gradient_norm.{part}", patterns, names)
    notes += _untrained_notes(spec, group)
    notes += loaders.notes()
    notes += [] if group.optimizer_lr_schedule() is None else [_OWN_SCHEDULE_NOTE]
    notes += [] if group.optimizer_rates() is None else [_OWN_SCHEDULER_NOTE]
    notes += [] if group.weight_finalizer() is None else [_EMA_NOTE]
    return [*notes, *group.plan_notes(), *state_notes(spec, group)]


def _untrained_notes(spec: TrainingSpec, group: ReplicaGroup) -> list[str]:
    """Plan note on weights that no named update changes; none without updates. Local."""
    if not spec.updates:
        return []
    patterns = [pattern for update in spec.updates.values() for pattern in update.weights]
    untrained = [
        name
        for name, info in group.describe_state(("non-trainable",)).items()
        if "int" not in info.dtype and not matches(name, patterns) and not spec.is_frozen(name)
    ]
    if not untrained:
        return []
    listed = first_of(untrained, _MAX_LISTED)
    return [f"updates: weights that fit no update, and are not trained: {listed}"]


def state_notes(spec: TrainingSpec, group: ReplicaGroup) -> list[str]:
    """Plan notes on state that the run's checkpoints cannot hold; none without checkpoints. Local."""
    lost = [] if spec.checkpoint is None else group.not_checkpointed()
    return [f"checkpoint: a resumed run does not have {each}" for each in lost]
