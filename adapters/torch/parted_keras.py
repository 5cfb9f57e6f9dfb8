"""A portable model of which each replica keeps a part of every weight and slot."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch
from torch import nn

from isotrain.adapters import cuts, keras_private
from isotrain.adapters.keras_apart import named_like, require_shardable
from isotrain.adapters.torch.exchange import Communicator
from isotrain.adapters.torch.keras_program import KerasTrainer
from isotrain.adapters.torch.keras_reading import gather_on_read
from isotrain.adapters.torch.keras_update import keras_update
from isotrain.adapters.torch.parted_program import ShardedTrainer
from isotrain.adapters.torch.parted_weights import ShardedWeights
from isotrain.adapters.torch.replaying.recording import Compute
from isotrain.adapters.torch.tensors import TensorOrShard, overwrite
from isotrain.plugin import IsotrainError, DeviceMesh, SpecError, TrainingSpec, unknown_name


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
        units = cuts.fsdp_units(paths, sizes, unit_bytes, "/")
        self.weights = ShardedWeights(self.trainable, units, communicator, mesh)
        self._updated_variables = list(map(_variable, paths, self.weights.local_shards))
        self._make_slots()

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

    def _make_slots(self) -> None:
        """Makes none before the weights are taken apart."""
        self.updated = []
        if self.weights is None:
            return
        variables = self._updated_variables
        self.updated = [variable.value for variable in variables]
        self.optimizer.build(variables)
        self.update = keras_update(self._spec, self.optimizer, variables, self.weights.norms)
        assert self.update is not None, "nothing but what `_require_shardable` lets pass takes Keras' own"
        self._places = {
            id(slot): place
            for slots in keras_private.slots_of(self.optimizer).values()
            for place, slot in enumerate(slots)
        }

    def _graph_cache(self, spec: TrainingSpec, training: bool) -> Compute:
        """What Keras computes: a record would have all weights when it begins."""
        self._computers[training] = self._computer(spec, training)
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
