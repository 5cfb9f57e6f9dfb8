"""Backends that train almost as torch-ddp does, each with one fault, to see that `parity` names it.

Registered by the hook that any plugin uses; the module is loaded where ISOTRAIN_PLUGINS names it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from isotrain.adapters.torch.adapter import TorchDDP
from isotrain.core.contracts.plan import BackendConfig
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.plugins.hookspecs import hookimpl
from isotrain.core.plugins.registries import BackendRegistry
from isotrain.core.spec.training_spec import TrainingSpec

if TYPE_CHECKING:
    from isotrain.adapters.torch.replica.replica_group import TorchReplicaGroup


class Faulty(TorchDDP):
    """torch-ddp with a fault put into its replica group."""

    def start(
        self, spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext
    ) -> TorchReplicaGroup:
        self.spec, group = spec, super().start(spec, backend_config, context)
        self.harm(group, group.communicator, context.rank)
        return group

    @abstractmethod
    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        """Puts the fault in."""


class SumForMean(Faulty):
    """Gradients, losses and all else are summed where the mean is asked for."""

    name = "parting-sum-for-mean"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        right, finish, replicas = exchange.all_reduce, exchange.wait_gradients, exchange.replicas

        def all_reduce(value: Any, op: str) -> Any:
            return right(value, "sum" if op == "mean" else op)

        def wait_gradients() -> None:
            finish()
            for parameter in group.trainer.trainable.values():
                parameter.grad.mul_(replicas)

        exchange.all_reduce = all_reduce
        exchange.wait_gradients = wait_gradients
        exchange.all_reduce_mean_async = lambda scalar: lambda: right(scalar, "sum")
        exchange.reduce_loss_async = exchange.all_reduce_mean_async


class ClippedBeforeReduction(Faulty):
    """Every replica clips its own gradients, and only then are they averaged."""

    name = "parting-clipping-before-reduction"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        import torch

        from isotrain.adapters.torch.comm.base import all_reduce_mean_flat

        assert self.spec.clip is not None
        bound = self.spec.clip.global_norm
        exchange.module = group.trainer.loss_module  # without the hooks that exchange gradients
        exchange.reduce_loss_async = exchange.all_reduce_mean_async

        def wait_gradients() -> None:
            parameters = list(group.trainer.trainable.values())
            torch.nn.utils.clip_grad_norm_(parameters, bound)
            all_reduce_mean_flat(exchange, [parameter.grad for parameter in parameters], 1.0)

        exchange.wait_gradients = wait_gradients


class OwnStatistics(Faulty):
    """Every replica keeps moving statistics of its own."""

    name = "parting-batch-norm-not-synced"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        group.statistics = []


class DuplicatedPadding(Faulty):
    """Replicas with fewer samples repeat their last one, as if it were one more."""

    name = "parting-duplicated-padding"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        from dataclasses import replace

        import torch

        from isotrain.core.data.pytree import map_tree

        def padded(batch: Any) -> Any:
            (micro_batch,) = batch.slices[0]
            missing = -(-batch.size // group.replicas) - micro_batch.count

            def longer(tensor: Any) -> Any:
                return torch.cat([tensor, *([tensor[-1:]] * missing)])

            full = replace(
                micro_batch,
                inputs=map_tree(longer, micro_batch.inputs),
                targets=map_tree(longer, micro_batch.targets),
                weight=1.0,
            )
            return replace(batch, slices=((full,),))

        step, gradients = group.synchronous_step, group.gradients
        group.synchronous_step = lambda batch, rate: step(padded(batch), rate)
        group.gradients = lambda batch: gradients(padded(batch))


class PaddedSteps(DuplicatedPadding):
    """Pads batches in the synchronous step alone."""

    name = "parting-padded-steps"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        right = group.gradients
        super().harm(group, exchange, rank)
        group.gradients = right


class EpsilonInside(Faulty):
    """Adam with its epsilon under the square root."""

    name = "parting-epsilon-elsewhere"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        import torch

        from isotrain.adapters.keras import private as keras_private

        clip = self.spec.clip
        bound = None if clip is None else clip.global_norm
        optimizer, weights = group.trainer.optimizer, list(group.trainer.trainable.values())
        slots = keras_private.slots_of(optimizer)

        class Update:
            """In the place of the program's own."""

            rate = 0.0

            def forget(self) -> None:
                """Does nothing."""

            def __call__(self, gradients: Any, global_norm: Any = None) -> None:
                if bound is not None:
                    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
                    gradients = [gradient * bound / norm.clamp(min=bound) for gradient in gradients]
                optimizer.iterations.assign_add(1)
                steps = float(optimizer.iterations.value)
                correction = (1 - optimizer.beta_2**steps) ** 0.5 / (1 - optimizer.beta_1**steps)
                moments = zip(slots["momentum"], slots["velocity"], strict=True)
                for weight, gradient, (one, two) in zip(weights, gradients, moments, strict=True):
                    first, second = one.value, two.value
                    first.mul_(optimizer.beta_1).add_(gradient, alpha=1 - optimizer.beta_1)
                    second.mul_(optimizer.beta_2).add_(gradient**2, alpha=1 - optimizer.beta_2)
                    root = (second + optimizer.epsilon).sqrt()
                    weight.sub_(self.rate * correction * first / root)

        group.trainer.update = Update()


class OtherStreams(Faulty):
    """Dropout draws the numbers of another replica."""

    name = "parting-dropout-streams"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        group.trainer.seed_replica(rank + 5)


class HalfPrecision(Faulty):
    """Matrix products and means of float64 numbers are computed in float32."""

    name = "parting-float64-in-float32"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        from keras.src.backend.common import dtypes

        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float32"


DIVERGING = (
    SumForMean,
    ClippedBeforeReduction,
    OwnStatistics,
    DuplicatedPadding,
    PaddedSteps,
    EpsilonInside,
    OtherStreams,
    HalfPrecision,
)


@hookimpl
def isotrain_register_backends(register: BackendRegistry) -> None:
    """Registers every one of them."""
    for adapter in DIVERGING:
        register.add(adapter)
