"""Trainer of a fully sharded portable (Keras) model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch
from torch import nn

from isotrain.adapters.common import weight_sharding
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.weight_sharding import named_like, require_shardable
from isotrain.adapters.torch.base.tensors import TensorOrShard, overwrite
from isotrain.adapters.torch.comm.base import Communicator
from isotrain.adapters.torch.graph.trace import Compute
from isotrain.adapters.torch.optim.keras_foreach import keras_update
from isotrain.adapters.torch.sharded.saved_tensors import GatheredReads
from isotrain.adapters.torch.sharded.trainer import ShardedTrainer
from isotrain.adapters.torch.sharded.weights import ShardedWeights
from isotrain.adapters.torch.trainer.keras import KerasTrainer
from isotrain.plugin import DeviceMesh, IsotrainError, SpecError, TrainingSpec, unknown_name


@contextlib.contextmanager
def gather_on_read(weights: ShardedWeights, variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Context in which a Keras model computes with sharded weights, gathered, unsharded in shape, on read.

    Args:
        weights: Sharded weights.
        variables: Trainable variables of the model, in the same order.

    Raises:
        SpecError: A layer takes gradients by torch.func.
    """
    reads = GatheredReads(weights)
    with reads.without_saving_weights(), _GatheringScope(reads, variables):
        yield


class _GatheringScope(keras.StatelessScope):
    """Keras scope that replaces sharded weights' values by gathered ones, in unsharded shapes."""

    def __init__(self, reads: GatheredReads, variables: Sequence[keras.Variable]) -> None:
        super().__init__(collect_losses=True)
        self._reads = reads
        self._indices = {id(variable): index for index, variable in enumerate(variables)}

    def get_current_value(self, variable: keras.Variable) -> torch.Tensor | None:
        """Gathered value of a sharded weight, in the dtype that autocast reads it in; None for others."""
        index = self._indices.get(id(variable))
        if index is None:
            return None
        sample = keras_private.autocast_value(variable, self._reads.empty_like(index))
        return self._reads.read(index, sample.dtype)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Sets a variable that is not a sharded weight to a value of its shape, as outside of any scope.

        Raises:
            SpecError: The variable is a sharded weight.
        """
        variable, value = update
        if id(variable) in self._indices:
            raise SpecError(
                f"strategy sharded: a layer sets its trainable weight {variable.path} in a forward pass, and"
                " with stage=3 no replica has all of it. Use stage 1 or 2."
            )
        with torch.no_grad():
            variable.value.copy_(value)


class ShardedKerasTrainer(ShardedTrainer, KerasTrainer):
    """Trainer of a Keras model whose sharded weights are gathered as its layers read them."""

    def __init__(
        self, spec: TrainingSpec, model: keras.Model, frozen: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._indices: dict[int, int] = {}
        self._loss_computers: dict[bool, Compute] = {}
        super().__init__(spec, model, frozen)

    def shard_weights(self, communicator: Communicator, mesh: DeviceMesh, unit_bytes: int) -> None:
        self._require_shardable()
        paths = [variable.path for variable in self._variables]
        sizes = [variable.value.nbytes for variable in self._variables]
        units = weight_sharding.fsdp_units(paths, sizes, unit_bytes, "/")
        self.weights = ShardedWeights(self.trainable, units, communicator, mesh)
        self._updated_variables = list(map(_variable, paths, self.weights.local_shards))
        self._build_optimizer_state()

    def _require_shardable(self) -> None:
        require_shardable(dict(zip(self.trainable, self._variables, strict=True)))
        wrapped = [
            layer.name
            for layer in keras_private.layers_of(self.model)
            if isinstance(layer, keras.layers.TorchModuleWrapper) and layer.trainable_weights
        ]
        if wrapped:
            raise SpecError(
                f"strategy sharded: {', '.join(wrapped)}: stage=3 gathers weights as Keras reads them, and a"
                " torch module in a Keras model reads its weights without Keras. Use stage 1 or 2."
            )

    def _build_optimizer_state(self) -> None:
        """Builds the state variables for this replica's shards; nothing before the weights are sharded."""
        self.updated = []
        if self.weights is None:
            return
        variables = self._updated_variables
        self.updated = [variable.value for variable in variables]
        self.optimizer.build(variables)
        groups = self._use_groups()
        self.update = keras_update(
            self._spec, self.optimizer, variables, self.weights.norms, groups
        )
        assert self.update is not None, (
            "only weights that `_require_shardable` refuses need Keras' own update"
        )
        self._indices = {
            id(slot): index
            for slots in keras_private.slots_of(self.optimizer).values()
            for index, slot in enumerate(slots)
        }

    def _graph_cache(self, spec: TrainingSpec, training: bool) -> Compute:
        """The eager computation: a captured graph would need all weights when it begins."""
        self._loss_computers[training] = self._make_loss_computer(spec, training)
        return functools.partial(self._compute_gathered, self._loss_computers[training])

    def _compute_gathered(
        self, compute: Compute, inputs: Any, targets: Any
    ) -> tuple[torch.Tensor, Any]:
        """Computes loss (shapes: see `LossModule`) and predictions with weights that are gathered on read."""
        with self._gather_on_read():
            return compute(inputs, targets)

    def _gathering(self, weights: ShardedWeights) -> AbstractContextManager[None]:
        return gather_on_read(weights, self._variables)

    def predict(self, inputs: Any) -> Any:
        with self._gather_on_read():
            return super().predict(inputs)

    def has_own_denominator(self, inputs: Any, targets: Any) -> bool:
        """Computed with whatever the ungathered parameters hold: only the loss's shape matters."""
        with torch.no_grad():
            loss, _ = self._loss_computers[False](inputs, targets)
        return bool(loss.dim())

    def notes(self, inputs: Any, targets: Any) -> list[str]:
        """None: `sharded_notes` says in the plan that nothing is captured."""
        return []

    def _local_slots(self) -> dict[str, TensorOrShard]:
        return {name: self._local_slot(slot) for name, slot in self._slots().items()}

    def _local_slot(self, slot: keras.Variable) -> TensorOrShard:
        """This replica's shard of a sharded weight's slot, in its local shape; other tensors as they are."""
        index = self._indices.get(id(slot))
        if index is None or self.weights is None:
            tensor: torch.Tensor = slot.value
            return tensor
        return self.weights.as_shard(index, slot.value)

    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        slots = self._local_slots()
        if name not in slots:
            raise IsotrainError(unknown_name("optimizer slot", name, slots))
        overwrite(f"optimizer/{name}", slots[name], value)
        if self.update is not None:
            self.update.forget()


def _variable(path: str, shard: torch.Tensor) -> keras.Variable:
    """Variable of a weight's shard, in its local shape, under the weight's name.

    Its optimizer state is named after it.
    """
    with named_like(path) as name:
        return keras.Variable(nn.Parameter(shard), name=name)
