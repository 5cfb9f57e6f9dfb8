"""The contract of an adapter: the code that binds one backend to the neutral interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isotrain.core.contracts.capabilities import Capabilities
from isotrain.core.contracts.plan import DeviceKind, StartMethod
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.contracts.state import ExportForm
from isotrain.core.errors import PlanError, UnsupportedError, unknown_name
from isotrain.core.pipeline.partition import PipelineSplit

if TYPE_CHECKING:
    from isotrain.core.contracts.capabilities import Availability, Examination
    from isotrain.core.contracts.plan import BackendConfig, Plan
    from isotrain.core.contracts.process import ServerConnection
    from isotrain.core.contracts.replica_group import ReplicaGroup
    from isotrain.core.contracts.state import OptimizerStateNames
    from isotrain.core.spec.training_spec import TrainingSpec


class Adapter(ABC):
    """Declares one backend and starts a process's share of it.

    Creating one, and every method but `examine` and `start`, imports no framework.

    Attributes:
        name: The backend's name.
        framework: `torch`, `tensorflow`, ...
        summary: One line for listings.
        collectives: Name to a one-line meaning; the first is what is used unless one is asked for.
        replicas_per_process: `one`, or `all` when one process holds every replica of its host.
        capabilities: By the name of a parallel_layout, what its replica groups can do, and why not the
            rest; it has no runs of a parallel layout of which it declares nothing.
        packages: The distributions whose installed versions a run's record has.
        ignored_log_lines: Patterns of how lines begin that its libraries write to logs of healthy runs too:
            they explain no failure.
        options: The names of `backend_options` it knows, with their meaning.
        replicated_options: Those of them that say nothing to groups of any parallel layout but `replicated`.
        sync_batchnorm_devices: The devices on which a layer that asks for statistics of the global
            batch (synchronised batch normalisation) gets them from several replicas.
        compiler: What translates the model where a spec says `compile`; None where nothing does.
        parameter_server_transport: With what the processes of a parameter-server run exchange, where it has
            parameter-server runs.
        exports: The forms in which its groups write models to files, but for `safetensors`, which needs none.
        conformance_models: Where it trains no portable models, the module that has the conformance kit's
            models in its own words: `probe_model`, `probe_objective` and `digits_model`.
        optimizer_state_names: How optimizers of its native models keep slots, for who goes on in another
            framework.
    """

    name: ClassVar[str]
    framework: ClassVar[str]
    summary: ClassVar[str]
    collectives: ClassVar[Mapping[str, str]]
    replicas_per_process: ClassVar[Literal["one", "all"]]
    capabilities: ClassVar[Mapping[str, Capabilities]]
    packages: ClassVar[tuple[str, ...]] = ()
    ignored_log_lines: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Mapping[str, str]] = {}
    replicated_options: ClassVar[frozenset[str]] = frozenset()
    sync_batchnorm_devices: ClassVar[frozenset[DeviceKind]] = frozenset()
    compiler: ClassVar[str | None] = None
    parameter_server_transport: ClassVar[str] = "none"
    exports: ClassVar[frozenset[ExportForm]] = frozenset()
    conformance_models: ClassVar[str | None] = None
    optimizer_state_names: ClassVar[OptimizerStateNames | None] = None

    @abstractmethod
    def availability(self) -> Availability:
        """Looks whether the packages are installed, importing none of them."""

    @abstractmethod
    def examine(self) -> Examination:
        """Loads everything for real. Called in a process of its own, which it may bring down."""

    @abstractmethod
    def accelerators(self) -> int:
        """How many GPUs of this machine the installed build of the framework can use."""

    @abstractmethod
    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        """Names the collective that will really be used.

        Raises:
            UnsupportedError: It is unknown, or cannot work on this device.
        """

    @abstractmethod
    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        """Variables that must be set before a process of this backend starts Python."""

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        """What a process of this backend imports before it knows its run, if it can be forked then.

        Nothing that is imported may run the framework: no runtime, no device, no thread that matters.
        What `environment_variables` returns is set by then. Other runs of the same program are forked from
        the same process if they import the same, so `spec` should bear on little.
        """
        return StartMethod(why_fresh=f"backend {self.name!r} does not say that it can be forked")

    @abstractmethod
    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        """Joins the run and builds the model. Called once by every process.

        A run with one replica starts no process group and opens no port.
        """

    def servers(self, asked: int) -> int:
        """How many processes that only hold parameters a parameter-server run has besides its workers.

        Args:
            asked: As many as the strategy wants, where the backend has such.

        Raises:
            UnsupportedError: It cannot have so many.
        """
        if asked > 1:
            raise UnsupportedError(
                f"backend {self.name!r} keeps the parameters of a parameter-server run in rank 0, and cannot"
                f" spread them over {asked} servers."
            )
        return 0

    def start_parameter_server(
        self, spec: TrainingSpec, backend_config: BackendConfig, server_connection: ServerConnection
    ) -> ReplicaGroup:
        """Starts the coordinator of a parameter-server run: a group with `parameter_server_step`.

        Raises:
            UnsupportedError: It has no parameter-server runs. `TcpParameterServer` gives a backend those
                that need nothing of it but `start` with one replica.
        """
        raise UnsupportedError(f"backend {self.name!r} has no parameter-server runs.")

    def serve(
        self, spec: TrainingSpec, backend_config: BackendConfig, server_connection: ServerConnection
    ) -> None:
        """Runs a worker or server of a parameter-server run; returns when the coordinator is gone."""
        raise UnsupportedError(f"backend {self.name!r} has no parameter-server runs.")

    def start_pipeline(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        cut: PipelineSplit,
    ) -> ReplicaGroup:
        """Starts a process of a pipeline run: a group with `pipeline_step`.

        Raises:
            UnsupportedError: It has no pipeline runs.
            SpecError: The model cannot be cut so.
        """
        raise UnsupportedError(f"backend {self.name!r} has no pipeline runs.")

    def start_fully_sharded(
        self,
        spec: TrainingSpec,
        backend_config: BackendConfig,
        context: ProcessContext,
        unit_bytes: int,
    ) -> ReplicaGroup:
        """Starts a process of a fully sharded run: a group with `synchronous_step` and `unshard_weights`.

        Args:
            spec: What to train.
            backend_config: What the plan resolved.
            context: This process's place.
            unit_bytes: Of weights that are joined together, where the model's modules allow it.

        Raises:
            UnsupportedError: It has no fully sharded runs, or not of such models.
        """
        raise UnsupportedError(f"backend {self.name!r} has no fully sharded runs.")

    def why_not_externally_started(self) -> str | None:
        """Why processes that an engine has started cannot become a run of this backend; None: they can.

        Any backend runs in a process that is alone. Overridden by one whose processes hold several
        replicas and yet exchange with each other.
        """
        if self.replicas_per_process == "all":
            return (
                "all its replicas are in one process, so several processes cannot be one run: have the"
                " engine start one process, on the host whose devices it is to use"
            )
        return None

    def capabilities_for(self, parallel_layout: str) -> Capabilities:
        """What its replica groups of a parallel layout of this name can do."""
        return self.capabilities.get(parallel_layout, Capabilities())

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        """Refuses what this backend cannot honour.

        Args:
            spec: What to train.
            options: What `check_options` gave.
            replicas: With how many.

        Returns:
            Remarks about what it honours in its own way, for the plan.

        Raises:
            UnsupportedError: The spec asks for something the backend cannot do.
        """
        return []

    def check_layout(self, spec: TrainingSpec, parallel_layout: str) -> list[str]:
        """Refuses models whose state its groups of a parallel layout cannot lay out.

        Args:
            spec: What to train.
            parallel_layout: Its name.

        Returns:
            Remarks about how it lays out the others, for the plan.

        Raises:
            UnsupportedError: The model is such a one.
        """
        return []

    def is_peer_error(self, error: BaseException) -> bool:
        """Whether an error tells that another process of the run is gone, and not of a fault here.

        Asked in the process that raised it, which may have failed before anything was imported.
        """
        return False

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """Bytes each replica sends per synchronised step; an optimal all-reduce unless overridden.

        Args:
            plan: With the measures of the model: `parameters` and `gradient_bytes`.
            spec: What is trained.
        """
        return 2 * (plan.replicas - 1) / plan.replicas * (plan.gradient_bytes or 0)

    def check_options(
        self, spec: TrainingSpec, parallel_layout: str = "replicated"
    ) -> Mapping[str, Any]:
        """Returns the spec's options for this backend.

        Args:
            spec: What to train.
            parallel_layout: The name of how its state will lie.

        Raises:
            PlanError: One of them is unknown.
            UnsupportedError: Groups of the parallel layout would not honour one.
        """
        given = spec.backend_options.get(self.name, {})
        for option in given:
            if option not in self.options:
                raise PlanError(
                    f"backend_options.{self.name}: " + unknown_name("option", option, self.options)
                )
            if option in self.replicated_options and parallel_layout != "replicated":
                raise UnsupportedError(
                    f"backend_options.{self.name}.{option}: it is about how the gradients of data-parallel"
                    f" steps are exchanged, of which {parallel_layout} runs have none. Leave it out."
                )
        return given

    def collective_or_default(self, requested: str | None) -> str:
        """Returns the requested collective or the default.

        Raises:
            UnsupportedError: The backend has no collective of that name.
        """
        if requested is None:
            return next(iter(self.collectives))
        if requested not in self.collectives:
            raise UnsupportedError(
                f"backend {self.name!r}: " + unknown_name("collective", requested, self.collectives)
            )
        return requested
