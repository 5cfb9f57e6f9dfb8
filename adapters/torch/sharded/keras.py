"""A portable model of which each replica keeps a part of every weight and slot."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch
from torch import nn

from isotrain.adapters.common import sharding
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.sharding import named_like, require_shardable
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
    """Within it, a Keras model computes with weights that lie in parts.

    Args:
        weights: They.
        variables: Of the model, in the same order.

    Raises:
        SpecError: A layer takes gradients by torch.func.
    """
    reads = GatheredReads(weights)
    with reads.without_saving_weights(), _Reading(reads, variables):
        yield


class _Reading(keras.StatelessScope):
    """Gives weights, and has all else where it is."""

    def __init__(self, reads: GatheredReads, variables: Sequence[keras.Variable]) -> None:
        super().__init__(collect_losses=True)
        self._reads = reads
        self._places = {id(variable): place for place, variable in enumerate(variables)}

    def get_current_value(self, variable: keras.Variable) -> torch.Tensor | None:
        """A weight as it is read in this place; None for any other variable."""
        place = self._places.get(id(variable))
        if place is None:
            return None
        sample = keras_private.autocast_value(variable, self._reads.sample_of(place))
        return self._reads.read(place, sample.dtype)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Sets what is no weight, as outside of any scope."""
        variable, value = update
        if id(variable) in self._places:
            raise SpecError(
                f"strategy sharded: a layer sets its trainable weight {variable.path} in a forward pass, and"
                " with stage=3 no replica has all of it. Take stage 1 or 2."
            )
        with torch.no_grad():
            variable.value.copy_(value)


class ShardedKerasTrainer(ShardedTrainer, KerasTrainer):
    """Computes as Keras does, with weights that are joined as its layers read them."""

    def __init__(self, spec: TrainingSpec, model: keras.Model) -> None:
        self._places: dict[int, int] = {}
        self._computers: dict[bool, Compute] = {}
        super().__init__(spec, model)

    def shard_weights(self, communicator: Communicator, mesh: DeviceMesh, unit_bytes: int) -> None:
        self._require_shardable()
        paths = [variable.path for variable in self._variables]
        sizes = [variable.value.nbytes for variable in self._variables]
        units = sharding.fsdp_units(paths, sizes, unit_bytes, "/")
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
                f"strategy sharded: {', '.join(wrapped)}: stage=3 joins weights as Keras reads them, and a"
                " torch module in a Keras model reads its own past it. Take stage 1 or 2."
            )

    def _build_optimizer_state(self) -> None:
        """Makes none before the weights are taken apart."""
        self.updated = []
        if self.weights is None:
            return
        variables = self._updated_variables
        self.updated = [variable.value for variable in variables]
        self.optimizer.build(variables)
        self.update = keras_update(self._spec, self.optimizer, variables, self.weights.norms)
        assert self.update is not None, (
            "nothing but what `_require_shardable` lets pass takes Keras' own"
        )
        self._places = {
            id(slot): place
            for slots in keras_private.slots_of(self.optimizer).values()
            for place, slot in enumerate(slots)
        }

    def _graph_cache(self, spec: TrainingSpec, training: bool) -> Compute:
        """What Keras computes: a record would have all weights when it begins."""
        self._computers[training] = self._make_loss_computer(spec, training)
        return functools.partial(self._computed, self._computers[training])

    def _computed(self, compute: Compute, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        with self._gather_on_read():
            return compute(inputs, targets)

    def _joining(self, weights: ShardedWeights) -> AbstractContextManager[None]:
        return gather_on_read(weights, self._variables)

    def predict(self, inputs: Any) -> Any:
        with self._gather_on_read():
            return super().predict(inputs)

    def has_own_denominator(self, inputs: Any, targets: Any) -> bool:
        """Whatever the weights are: of those that are elsewhere it sees none."""
        with torch.no_grad():
            loss, _ = self._computers[False](inputs, targets)
        return bool(loss.dim())

    def notes(self, inputs: Any, targets: Any) -> list[str]:
        """None: `sharded_notes` tells in the plan that nothing is recorded."""
        return []

    def _slots_here(self) -> dict[str, TensorOrShard]:
        return {name: self._slot_here(slot) for name, slot in self._slots().items()}

    def _slot_here(self, slot: keras.Variable) -> TensorOrShard:
        place = self._places.get(id(slot))
        if place is None or self.weights is None:
            tensor: torch.Tensor = slot.value
            return tensor
        return self.weights.as_shard(place, slot.value)

    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        slots = self._slots_here()
        if name not in slots:
            raise IsotrainError(unknown_name("optimizer slot", name, slots))
        overwrite(f"optimizer/{name}", slots[name], value)
        if self.update is not None:
            self.update.forget()


def _variable(path: str, part: torch.Tensor) -> keras.Variable:
    """A variable of a part of a weight, under the name of the weight, which slots are named after."""
    with named_like(path) as name:
        return keras.Variable(nn.Parameter(part), name=name)
