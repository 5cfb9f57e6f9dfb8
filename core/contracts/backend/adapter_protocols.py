"""Runs under further parallel layouts: one protocol for each, which an adapter has by having its methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from isotrain.core.contracts.backend.capabilities import Capability

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.replica_group import ReplicaGroup
    from isotrain.core.contracts.plan import BackendConfig
    from isotrain.core.contracts.process import ProcessContext, ServerConnection
    from isotrain.core.pipeline.partition import PipelineSplit
    from isotrain.core.spec.training_spec import TrainingSpec


@runtime_checkable
class ParameterServerBackend(Protocol):
    """Adapter with parameter-server runs.

    The mixin `TcpParameterServer` is one for any backend, by `start` with one replica.
    """

    def servers(self, requested: int) -> int:
        """Number of parameter server processes, which hold parameters only, besides coordinator and workers.

        Args:
            requested: Number that the strategy requests.

        Raises:
            UnsupportedError: The backend does not support so many.
        """

    def start_parameter_server(
        self, spec: TrainingSpec, backend_config: BackendConfig, server_connection: ServerConnection
    ) -> ReplicaGroup:
        """Starts the coordinator of a parameter-server run; its group is a `ParameterServerGroup`."""

    def serve(
        self, spec: TrainingSpec, backend_config: BackendConfig, server_connection: ServerConnection
    ) -> None:
        """Runs a worker or server of a parameter-server run; returns when the coordinator has left."""


@runtime_checkable
class PipelineBackend(Protocol):
    """Adapter with pipeline runs."""

    def start_pipeline(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        split: PipelineSplit,
    ) -> ReplicaGroup:
        """Starts a process of a pipeline run; its group is a `PipelineGroup`.

        Args:
            spec: Training spec.
            backend_config: Backend settings that the plan resolved.
            context: Process context of this process.
            split: How the model's layers are split into stages.

        Raises:
            SpecError: The model cannot be split so.
        """


@runtime_checkable
class FullyShardedBackend(Protocol):
    """Adapter with fully sharded runs."""

    def start_fully_sharded(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        unit_bytes: int,
    ) -> ReplicaGroup:
        """Starts a process of a fully sharded run; its group is a `FullyShardedGroup`.

        Args:
            spec: Training spec.
            backend_config: Backend settings that the plan resolved.
            context: Process context of this process.
            unit_bytes: Bytes of weights to gather in one all-gather, where the model's modules allow it.

        Raises:
            UnsupportedError: The backend has no fully sharded runs of such models.
        """


@runtime_checkable
class TensorParallelBackend(Protocol):
    """Adapter with tensor-parallel runs, in which layers of a replica are cut over several processes."""

    def start_tensor_parallel(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        layers: Sequence[str] | Mapping[str, str],
    ) -> ReplicaGroup:
        """Starts a process of a tensor-parallel run; its group is a `FullyShardedGroup`. Collective.

        Args:
            spec: Training spec.
            backend_config: Backend settings that the plan resolved.
            context: Process context of this process, with an axis `tensor` in its device mesh.
            layers: Names, or patterns of names, of the layers to cut; empty for all that a rule finds.
                Modules of a native model, by name, with the style in which each is cut.

        Raises:
            SpecError: No layer can be cut, or one has fewer heads or units than there are parts.
        """


@runtime_checkable
class NamedUpdatesBackend(Protocol):
    """Adapter with runs of several named updates, in which each replica holds all weights."""

    def start_updates(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> Mapping[str, ReplicaGroup]:
        """Starts a process of a run with named updates. Collective.

        Args:
            spec: Training spec with `updates`.
            backend_config: Backend settings that the plan resolved.
            context: Process context of this process.

        Returns:
            For each update, in the order of the spec, a replica group over the same model. Its spec is
            `spec.for_update(name)`; its trainable weights are those that `weights` of the update matches,
            and only they are changed by its steps; all others count as non-trainable. Closing the first
            group leaves the process group; it is closed last.
        """


@dataclass(frozen=True)
class Message:
    """A collective, or a transfer, that a process takes part in.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `broadcast` or `send`.
        nbytes: Bytes of the unsharded tensors.
        ranks: Ranks of the processes that take part, or indices of replicas that are all in one process; of
            a transfer, sender and receiver.
        is_fused: Whether the backend may send it together with others that are ready at the same time.
    """

    kind: str
    nbytes: int
    ranks: tuple[int, ...]
    is_fused: bool = False


RECORDED = "recorded"
"""Collective by which a `RecordingBackend` opens a process group of one process."""


@runtime_checkable
class RecordingBackend(Protocol):
    """Adapter that can start rank 0 of a run alone, by the collective `RECORDED`, to count what it sends.

    Its process is as in a run, but for values: those of the other processes are taken to be its own. The
    coordinator of a parameter-server run, if there are such, is a `recorded_coordinator_group`.
    """

    def recorded_messages(self) -> AbstractContextManager[Sequence[Message]]:
        """Context that gives the messages of this process since it was entered. Local."""


ABSTRACT = "abstract"
"""Collective by which an `AbstractBackend` plans: as `RECORDED`, and large tensors have no values."""


@runtime_checkable
class AbstractBackend(Protocol):
    """`RecordingBackend` whose models can be built and trained without memory for their weights."""

    def without_values(self) -> AbstractContextManager[object]:
        """Context in which large tensors that are made have shapes and no values. Local.

        A run, its steps included, takes place in it. Reading a value of such a tensor raises an error.
        """

    def is_missing_value(self, error: BaseException) -> bool:
        """Whether an error, by itself, says that it takes a value that is not there. Local.

        An error of the model, the loss or the data, which there is with values too, does not.
        """


def takes_values(adapter: object, error: BaseException | None) -> bool:
    """Whether an error, or one that it came of, says that it takes values, which a plan lacks. Local."""
    assert isinstance(adapter, AbstractBackend), "others have no plans without values"
    while error is not None:
        if adapter.is_missing_value(error):
            return True
        error = error.__cause__ or error.__context__
    return False


BACKEND_PROTOCOLS: Mapping[type, frozenset[Capability]] = {
    ParameterServerBackend: frozenset({Capability.PARAMETER_SERVER_STEP}),
    PipelineBackend: frozenset({Capability.PIPELINE_STEP}),
    FullyShardedBackend: frozenset({Capability.UNSHARD_WEIGHTS}),
    TensorParallelBackend: frozenset(),
    NamedUpdatesBackend: frozenset(),
    RecordingBackend: frozenset(),
    AbstractBackend: frozenset(),
}
"""Protocol to the capabilities that an adapter declares with it."""
