"""Declares `horovod-torch`; imports Horovod and torch only when a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.adapters.common.layout_capabilities import layout_capabilities
from isotrain.adapters.horovod import build_info
from isotrain.adapters.horovod.base_adapter import FRESH_UNDER_MPI, Horovod
from isotrain.adapters.torch.base_adapter import TorchAdapter
from isotrain.plugin import (
    RECORDED,
    BackendConfig,
    Capability,
    DeviceKind,
    ProcessContext,
    StartMethod,
)

if TYPE_CHECKING:
    from isotrain.adapters.torch.comm.base import Communicator
    from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
    from isotrain.plugin import TrainingSpec


class HorovodTorch(TorchAdapter, Horovod):
    """Horovod's DistributedOptimizer under torch replicas."""

    name = "horovod-torch"
    capabilities = layout_capabilities(
        Horovod.capabilities["replicated"].with_changes(
            lacks={
                Capability.ASYNCHRONOUS_COLLECTIVES: (
                    "Horovod's collectives run one after the other, so that a step's loss would wait"
                )
            }
        ),
    )
    packages = (build_info.DISTRIBUTION, "torch", "keras")
    summary = "Horovod under PyTorch, one process per replica"

    def preload(self, spec: TrainingSpec, *, device: DeviceKind) -> StartMethod:
        if self._has_mpi_build():
            return FRESH_UNDER_MPI
        return self.forked(spec, device, __name__, "isotrain.adapters.horovod.torch_comm")

    def connect(self, backend_config: BackendConfig, context: ProcessContext) -> Communicator:
        if backend_config.collective == RECORDED:
            from isotrain.adapters.horovod.torch_recorded import RecordedCommunicator

            return RecordedCommunicator(context, backend_config)
        from isotrain.adapters.horovod.torch_comm import HorovodCommunicator

        return HorovodCommunicator(context, backend_config)

    def connect_pipeline(
        self, backend_config: BackendConfig, context: ProcessContext
    ) -> PipelineCommunicator:
        from isotrain.adapters.horovod.torch_pipeline_comm import HorovodPipelineCommunicator

        return HorovodPipelineCommunicator(backend_config, context)
