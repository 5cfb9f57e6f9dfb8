"""Base class of the Horovod backends' adapters; imports Horovod only when a run starts."""

from __future__ import annotations

import contextlib
import importlib
import sys
from abc import abstractmethod
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from isotrain.adapters.common import nccl
from isotrain.adapters.common.layout_capabilities import layout_capabilities
from isotrain.adapters.horovod import build_info
from isotrain.adapters.keras import backend as keras_backend
from isotrain.plugin import (
    REPLICATED_CAPABILITIES,
    Availability,
    Capability,
    DeviceKind,
    Examination,
    PlanError,
    StartMethod,
    TcpParameterServer,
    UnsupportedError,
    visible_gpus,
)

if TYPE_CHECKING:
    from isotrain.plugin import Plan, TrainingSpec


_SHUT_DOWN = "Horovod has been shut down"
"""Text of the error of Horovod's TensorFlow operations, which have no exception class of Horovod."""
_GLOO = "/gloo/"
"""Folder of the source file that Gloo's errors name, which such operations pass on."""

INSTALL_HINT = "build it for the installed frameworks: python -m isotrain.build_horovod"
REBUILD_HINT = "rebuild it for the installed frameworks: python -m isotrain.build_horovod"
_BUILD_VARIABLES = {"mpi": "ISOTRAIN_HOROVOD_MPI=1 ", "nccl": "HOROVOD_GPU_OPERATIONS=NCCL "}
"""Environment variables with which Horovod is built with a collective that is off by default."""
COMPRESSIONS = ("none", "fp16")
_FP16_BYTES = 2
_REPLICATED = REPLICATED_CAPABILITIES.with_changes(
    has={Capability.ORDERED_SUMS},
    lacks={Capability.BFLOAT16_COLLECTIVES: "Horovod has no bfloat16: it is sent as float32"},
)
FRESH_UNDER_MPI = StartMethod(why_fresh="this Horovod was built with MPI, which cannot be forked")
_BY_DEVICE = {"cpu": "gloo", "gpu": "nccl"}


class Horovod(TcpParameterServer):
    """Adapter for Horovod, without a framework."""

    collectives = {
        "auto": "nccl on GPUs, gloo on CPUs",
        "gloo": "over TCP, for CPUs",
        "mpi": "for processes started by mpirun, if Horovod was built with MPI",
        "nccl": "NVIDIA's collectives, if Horovod was built with NCCL",
    }
    capabilities = layout_capabilities(_REPLICATED)
    replicated_options = frozenset({"compression", "groups"})
    options = {
        "compression": "none, or fp16: gradients are sent as float16",
        "fusion_threshold_mb": "size of Horovod's fusion buffer, MiB (128)",
        "cycle_time_ms": "how often Horovod looks for gradients that are ready, ms (1)",
        "groups": "all-reduce gradients in this many groups, each as a whole (1; torch, from 1 MiB of"
        " gradients on: each by itself as it becomes ready); 1 makes runs of three and more"
        " replicas repeatable to the bit",
    }

    def exchanged_bytes(self, plan: Plan, spec: TrainingSpec) -> float:
        """Bytes of an optimal all-reduce; with compression, of two bytes per parameter."""
        exact = super().exchanged_bytes(plan, spec)
        if plan.options.get("compression", "none") == "none" or not plan.gradient_bytes:
            return exact
        return exact * _FP16_BYTES * (plan.parameters or 0) / plan.gradient_bytes

    def _has_mpi_build(self) -> bool:
        """Whether Horovod loads an MPI library, which may keep threads and shared memory."""
        return self._is_built_with("mpi")

    @abstractmethod
    def framework_availability(self) -> Availability:
        """Whether the framework is installed. Imports nothing."""

    @abstractmethod
    def framework_private_api_changes(self) -> Availability | None:
        """Reason why the framework is unavailable: undocumented parts have changed; else None. Imports it."""

    def _is_built_with(self, collective: str) -> bool:
        build = build_info.installed(self.framework)
        return bool(
            build and build.extension and build_info.has_collective(build.extension, collective)
        )

    def availability(self) -> Availability:
        framework = self.framework_availability()
        if not framework.available:
            return framework
        build = build_info.installed(self.framework)
        if build is None:
            return Availability(False, None, "horovod is not installed", INSTALL_HINT)
        if build.extension is None:
            reason = f"this Horovod was built without {self.framework}"
            return Availability(False, build.version, reason, REBUILD_HINT)
        if not _is_version(build.framework_version, framework.version):
            reason = (
                f"this Horovod was built for {self.framework} {build.framework_version}, and"
                f" {framework.version} is installed"
            )
            return Availability(False, build.version, reason, REBUILD_HINT)
        return Availability(True, build.version)

    def examine(self) -> Examination:
        availability = self.availability()
        if not availability.available:
            return Examination(availability)
        keras_backend.set_backend(self.framework)
        try:
            hvd = importlib.import_module(f"horovod.{self.framework}")
            runtime = importlib.import_module("isotrain.adapters.horovod.runtime")
            built = {
                name: bool(getattr(hvd, f"{name}_built")()) for name in ("gloo", "mpi", "nccl")
            }
            with runtime.single_process(hvd) if built["gloo"] else contextlib.nullcontext():
                fault = self._private_api_changes(built, str(availability.version))
        except (Exception, SystemExit) as error:
            reason = f"horovod.{self.framework} cannot be loaded: {type(error).__name__}: {error}"
            return Examination(Availability(False, availability.version, reason, REBUILD_HINT))
        if fault:
            return Examination(fault, versions=self._versions())
        return Examination(availability, self._collectives(built), self._versions())

    def _private_api_changes(self, built: Mapping[str, bool], version: str) -> Availability | None:
        """Reason why it is unavailable: undocumented parts of libraries have changed. Horovod must run."""
        from isotrain.adapters.common import private_api
        from isotrain.adapters.horovod import private_api as private

        changes = self.framework_private_api_changes() or keras_backend.private_api_changes()
        probes = private.probes(self.framework, built)
        return changes or private_api.private_api_changes("Horovod", version, probes)

    def _collectives(self, built: Mapping[str, bool]) -> dict[str, Availability]:
        availabilities = {name: _built(has, name) for name, has in built.items()}
        if built["mpi"] and not build_info.started_by_mpi():
            availabilities["mpi"] = Availability(
                False, None, "not started by mpirun", "use an MPI launcher"
            )
        if built["nccl"]:
            availabilities["nccl"] = nccl.availability(self.accelerators(), instead="gloo")
        return {"auto": availabilities["nccl" if self.accelerators() else "gloo"], **availabilities}

    def _versions(self) -> dict[str, str]:
        return {
            build_info.DISTRIBUTION: metadata.version(build_info.DISTRIBUTION),
            self.framework: str(self.framework_availability().version),
            **keras_backend.version(),
        }

    def is_peer_error(self, error: BaseException) -> bool:
        if "horovod" not in sys.modules:
            return False
        from horovod.common.exceptions import HorovodInternalError

        text = str(error)
        is_of_operation = type(error).__module__.startswith(f"{self.framework}.") and _GLOO in text
        return isinstance(error, HorovodInternalError) or _SHUT_DOWN in text or is_of_operation

    def why_not_elastic(self, requires: frozenset[Capability]) -> str | None:
        build = build_info.installed(self.framework)
        if not (build and build.extension and build_info.survives_failed_start(build.extension)):
            return (
                "this build of Horovod ends all processes if one is lost while they connect;"
                f" {REBUILD_HINT}"
            )
        if Capability.SUBGROUPS in requires:
            return (
                "the strategy has subgroups, for which Horovod has process sets, and with these Horovod ends"
                " all processes when one is lost. Use strategy data-parallel"
            )
        return None

    def interrupt_group(self) -> None:
        if "horovod" in sys.modules:
            from isotrain.adapters.horovod import rendezvous

            rendezvous.interrupt()

    def abandon_group(self) -> None:
        if (hvd := sys.modules.get(f"horovod.{self.framework}")) is not None:
            from isotrain.adapters.horovod import runtime

            runtime.abandon(hvd)

    def accelerators(self) -> int:
        return visible_gpus() if self._is_built_with("nccl") else 0

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        name = self.collective_or_default(requested)
        if name == "auto":
            name = _BY_DEVICE[device]
        if (name == "nccl") != (device == "gpu") and name != "mpi":
            raise UnsupportedError(
                f"{self.name}:{name} does not support this run's device, {device}. Horovod's gloo"
                " supports CPUs, its nccl NVIDIA GPUs."
            )
        build = build_info.installed(self.framework)
        is_planned_elsewhere = name == "nccl"  # on this machine `accelerators` needs such a build
        if (
            not is_planned_elsewhere
            and build
            and build.extension
            and not build_info.has_collective(build.extension, name)
        ):
            raise UnsupportedError(
                f"{self.name}:{name}: this Horovod was built without {name}. Use"
                f" {self.name}:gloo, or build Horovod with it."
            )
        return name

    def check_options(
        self, spec: TrainingSpec, parallel_layout: str = "replicated"
    ) -> Mapping[str, Any]:
        options = super().check_options(spec, parallel_layout)
        if options and parallel_layout == "parameter-server":
            raise UnsupportedError(
                f"backend_options.{self.name}: parameter-server runs communicate over"
                f" {self.parameter_server_transport}, and do not use Horovod. Leave"
                f" {', '.join(options)} out."
            )
        return options

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        where = f"backend_options.{self.name}"
        compression = options.get("compression", "none")
        if compression not in COMPRESSIONS:
            raise PlanError(
                f"{where}.compression: expected one of {', '.join(COMPRESSIONS)}, received"
                f" {compression!r}."
            )
        _require_number(options, where, "fusion_threshold_mb", 0)
        _require_number(options, where, "cycle_time_ms", 0)
        groups = options.get("groups", 1)
        if not isinstance(groups, int) or groups < 1:
            raise PlanError(
                f"{where}.groups: expected an integer of 1 or more, received {groups!r}."
            )
        rounds = compression == "fp16" and replicas > 1
        note = "gradients are rounded to float16 when they are sent (compression: fp16)"
        return [note] if rounds else []


def _is_version(recorded: str | None, installed: str | None) -> bool:
    """Whether a build is for the installed framework; the metadata of CUDA builds lacks `+cu130`."""
    if recorded is None or installed is None:
        return True
    ours, theirs = recorded.split("+"), installed.split("+")
    return all(left == right for left, right in zip(ours, theirs, strict=False))


def _built(available: bool, name: str) -> Availability:
    if available:
        return Availability(True)
    hint = f"build it with: {_BUILD_VARIABLES.get(name, '')}python -m isotrain.build_horovod"
    return Availability(False, None, f"this Horovod was built without {name}", hint)


def _require_number(options: Mapping[str, Any], where: str, name: str, least: float) -> None:
    value = options.get(name, least)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise PlanError(
            f"{where}.{name}: expected a number of {least} or more, received {value!r}."
        )
