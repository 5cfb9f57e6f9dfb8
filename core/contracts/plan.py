"""The plan of a run: the resolved settings, its backend part, and the differences between two plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from isotrain.core.contracts.device_mesh import DeviceMesh
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.contracts.state import StateBytes
from isotrain.core.errors import PlanError
from isotrain.core.pipeline.pipeline_plan import PipelinePlan
from isotrain.core.quantities import counted


@dataclass(frozen=True)
class StartMethod:
    """Method by which the processes of a run start: forked from a fork server, or as fresh interpreters.

    A fork server has imported the framework and run nothing of it. Forking is safe only after imports that
    start no runtime, open no device and leave no thread that matters: threads do not survive a fork.

    Attributes:
        imports: Modules that the fork server imports, in order.
        why_fresh: Reason why processes start as fresh interpreters; None if they are forked.
    """

    imports: tuple[str, ...] = ()
    why_fresh: str | None = None

    @property
    def way(self) -> Literal["forked", "fresh"]:
        """Start method in one word."""
        return "forked" if self.why_fresh is None else "fresh"


DeviceKind = Literal["cpu", "gpu"]
Hosts = tuple[tuple[int, ...], ...]
"""Replica indices of each host."""


@dataclass(frozen=True)
class BackendConfig:
    """Backend settings that the plan resolved, equal on all processes.

    Attributes:
        collective: Name of the collective; `none` with one replica.
        device: Kind of device.
        threads: Compute threads per replica.
        options: The spec's options for this backend, checked.
        timeout: Seconds without progress after which a collective fails.
    """

    collective: str
    device: DeviceKind
    threads: int
    options: Mapping[str, Any]
    timeout: float


@dataclass(frozen=True)
class Plan:
    """Resolved settings of a run.

    Attributes:
        run: Name of the run, from the spec.
        backend: Name of the backend.
        framework: Framework of the backend.
        collective: Collective that replicas communicate by; `none` for one replica.
        requested_collective: Collective requested by the user; None for the backend's default.
        strategy: Name of the strategy.
        strategy_options: Options of the strategy.
        launcher: Name of the launcher.
        launcher_options: Options of the launcher; None if the processes were started from outside.
        device: Kind of device.
        replicas: Number of replicas.
        threads: Compute threads per replica.
        processes: Processes by rank.
        start_method: Method by which the processes start.
        environment_variables: Environment variables set for every process before it starts.
        precision: Precision of the spec.
        global_batch_size: Samples per step over all replicas.
        local_batch_sizes: Samples per step of each replica, for a full global batch.
        gradient_accumulation_steps: Micro-batches per local batch.
        scaling: Scaling rule, with its factor on the spec's learning rate.
        optimizer: Name of the optimizer; `custom` for your own.
        learning_rate: Peak learning rate: after scaling and warm-up.
        timeouts: Timeouts in seconds: silence, start, progress.
        options: The spec's options for this backend.
        notes: Differences of what the backend does from what the spec says.
        warnings: What makes the run slow or fail, or leaves a part of it without effect: a run says it at its
            start, too.
        loggers: Names of the loggers.
        parallel_layout: Name of the parallel layout.
        device_mesh: Device mesh of the replicas and stages.
        extra_ports: Number of ports needed besides one per process.
        samples: Number of training samples; None until counted.
        steps_per_epoch: Steps per epoch; None until the samples are counted.
        total_steps: Steps of the run; None until known.
        first_learning_rate: Learning rate of the first step by the spec; None until the samples are counted.
        last_learning_rate: Learning rate of the last step by the spec; None until the samples are counted.
        parameters: Number of trainable parameters; None until the model is built.
        weight_shapes: Shapes of the trainable weights, in order; None until the model is built. Not in
            `to_dict`.
        gradient_bytes: Bytes of all gradients; None until the model is built.
        exchanged_bytes_per_step: Bytes sent per step by each replica, or each of its stages, on average; None
            until known.
        state_bytes: State on the replica that holds most of it; None until the model is built.
        activation_bytes: Bytes that the passes of a micro-batch take at most; None if not estimated.
        stages: Pipeline stages and schedule; None without stages, or until the model is built.
    """

    run: str
    backend: str
    framework: str
    collective: str
    strategy: str
    strategy_options: Mapping[str, Any]
    launcher: str
    device: DeviceKind
    replicas: int
    threads: int
    processes: tuple[ProcessInfo, ...]
    start_method: StartMethod
    environment_variables: Mapping[str, str]
    precision: str
    global_batch_size: int
    local_batch_sizes: tuple[int, ...]
    gradient_accumulation_steps: int
    scaling: str
    optimizer: str
    learning_rate: float
    timeouts: Mapping[str, float]
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    loggers: tuple[str, ...] = ()
    launcher_options: Mapping[str, Any] | None = None
    parallel_layout: str = "replicated"
    device_mesh: DeviceMesh = field(default_factory=DeviceMesh)
    extra_ports: int = 0
    requested_collective: str | None = None
    samples: int | None = None
    steps_per_epoch: int | None = None
    total_steps: int | None = None
    first_learning_rate: float | None = None
    last_learning_rate: float | None = None
    parameters: int | None = None
    weight_shapes: tuple[tuple[int, ...], ...] | None = None
    gradient_bytes: int | None = None
    exchanged_bytes_per_step: float | None = None
    state_bytes: StateBytes | None = None
    activation_bytes: int | None = None
    stages: PipelinePlan | None = None

    def __repr__(self) -> str:
        """Summary in one line; `isotrain plan` and `to_dict` show everything."""
        collective = "" if self.collective == "none" else f":{self.collective}"
        target = f"{self.backend}{collective}, {counted(self.replicas, 'replica')}"
        return f"<Plan of {self.run} on {target}, {self.strategy}, global batch {self.global_batch_size}>"

    @property
    def backend_config(self) -> BackendConfig:
        """The settings that adapters receive."""
        return BackendConfig(
            collective=self.collective,
            device=self.device,
            threads=self.threads,
            options=self.options,
            timeout=self.timeouts["progress"],
        )

    @property
    def hosts(self) -> Hosts:
        """Replica indices of each host."""
        return replicas_by_host(self.processes)

    @property
    def uses_parameter_server(self) -> bool:
        """Whether this is a parameter-server run, with a coordinator as rank 0."""
        return self.processes[0].role == "coordinator"

    @property
    def ports(self) -> int:
        """Number of ports that the run needs: one per process, and the extra ports."""
        return len(self.processes) + self.extra_ports

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        fields = asdict(self)
        del fields["weight_shapes"]
        fields["device_mesh"] = self.device_mesh.to_dict()
        fields["local_batch_sizes"] = list(self.local_batch_sizes)
        fields["notes"] = list(self.notes)
        fields["warnings"] = list(self.warnings)
        fields["loggers"] = list(self.loggers)
        fields["start_method"] = {
            "way": self.start_method.way,
            "why_fresh": self.start_method.why_fresh,
        }
        fields["processes"] = [
            {**asdict(process), "replicas": list(process.replicas)} for process in self.processes
        ]
        return fields


def replicas_by_host(processes: Sequence[ProcessInfo]) -> Hosts:
    """Replica indices of each host that has replicas, in the order of the hosts' first processes."""
    by_host: dict[str, set[int]] = {}
    for process in processes:
        by_host.setdefault(process.host, set()).update(process.replicas)
    return tuple(tuple(sorted(replicas)) for replicas in by_host.values() if replicas)


def hosts_of_size(owner: str, replicas: int, size: int) -> Hosts:
    """Replica indices of hosts with an equal number of consecutive replicas each.

    Args:
        owner: Owner of the option `host_size` for the error message, such as `strategy NAME`.
        replicas: Number of replicas in the run.
        size: Replicas per host.

    Raises:
        PlanError: `size` does not divide the number of replicas.
    """
    if replicas % size:
        raise PlanError(
            f"{owner}: host_size: expected a divisor of the {replicas} replicas, got {size}."
        )
    return tuple(tuple(range(first, first + size)) for first in range(0, replicas, size))


def split_backend(text: str) -> tuple[str, str | None]:
    """Splits `NAME:COLLECTIVE`, or `NAME` without a collective."""
    name, _, collective = text.partition(":")
    return name, collective or None


def backend_label(name: str, collective: str | None) -> str:
    """Inverse of `split_backend`."""
    return name if collective is None else f"{name}:{collective}"


def differences(first: Plan, second: Plan) -> list[tuple[str, Any, Any]]:
    """Fields in which two plans differ: name, first value, second value. Measured stage times are ignored."""
    return plain_differences(
        replace(first, stages=None).to_dict(), replace(second, stages=None).to_dict()
    )


def plain_differences(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Fields in which two plans as JSON values differ: dotted name, first value, second value."""
    one, two = flatten(first), flatten(second)
    keys = [*one, *(key for key in two if key not in one)]
    return [(key, one.get(key), two.get(key)) for key in keys if one.get(key) != two.get(key)]


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings into one with dotted names."""
    result: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            result |= flatten(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result
