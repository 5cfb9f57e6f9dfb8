"""Adapter of the reference backend: what it supports, and how its groups start. It needs only NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.plugin import (
    PARAMETER_SERVER_CAPABILITIES,
    REPLICATED_CAPABILITIES,
    Availability,
    BackendConfig,
    Capabilities,
    Capability,
    DeviceKind,
    ProcessContext,
    StartMethod,
    TcpParameterServer,
    UnsupportedError,
    sharded_group,
)

if TYPE_CHECKING:
    from isotrain.plugin import ReplicaGroup, TrainingSpec

_PRECISIONS = ("float32", "float64")
_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_UNSTAGED = Capabilities.none("its networks are not cut")
_REPLICATED = REPLICATED_CAPABILITIES.with_changes(
    has={Capability.ORDERED_SUMS}, lacks={Capability.BFLOAT16_COLLECTIVES: "NumPy has no bfloat16"}
)


class Reference(TcpParameterServer):
    """Backend for small networks in NumPy, one process per replica."""

    name = "reference"
    has_optimizer_groups = True
    framework = "numpy"
    summary = "NumPy with gradients written by hand, for tests"
    collectives = {"tcp": "through replica 0, summed in the order of the replicas"}
    packages = ("numpy",)
    capabilities = {
        "replicated": _REPLICATED,
        "parameter-server": PARAMETER_SERVER_CAPABILITIES,
        "sharded": sharded_group(_REPLICATED),
        "fully-sharded": Capabilities.none("in NumPy each replica has all weights"),
        "tensor": Capabilities.none("in NumPy each replica has all weights"),
        "pipeline": _UNSTAGED,
    }
    conformance_models = "isotrain.testing.reference.kit_models"

    def availability(self) -> Availability:
        return Availability(True, np.__version__)

    def check(self, spec: TrainingSpec, options: Mapping[str, Any], *, replicas: int) -> list[str]:
        if spec.precision not in _PRECISIONS:
            raise UnsupportedError(
                f"precision: backend {self.name!r} has {' and '.join(_PRECISIONS)}, received"
                f" {spec.precision!r}."
            )
        if spec.recompute:
            raise UnsupportedError(
                f"recompute: backend {self.name!r} keeps what each layer gives; its networks are small."
            )
        from isotrain.testing.reference.optimizers import require_known

        require_known(spec)
        return []

    def why_not_elastic(self, requires: frozenset[Capability]) -> str | None:
        return None

    def interrupt_group(self) -> None:
        from isotrain.testing.reference.comm import shut_down_all

        shut_down_all()

    def abandon_group(self) -> None:
        from isotrain.testing.reference.comm import shut_down_all

        shut_down_all().clear()

    def environment_variables(
        self, *, device: DeviceKind, threads: int, replicas: int
    ) -> dict[str, str]:
        return dict.fromkeys(_POOLS, str(threads))

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        package = "isotrain.testing.reference"
        return StartMethod(("numpy", __name__, f"{package}.comm", f"{package}.replica_group"))

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> ReplicaGroup:
        from isotrain.testing.reference.comm import Communicator
        from isotrain.testing.reference.replica_group import ReferenceGroup

        return ReferenceGroup(spec, Communicator(context, backend_config.timeout))


class NumPy(Reference):
    """The reference backend under the name by which users get it."""

    name = "numpy"
    summary = "small networks in NumPy, without a framework, to try isotrain"
