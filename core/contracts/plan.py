"""A run, resolved: what a plan holds, what adapters are told of it, and what differs between two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from isotrain.core.contracts.device_mesh import DeviceMesh
from isotrain.core.contracts.process import Role, runs_the_loop
from isotrain.core.contracts.state import StateBytes
from isotrain.core.errors import PlanError
from isotrain.core.pipeline.pipeline_plan import PipelinePlan


@dataclass(frozen=True)
class StartMethod:
    """How the processes of a run come to be.

    They are forked from one process that has imported the framework and run nothing of it, or each
    of them starts by itself. Forking is safe only after imports that start no runtime, open no
    device and leave no thread that matters: threads do not survive it.

    Attributes:
        imports: What that process imports, in this order.
        why_fresh: Why there is no such process; None where there is.
    """

    imports: tuple[str, ...] = ()
    why_fresh: str | None = None

    @property
    def way(self) -> Literal["forked", "fresh"]:
        """How, in a word."""
        return "forked" if self.why_fresh is None else "fresh"


DeviceKind = Literal["cpu", "gpu"]
Hosts = tuple[tuple[int, ...], ...]
"""The replicas of each host."""


@dataclass(frozen=True)
class BackendConfig:
    """What the plan resolved for every process of a run.

    Attributes:
        collective: The collective that will be used; `none` with one replica.
        device: `cpu` or `gpu`.
        threads: Compute threads per replica.
        options: The spec's options for this backend, checked.
        timeout: Seconds after which a collective that makes no progress is an error.
    """

    collective: str
    device: DeviceKind
    threads: int
    options: Mapping[str, Any]
    timeout: float


@dataclass(frozen=True)
class ProcessPlan:
    """One process of the run, and the replicas that live in it."""

    rank: int
    host: str
    local_rank: int
    replicas: tuple[int, ...]
    role: Role = "replica"

    @property
    def has_session(self) -> bool:
        """Whether it runs the loop; the others serve one that does."""
        return runs_the_loop(self.role)


@dataclass(frozen=True)
class Plan:
    """A run, resolved.

    Attributes:
        run: The spec's name.
        backend: Its registered name.
        framework: The framework under it.
        collective: What replicas will really exchange with; `none` for one replica.
        requested_collective: The collective that was asked for; None: whichever the backend takes.
        strategy: The strategy's name.
        strategy_options: Its options.
        launcher: What starts the processes.
        launcher_options: Its options; None: an engine has started the processes, and they join.
        device: `cpu` or `gpu`.
        replicas: Of the model, in all.
        threads: Compute threads per replica.
        processes: Who runs where.
        start_method: How they come to be.
        environment_variables: Set for every process before it starts.
        precision: The spec's.
        global_batch_size: Samples of one step over all replicas.
        local_batch_sizes: Each replica's share of a full global batch, in samples.
        gradient_accumulation_steps: Micro-batches that each share is cut into.
        scaling: The rule, and the factor it puts on the spec's learning rate.
        optimizer: Its name; `custom`: one of the spec's own.
        learning_rate: After scaling, at the end of any warm-up.
        timeouts: Seconds: silence, start, progress.
        options: The spec's options for this backend.
        notes: What the backend honours in its own way.
        loggers: Names of those that write down how the run goes.
        parallel_layout: The name of how state lies over the processes.
        device_mesh: Its places, by axis.
        extra_ports: Ports that the processes need besides one for each.
        samples: In the training data; None until they were counted.
        steps_per_epoch: None until the samples were counted.
        total_steps: Of the run; None until known.
        parameters: Trainable numbers in the model; None until it was built.
        weight_shapes: Of the trainable weights, in order; None until it was built. Not in `to_dict`.
        gradient_bytes: Their size; None until it was built.
        exchanged_bytes_per_step: Sent by each replica in one step, or by each of its stages, on average; None
            until known.
        state_bytes: What the model's state takes on the replica that has most of it; None until it was built.
        stages: How the model's layers lie in them and take turns; None without stages, or until it was built.
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
    processes: tuple[ProcessPlan, ...]
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
    loggers: tuple[str, ...] = ()
    launcher_options: Mapping[str, Any] | None = None
    parallel_layout: str = "replicated"
    device_mesh: DeviceMesh = field(default_factory=DeviceMesh)
    extra_ports: int = 0
    requested_collective: str | None = None
    samples: int | None = None
    steps_per_epoch: int | None = None
    total_steps: int | None = None
    parameters: int | None = None
    weight_shapes: tuple[tuple[int, ...], ...] | None = None
    gradient_bytes: int | None = None
    exchanged_bytes_per_step: float | None = None
    state_bytes: StateBytes | None = None
    stages: PipelinePlan | None = None

    def __repr__(self) -> str:
        """In a line; `isotrain plan` and `to_dict` show all of it."""
        collective = "" if self.collective == "none" else f":{self.collective}"
        plural = "" if self.replicas == 1 else "s"
        where = f"{self.backend}{collective}, {self.replicas} replica{plural}"
        return f"<Plan of {self.run} on {where}, {self.strategy}, global batch {self.global_batch_size}>"

    @property
    def backend_config(self) -> BackendConfig:
        """What adapters are told about it."""
        return BackendConfig(
            collective=self.collective,
            device=self.device,
            threads=self.threads,
            options=self.options,
            timeout=self.timeouts["progress"],
        )

    @property
    def hosts(self) -> Hosts:
        """The replicas of each host."""
        return replicas_by_host(self.processes)

    @property
    def uses_parameter_server(self) -> bool:
        """Whether rank 0 is a coordinator, and the others work for it."""
        return self.processes[0].role == "coordinator"

    @property
    def ports(self) -> int:
        """One for each process, and those where they meet besides."""
        return len(self.processes) + self.extra_ports

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        fields = asdict(self)
        del fields["weight_shapes"]
        fields["device_mesh"] = dict(self.device_mesh.sizes)
        fields["local_batch_sizes"] = list(self.local_batch_sizes)
        fields["notes"] = list(self.notes)
        fields["loggers"] = list(self.loggers)
        fields["start_method"] = {
            "way": self.start_method.way,
            "why_fresh": self.start_method.why_fresh,
        }
        fields["processes"] = [
            {**asdict(process), "replicas": list(process.replicas)} for process in self.processes
        ]
        return fields


def replicas_by_host(processes: Sequence[ProcessPlan]) -> Hosts:
    """The replicas of each host, of hosts that have some; in the order of their first processes."""
    found: dict[str, set[int]] = {}
    for process in processes:
        found.setdefault(process.host, set()).update(process.replicas)
    return tuple(tuple(sorted(replicas)) for replicas in found.values() if replicas)


def hosts_of_size(whose: str, replicas: int, size: int) -> Hosts:
    """Takes so many consecutive replicas for a host.

    Args:
        whose: The option `host_size`, for the error.
        replicas: In all.
        size: Of each host.

    Raises:
        PlanError: It divides not the number of replicas.
    """
    if replicas % size:
        raise PlanError(
            f"{whose}: host_size: expected a divisor of the {replicas} replicas, got {size}."
        )
    return tuple(tuple(range(first, first + size)) for first in range(0, replicas, size))


def split_backend(text: str) -> tuple[str, str | None]:
    """Splits `NAME:COLLECTIVE`; the collective may be left out."""
    name, _, collective = text.partition(":")
    return name, collective or None


def backend_label(name: str, collective: str | None) -> str:
    """What `split_backend` has split."""
    return name if collective is None else f"{name}:{collective}"


def differences(first: Plan, second: Plan) -> list[tuple[str, Any, Any]]:
    """The fields in which two plans differ: name, the first's value, the second's; not in what was timed."""
    one, two = (replace(plan, stages=None).to_dict() for plan in (first, second))
    return plain_differences(one, two)


def plain_differences(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """As `differences`, of plans as plain values."""
    one, two = flat(first), flat(second)
    keys = [*one, *(key for key in two if key not in one)]
    return [(key, one.get(key), two.get(key)) for key in keys if one.get(key) != two.get(key)]


def flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns nested mappings into one level with dotted names."""
    result: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[prefix + key] = value
    return result
