"""What a session works with, made once at its start: data, model, replicas, strategy."""

from __future__ import annotations

from dataclasses import dataclass

from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.process import ProcessContext, ServerConnection
from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.contracts.state import ALL_STATE, ModelBytes
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.data.sources import ShardedStream
from isotrain.core.planning.model_stats import ModelStats, complete_plan
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.session.training.consensus import require_same_data
from isotrain.core.session.training.dataloaders import DataLoaders, load_data
from isotrain.core.session.weights.initial_weights import LoadReport, load_initial_weights
from isotrain.core.session.weights.weights_file import require_storable
from isotrain.core.spec.optimizers import CustomOptimizer
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system.process import gc_paused
from isotrain.core.system.version import versions

_SCHEDULED = (
    "optimizer.custom: the rate of each step is that of the optimizer's own learning-rate schedule; `lr` is"
    " only what the function is called with"
)

_BY_OPTIMIZER = (
    "optimizer.custom: a learning-rate scheduler of its own sets its rates; shown are those of its first"
    " group of weights"
)
_AVERAGED = (
    "optimizer.custom: when training ends, the averages that the optimizer keeps (use_ema) replace the"
    " weights; evaluations and checkpoints before that are of the weights themselves"
)


@dataclass(frozen=True)
class SessionContext:
    """What one process trains with.

    Attributes:
        spec: What is trained.
        plan: How, completed with the numbers of samples and parameters.
        group: The replicas of this process.
        stage: Which of its replica's this process is; 0 where replicas lie in no stages.
        strategy: By which they take their steps.
        loaders: Make the batches.
        initial_weights: What became of those that the spec names; None where it names none.
        packages: That take part in the run.
    """

    spec: TrainingSpec
    plan: Plan
    group: ReplicaGroup
    stage: int
    strategy: Strategy
    loaders: DataLoaders
    initial_weights: LoadReport | None
    packages: tuple[str, ...]

    def versions(self) -> dict[str, str]:
        """Of Python and of the packages."""
        return versions(self.packages)


def build_session_context(
    cast: ResolvedSpec,
    plan: Plan,
    context: ProcessContext,
    reporter: Reporter,
    server_connection: ServerConnection | None,
    *,
    resumes: bool,
) -> SessionContext:
    """Builds the model, joins the other processes and loads the data.

    Args:
        cast: What is trained, and what takes part.
        plan: How.
        context: This process's place.
        reporter: Is told what goes on.
        server_connection: What it is told besides, where it was launched.
        resumes: Whether a checkpoint is loaded next.
    """
    reporter.enter("build model")
    spec, adapter = cast.spec, cast.host.backend(plan.backend)
    with gc_paused():  # it imports the framework
        strategy = cast.strategy
        parallel_layout = strategy.parallel_layout.for_replicas(plan.replicas)
        group = parallel_layout.open(
            adapter, cast.spec_with_model, plan.backend_config, context, server_connection
        )
    if spec.checkpoint is not None:
        require_storable(group, ALL_STATE)
    reporter.enter("load data")  # by now the framework is set up, which data may be made with
    loaders = DataLoaders(spec, plan, group, load_data(spec))
    require_same_data(group, loaders.data, context.rank, plan)
    initial = load_initial_weights(spec, plan, group, resumes=resumes)
    measured = _measured(spec, group, loaders, initial)
    completed = complete_plan(plan, cast, measured)
    strategy.started(group)
    stage = context.device_mesh.coordinates(context.rank).get(STAGE, 0)
    return SessionContext(
        spec, completed, group, stage, strategy, loaders, initial, adapter.packages
    )


def _measured(
    spec: TrainingSpec, group: ReplicaGroup, loaders: DataLoaders, initial: LoadReport | None
) -> ModelStats:
    weights = group.describe_state(("trainable",)).values()
    train = loaders.data.train
    return ModelStats(
        samples=None if isinstance(train, ShardedStream) else len(train),
        parameters=sum(weight.size for weight in weights),
        gradient_bytes=sum(weight.full_nbytes for weight in weights),
        weight_shapes=[weight.shape for weight in weights],
        notes=setup_notes(spec, group, initial, loaders),
        model=model_bytes(spec, group),
    )


def model_bytes(spec: TrainingSpec, group: ReplicaGroup) -> ModelBytes:
    """What the state of the model takes, as the group has it before its strategy starts. Local.

    A person's own optimizer may have made its slots by then; those of others the spec knows.
    """
    trained = group.describe_state(("trainable",)).values()
    fixed = group.describe_state(("non-trainable",)).values()
    weights = tuple(info.full_nbytes for info in trained)
    made = sum(info.full_nbytes for info in group.describe_state(("optimizer",)).values())
    own = isinstance(spec.optimizer, CustomOptimizer)
    slots = round(made / max(1, sum(weights))) if own else len(spec.optimizer.slots)
    return ModelBytes(weights, sum(info.full_nbytes for info in fixed), slots)


def setup_notes(
    spec: TrainingSpec, group: ReplicaGroup, initial: LoadReport | None, loaders: DataLoaders
) -> list[str]:
    """What became of initial weights and data, and how the group uses the model in its own way. Local."""
    of_weights = [] if initial is None else initial.notes()
    of_rates = [] if group.optimizer_lr_schedule() is None else [_SCHEDULED]
    of_rates += [] if group.optimizer_rates() is None else [_BY_OPTIMIZER]
    of_averages = [] if group.weight_finalizer() is None else [_AVERAGED]
    own = [*of_weights, *loaders.notes(), *of_rates, *of_averages, *group.plan_notes()]
    return [*own, *state_notes(spec, group)]


def state_notes(spec: TrainingSpec, group: ReplicaGroup) -> list[str]:
    """What checkpoints, where they are asked for, cannot hold of the group's state. Local."""
    lost = [] if spec.checkpoint is None else group.not_checkpointed()
    return [f"checkpoint: a run that goes on has not {each}" for each in lost]
