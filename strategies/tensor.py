"""Tensor parallelism: the processes of a replica each hold and compute a part of its large layers.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (arXiv
1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from isotrain.plugin import (
    TENSOR,
    Adapter,
    BackendConfig,
    Batch,
    Capability,
    FullyShardedGroup,
    Invariant,
    ModelBytes,
    Plan,
    ProcessContext,
    ReplicaGroup,
    ServerConnection,
    StateBytes,
    Strategy,
    Tensor,
    TensorParallelBackend,
    TrainingSpec,
    UnsupportedError,
    require,
)
from isotrain.strategies import option_checks
from isotrain.strategies.replica_processes import SharedReplicaLayout

_OBJECTIVE_NOTE = (
    "tensor: weights and inner activations of layers that are cut are those of one part: an objective may"
    " call the model, and must not read them. Leave the layers that it reads out of `layers`."
)


class TensorLayout(SharedReplicaLayout):
    """`degree` processes per replica, each with a part of the layers that are cut and all other weights."""

    name = "tensor"

    def __init__(self, degree: int, layers: Sequence[str] | Mapping[str, str] = ()) -> None:
        """Keeps the number of processes of a replica, and patterns of the layers to cut."""
        super().__init__(TENSOR, degree, "part of a replica")
        self._layers = layers

    def open(
        self,
        adapter: Adapter,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        server_connection: ServerConnection | None = None,
    ) -> ReplicaGroup:
        """Opens the group of this process, one part of a replica."""
        backend = require(adapter, TensorParallelBackend)
        return backend.start_tensor_parallel(spec, backend_config, context, self._layers)


class TensorParallel(Strategy):
    """Every step, the parts of a replica exchange activations; replicas average gradients part by part."""

    name = "tensor"
    summary = "synchronous: a replica's large layers cut over several processes (Megatron-LM)"
    requires = frozenset({Capability.SYNCHRONOUS_STEP, Capability.UNSHARD_WEIGHTS})
    parallel_layout = TensorLayout(2)
    keeps_replicas_equal = "always"
    equals_data_parallel = True
    invariants = frozenset({Invariant.GRADIENT_SUM})

    def __init__(
        self, degree: int = 2, layers: str | Sequence[str] | Mapping[str, str] = ()
    ) -> None:
        """Checks the options.

        Args:
            degree: Number of processes of each replica.
            layers: Names, or patterns of names, of the layers to cut; none for all that a rule finds. For a
                native model, names of modules with the styles in which they are cut.

        Raises:
            PlanError: An option has a bad value.
        """
        option_checks.whole_number(self.name, "degree", degree, 2)
        self.parallel_layout = TensorLayout(
            degree, layers if isinstance(layers, Mapping) else option_checks.names(layers)
        )

    def validate(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses what parts of layers cannot support, and notes what an objective sees of them.

        Raises:
            UnsupportedError: The spec has such a field, precision or optimizer.
        """
        option_checks.refuse_float16(self.name, spec, "scales no losses")
        option_checks.refuse_custom_optimizer(self.name, spec)
        if spec.optimizer.updates_whole_matrices:
            raise UnsupportedError(
                f"strategy {self.name}: optimizer {spec.optimizer.name} needs the whole gradient of a matrix,"
                " and each process has a part of it. Use strategy data-parallel."
            )
        if spec.recompute:
            raise UnsupportedError(
                f"strategy {self.name}: recompute: a layer that is computed again would communicate again."
                " Leave it out."
            )
        objectives = [spec.objective, *(each.objective for each in (spec.updates or {}).values())]
        return [_OBJECTIVE_NOTE] if any(objectives) else []

    def why_not_elastic(self) -> str:
        """Reason why the others cannot go on: a replica is several processes."""
        return (
            "the processes of a replica each have a part of its layers, and without one of them the others of"
            " that replica cannot step"
        )

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Runs one synchronous step on the global batch; returns the mean loss, a scalar."""
        return group.synchronous_step(batch, learning_rate)

    @contextmanager
    def evaluating(self, group: ReplicaGroup) -> Iterator[None]:
        """Gathers all weights on all processes, for what reads them; parts of replicas evaluate."""
        self.finished(group)
        yield

    def finished(self, group: ReplicaGroup) -> None:
        """Gathers all weights on all processes."""
        require(group, FullyShardedGroup).unshard_weights()

    def state_bytes(self, model: ModelBytes, replicas: int) -> StateBytes:
        """State of this process's parts and of all other weights, without weights gathered for evaluation."""
        trained = sum(model.weights) if model.local is None else model.local
        return StateBytes(trained + model.fixed, trained, trained * model.slots)
