"""torch-ddp with the arithmetic of GPUs, as it is and with a fault.

The module is loaded where ISOTRAIN_PLUGINS names it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from plugins.diverging_backends import ClippedBeforeReduction, EpsilonInside, OwnStatistics

from isotrain.adapters.torch.adapter import TorchDDP
from isotrain.core.contracts.plan import BackendConfig
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.plugins.hookspecs import hookimpl
from isotrain.core.plugins.registries import BackendRegistry
from isotrain.core.spec.training_spec import TrainingSpec

if TYPE_CHECKING:
    from isotrain.adapters.torch.replica.replica_group import TorchReplicaGroup


class SummedByNCCL(TorchDDP):
    """Gradients are summed in the order of an algorithm of NCCL, in a dtype."""

    algorithm: ClassVar[str]
    dtype: ClassVar[str | None] = None

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> TorchReplicaGroup:
        import torch
        import torch.distributed as dist
        from helpers import gpu_arithmetic

        group = super().start(spec, backend_config, context)
        communicator = group.communicator
        sum_of = getattr(gpu_arithmetic, f"{self.algorithm}_sum")
        dtype = self.dtype and getattr(torch, self.dtype)

        def total(tensor: torch.Tensor) -> torch.Tensor:
            sent = tensor.to(dtype or tensor.dtype)
            terms = [torch.empty_like(sent) for _ in range(context.world_size)]
            dist.all_gather(terms, sent)
            return sum_of(terms).to(tensor.dtype)

        def finished(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(tensor)
            return future

        communicator.module.register_comm_hook(
            None, lambda _, bucket: finished(total(bucket.buffer() / context.world_size))
        )
        return group


class Ring(SummedByNCCL):
    name = "gpu-ring"
    algorithm = "ring"


class Tree(SummedByNCCL):
    name = "gpu-tree"
    algorithm = "tree"


class RingInHalf(SummedByNCCL):
    name = "gpu-ring-float16"
    algorithm = "ring"
    dtype = "float16"


class TreeInBfloat16(SummedByNCCL):
    name = "gpu-tree-bfloat16"
    algorithm = "tree"
    dtype = "bfloat16"


class Kernels(TorchDDP):
    """Matrix products of TF32, and reductions in another order in each process and run."""

    name = "gpu-kernels"
    changed: ClassVar[tuple[str, ...]] = ("rounded", "shuffled")

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> TorchReplicaGroup:
        from helpers.gpu_arithmetic import GPUKernels

        group = super().start(spec, backend_config, context)
        kernels, close = GPUKernels(os.getpid()), group.close
        kernels.__enter__()

        def close_with_kernels() -> None:
            kernels.__exit__(None, None, None)
            assert all(getattr(kernels, each) for each in self.changed)
            close()

        group.close = close_with_kernels  # type: ignore[method-assign]
        return group


class Scatters(Kernels):
    """For models with a table, whose gradient adds rows in another order."""

    name = "gpu-scatters"
    changed = (*Kernels.changed, "scattered")


class KernelsAndEpsilon(Kernels, EpsilonInside):
    name = "gpu-kernels-and-epsilon"


class TreeAndEpsilon(Tree, EpsilonInside):
    name = "gpu-tree-and-epsilon"


class RingAndStatistics(OwnStatistics, Ring):
    name = "gpu-ring-and-statistics"


class KernelsAndClipping(Kernels, ClippedBeforeReduction):
    name = "gpu-kernels-and-clipping"


RIGHT = (Ring, Tree, Kernels)
IN_16_BITS = (RingInHalf, TreeInBfloat16)
FAULTY = (KernelsAndEpsilon, KernelsAndClipping, TreeAndEpsilon, RingAndStatistics)


@hookimpl
def isotrain_register_backends(register: BackendRegistry) -> None:
    """Registers every one of them."""
    for adapter in (*RIGHT, Scatters, *IN_16_BITS, *FAULTY):
        register.add(adapter)
