"""Backends with one fault each, to see that the conformance checks find it.

Registered by the hook that any plugin uses; the module is loaded where ISOTRAIN_PLUGINS names it. torch is
imported when a run starts, as adapters do.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from isotrain.adapters.torch.adapter import TorchDDP
from isotrain.core.contracts.capabilities import NO_WORKERS, Capabilities, Capability
from isotrain.core.contracts.plan import DeviceKind, Setting
from isotrain.core.contracts.process import ProcessContext
from isotrain.core.plugins.hookspecs import hookimpl
from isotrain.core.plugins.registers import BackendRegister
from isotrain.core.spec.training_spec import TrainingSpec

if TYPE_CHECKING:
    from isotrain.adapters.torch.group import TorchReplicaGroup


class _Broken(TorchDDP):
    """torch-ddp with a fault put into its replica group."""

    def start(
        self, spec: TrainingSpec, setting: Setting, context: ProcessContext
    ) -> TorchReplicaGroup:
        self.spec, group = spec, super().start(spec, setting, context)
        self.harm(group, group.exchange, context.rank)
        return group

    @abstractmethod
    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        """Puts the fault in."""


class IdentityAllReduce(_Broken):
    """An all-reduce that gives everybody what they gave."""

    name = "broken-identity-all-reduce"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        exchange.all_reduce = lambda value, op: value.clone()


class SumForMean(_Broken):
    """Gradients, losses and all else are summed where the mean is asked for."""

    name = "broken-sum-for-mean"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        right, finish, replicas = exchange.all_reduce, exchange.finish_gradients, exchange.replicas

        def all_reduce(value: Any, op: str) -> Any:
            return right(value, "sum" if op == "mean" else op)

        def finish_gradients() -> None:
            finish()
            for parameter in group.program.trainable.values():
                parameter.grad.mul_(replicas)

        exchange.all_reduce = all_reduce
        exchange.finish_gradients = finish_gradients
        exchange.begin_mean = lambda scalar: lambda: right(scalar, "sum")
        exchange.begin_loss = exchange.begin_mean


class DroppedSlice(_Broken):
    """The last replica takes part in everything, and its samples do not count in training."""

    name = "broken-dropped-slice"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        if rank != exchange.replicas - 1:
            return
        right = exchange.module

        class Dropping:
            """The forward pass with a loss of nothing."""

            no_sync = staticmethod(right.no_sync)

            def __call__(self, inputs: Any, targets: Any) -> Any:
                loss, predictions = right(inputs, targets)
                return loss * 0.0, predictions

        exchange.module = Dropping()


class SilentBroadcast(_Broken):
    """A broadcast that reaches nobody but its root."""

    name = "broken-silent-broadcast"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        exchange.broadcast_within = lambda value, parts: value.clone()


class CountedPlaceholders(_Broken):
    """Evaluation takes the placeholder of an empty slice for a sample."""

    name = "broken-counted-placeholders"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        from dataclasses import replace

        right = group.evaluation_step

        def evaluation_step(batch: Any) -> None:
            slices = tuple(
                tuple(replace(piece, count=max(piece.count, 1)) for piece in pieces)
                for pieces in batch.slices
            )
            right(replace(batch, slices=slices))

        group.evaluation_step = evaluation_step


class TrainsToPredict(_Broken):
    """Predictions are made in training mode."""

    name = "broken-trains-to-predict"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        group.program.predict = lambda inputs: group.model(inputs, training=True)


class OwnStart(_Broken):
    """Every replica starts from weights of its own."""

    name = "broken-own-start"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        state = group.read_state(("trainable",))
        group.write_state({name: value + rank for name, value in state.items()})


class ForgetsMetrics(_Broken):
    """Takes back all state but what the metrics have added up."""

    name = "broken-forgets-metrics"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        right = group.write_state

        def write_state(state: Any, *, replica: int | None = None) -> None:
            kept = {n: value for n, value in state.items() if not n.startswith("metrics/")}
            right(kept, replica=replica)

        group.write_state = write_state


class Careless(TorchDDP):
    """Accepts collectives that it does not have, and leaves a capability out without a word."""

    name = "broken-careless"
    capabilities = {
        **TorchDDP.capabilities,
        "replicated": Capabilities(
            TorchDDP.capabilities["replicated"].has - {Capability.SEND_RECEIVE}, NO_WORKERS
        ),
    }

    def resolve_collective(
        self, requested: str | None, *, device: DeviceKind, replicas: int
    ) -> str:
        return super().resolve_collective(None, device=device, replicas=replicas)


class NoisyClose(_Broken):
    """Cannot leave the run without an error."""

    name = "broken-noisy-close"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        right = group.close

        def close() -> None:
            right()
            raise RuntimeError("left in anger")

        group.close = close


class DiesInABarrier(_Broken):
    """Takes the process down, and so all checks after that."""

    name = "broken-dies-in-a-barrier"

    def harm(self, group: Any, exchange: Any, rank: int) -> None:
        if rank == 1:
            group.barrier = lambda: os._exit(7)


BROKEN = (
    IdentityAllReduce,
    SumForMean,
    DroppedSlice,
    SilentBroadcast,
    CountedPlaceholders,
    TrainsToPredict,
    OwnStart,
    ForgetsMetrics,
    Careless,
    NoisyClose,
    DiesInABarrier,
)


@hookimpl
def isotrain_register_backends(register: BackendRegister) -> None:
    """Registers every one of them."""
    for adapter in BROKEN:
        register.add(adapter)
