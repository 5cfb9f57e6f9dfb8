"""The contract of an adapter: the code that connects one backend to isotrain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isotrain.core.contracts.backend.capabilities import (
    REPLICATED_CAPABILITIES,
    Availability,
    Capabilities,
    Capability,
    Examination,
)
from isotrain.core.contracts.plan import DeviceKind, StartMethod
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.contracts.state import ExportForm
from isotrain.core.errors import PlanError, UnsupportedError, unknown_name
from isotrain.core.system.version import installed_versions

if TYPE_CHECKING:
    from isotrain.core.contracts.backend.replica_group import ReplicaGroup
    from isotrain.core.contracts.plan import BackendConfig, Plan
    from isotrain.core.contracts.state import OptimizerStateNames
    from isotrain.core.spec.training_spec import TrainingSpec


class Adapter(ABC):
    """One backend: what it supports, and how a process of it starts.

    Importing and creating an adapter loads no framework, nor does any method but `examine` and the `start`
    and `serve` methods. Runs under further parallel layouts are protocols in `backend_protocols`.

    Attributes:
        name: Name of the backend.
        framework: Framework of its models: `torch`, `tensorflow`, ...
        summary: One line for listings.
        collectives: Collective name to a one-line description; the first is the default.
        replicas_per_process: `one`, or `all` if one process holds every replica of its host.
        capabilities: Parallel layout name to what its replica groups support; by default only layout
            `replicated`, with `REPLICATED_CAPABILITIES`. Layouts that are missing here are not supported.
        packages: Distributions whose installed versions are recorded with each run.
        ignored_log_lines: Regular expressions for the beginnings of log lines that also appear in healthy
            runs, and so explain no failure.
        options: Name to description of each supported option of `backend_options`.
        replicated_options: Options that only the parallel layout `replicated` supports.
        gpu_sharing_collectives: Collectives with which several replicas may share one GPU, where the spec
            says `device: gpu`; NCCL needs a GPU for each.
        sync_batchnorm_devices: Devices on which synchronized batch normalization over several replicas works.
        compiler: Compiler used where the spec says `compile`, such as `torch.compile`; None for none.
        has_optimizer_groups: Whether groups of weights may have optimizer options of their own.
        has_step_contexts: Whether objectives get a `StepContext` as their third argument.
        draws_per_sample: Whether random layers can draw by sample (`random_layers: per-sample`).
        has_per_replica_state: Whether replicas may keep non-trainable state for themselves.
        parameter_server_transport: Transport of parameter-server runs, such as `tcp`; `none` without them.
        exports: File formats that its `ExportingGroup` writes; `safetensors` is always supported besides.
        conformance_models: Module with native versions of the conformance kit's models (`probe_model`,
            `probe_objective`, `probe_step_objective` and `digits_model`), for backends that train no portable
            models.
        optimizer_state_names: Optimizer state names of its native models, to resume in another framework.
        program_hooks: By module, the import string of a function that hooks it in a program of others once
            it is imported, and tells a `ProgramRecorder` what the program does. `isotrain trace` sees no
            framework without.
    """

    name: ClassVar[str]
    framework: ClassVar[str]
    summary: ClassVar[str]
    collectives: ClassVar[Mapping[str, str]]
    replicas_per_process: ClassVar[Literal["one", "all"]] = "one"
    capabilities: ClassVar[Mapping[str, Capabilities]] = {"replicated": REPLICATED_CAPABILITIES}
    packages: ClassVar[tuple[str, ...]] = ()
    ignored_log_lines: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Mapping[str, str]] = {}
    replicated_options: ClassVar[frozenset[str]] = frozenset()
    gpu_sharing_collectives: ClassVar[frozenset[str]] = frozenset()
    sync_batchnorm_devices: ClassVar[frozenset[DeviceKind]] = frozenset()
    compiler: ClassVar[str | None] = None
    has_optimizer_groups: ClassVar[bool] = False
    has_step_contexts: ClassVar[bool] = False
    draws_per_sample: ClassVar[bool] = False
    has_per_replica_state: ClassVar[bool] = False
    parameter_server_transport: ClassVar[str] = "none"
    exports: ClassVar[frozenset[ExportForm]] = frozenset()
    conformance_models: ClassVar[str | None] = None
    optimizer_state_names: ClassVar[OptimizerStateNames | None] = None
    program_hooks: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def availability(self) -> Availability:
        """Whether the packages are installed; imports none of them."""

    def examine(self) -> Examination:
        """Imports the packages and tries what needs trying. Called in a subprocess, which may crash.

        The default imports nothing: every collective is available wherever the backend is.
        """
        availability = self.availability()
        collectives = dict.fromkeys(self.collectives, availability)
        return Examination(availability, collectives, installed_versions(self.packages))

    def accelerators(self) -> int:
        """Number of this machine's GPUs that the installed build of the framework can use."""
        return 0

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        """Name of the collective that the run will use.

        Args:
            requested: Collective requested by the user; None for the default.
            device: Kind of device.
            replicas: Number of replicas.

        Raises:
            UnsupportedError: The collective is unknown, or does not support the device.
        """
        if device == "gpu" and type(self).accelerators is Adapter.accelerators:
            raise UnsupportedError(f"backend {self.name!r} computes on CPUs only.")
        return self.collective_or_default(requested)

    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        """Environment variables to set before a process of this backend starts Python.

        Args:
            device: Kind of device.
            threads: Compute threads per replica.
            replicas: Number of replicas.
        """
        return {}

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        """Modules that a fork server preloads for this backend, or why its processes are not forked.

        The imports must not start the framework's runtime, open a device or start a thread that matters: none
        of these survives a fork. `environment_variables` are set before. Later runs of the same program reuse
        the fork server if they preload the same modules, so the result should depend little on `spec`.
        """
        return StartMethod(
            why_fresh=f"backend {self.name!r} does not declare that it can be forked"
        )

    @abstractmethod
    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        """Joins the process group and builds the model. Collective: called once by every process.

        A run with one replica starts no process group and opens no port.

        Args:
            spec: Training spec.
            backend_config: Backend settings that the plan resolved.
            context: Process context of this process.
        """

    def why_not_externally_started(self) -> str | None:
        """Reason why processes started from outside cannot form a run of this backend; None: they can.

        Any backend supports a single such process. Overridden by backends whose processes hold several
        replicas each and still communicate with each other.
        """
        if self.replicas_per_process == "all":
            return (
                "all its replicas are in one process, so several processes cannot form a run: have the"
                " launcher start one process, on the host whose devices it is to use"
            )
        return None

    def why_not_elastic(self, requires: frozenset[Capability]) -> str | None:
        """Reason why processes cannot go on in a new process group when another is lost; None: they can.

        Args:
            requires: Capabilities that the run's strategy requires.
        """
        return "its processes cannot leave a process group that has lost a member, and join another"

    def interrupt_group(self) -> None:  # noqa: B027  # doing nothing is a fine choice
        """Makes a call of this process's group that waits for another process fail. Local; on any thread.

        Called in elastic runs from when a member is lost, repeatedly. By default it does nothing: right where
        such calls fail by themselves once another member has abandoned the group.
        """

    def abandon_group(self) -> None:  # noqa: B027  # only elastic backends override it
        """Leaves the process group of this process without the others, whose calls then fail. Local.

        Called in elastic runs after a call of the group or `start` has failed, once its `ReplicaGroup` is
        dropped. `start` is called again afterwards. Does nothing where there is no process group.
        """

    def capabilities_for(self, parallel_layout: str) -> Capabilities:
        """Capabilities of its replica groups under the parallel layout of this name."""
        return self.capabilities.get(parallel_layout, Capabilities())

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        """Checks that the backend supports a spec.

        Args:
            spec: Training spec.
            options: Backend options, as `check_options` returned them.
            replicas: Number of replicas.

        Returns:
            Notes for the plan on what the backend does differently from what the spec says.

        Raises:
            UnsupportedError: The backend does not support something in the spec.
        """
        return []

    def check_layout(self, spec: TrainingSpec, parallel_layout: str) -> list[str]:
        """Checks that the backend supports a model under a parallel layout.

        Args:
            spec: Training spec.
            parallel_layout: Name of the parallel layout.

        Returns:
            Notes for the plan on how the model's state is laid out.

        Raises:
            UnsupportedError: The backend does not support such models under the parallel layout.
        """
        return []

    def is_peer_error(self, error: BaseException) -> bool:
        """Whether an error only says that another process of the run failed or left.

        Called in the process that raised it, which may have failed before it imported anything.
        """
        return False

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """Bytes that each replica sends per synchronous step; by default those of a ring all-reduce.

        Args:
            plan: Plan with the model's size: `parameters` and `gradient_bytes`.
            spec: Training spec.
        """
        return 2 * (plan.replicas - 1) / plan.replicas * (plan.gradient_bytes or 0)

    def check_options(
        self, spec: TrainingSpec, parallel_layout: str = "replicated"
    ) -> Mapping[str, Any]:
        """Returns the spec's options for this backend, checked.

        Args:
            spec: Training spec.
            parallel_layout: Name of the parallel layout.

        Raises:
            PlanError: An option is unknown.
            UnsupportedError: The parallel layout does not support an option.
        """
        options = spec.backend_options.get(self.name, {})
        for option in options:
            if option not in self.options:
                raise PlanError(
                    f"backend_options.{self.name}: " + unknown_name("option", option, self.options)
                )
            if option in self.replicated_options and parallel_layout != "replicated":
                raise UnsupportedError(
                    f"backend_options.{self.name}.{option}: it is about the all-reduce of gradients in"
                    f" data-parallel steps, which {parallel_layout} runs do not have. Leave it out."
                )
        return options

    def collective_or_default(self, requested: str | None) -> str:
        """Name of the requested collective, or of the default for None.

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
