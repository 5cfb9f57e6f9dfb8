"""A native TensorFlow model that calls modules one after the other, split between them into chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from isotrain.adapters.common.outputs import OutputSelector
from isotrain.adapters.common.pipeline.checks import MASK_AT_SPLIT, MASKED_LOSS
from isotrain.adapters.common.pipeline.sequential import (
    Call,
    Modules,
    SequentialChunk,
    SequentialModel,
)
from isotrain.adapters.common.pipeline.split_model import (
    PipelineLosses,
    PipelineModel,
    no_comparison_needed,
)
from isotrain.adapters.keras import losses as keras_losses
from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.model import LayerLosses
from isotrain.adapters.keras.pipeline import KerasPipelineLoss, KerasPipelineModel
from isotrain.adapters.tensorflow.base.modules import named_modules
from isotrain.adapters.tensorflow.base.private_api import generators_of
from isotrain.adapters.tensorflow.base.without_values import AbstractTensor, computed_if_possible
from isotrain.adapters.tensorflow.trainer.base import ReplicaTrainer
from isotrain.adapters.tensorflow.trainer.loss import accepts_training, forward
from isotrain.adapters.tensorflow.trainer.state import canonical_names, native, to_numpy
from isotrain.adapters.tensorflow.trainer.weights import weights_of
from isotrain.plugin import PipelineSplit, TrainingSpec, UnsupportedError


class ModuleChunk(SequentialChunk):
    """Consecutive modules, each of which takes the previous one's output.

    Attributes:
        trainable_variables: Trainable weights of the modules.
        with_own: Adds the losses that layers of a Keras model add (`add_loss`) to a loss.
    """

    def __init__(self, *arguments: Any, trained: Sequence[tf.Variable], layer: Any | None) -> None:
        """Takes the modules, whose weights may have any shape.

        Args:
            arguments: Arguments of `SequentialChunk`.
            trained: Trainable weights of the modules.
            layer: Keras layer of the modules, where the model is a Keras model.
        """
        super().__init__(*arguments)
        self.trainable_variables = trained
        self.with_own: Callable[[Any], Any] = tf.identity
        if layer is not None:
            self.with_own = LayerLosses(layer).add_to_loss

    def boundary_tensors(self, tensors: Mapping[int, Any]) -> list[tf.Tensor]:
        """Tensors that the next chunk receives, shapes `[samples, ...]`.

        Raises:
            UnsupportedError: One is not a tensor, or has a mask, which would not be sent along.
        """
        outputs = super().boundary_tensors(tensors)
        if any(keras_private.mask_of(each) is not None for each in outputs):
            raise UnsupportedError(MASK_AT_SPLIT)
        return outputs


class PipelineModules(SequentialModel):
    """Modules that a model calls one after the other, split into chunks; and its losses."""

    sequential_class = "a keras.Sequential"

    def __init__(self, trainer: ReplicaTrainer, spec: TrainingSpec, cut: PipelineSplit) -> None:
        """Splits a model.

        Raises:
            SpecError: There are no such modules, too few, or they do not have all weights.
            UnsupportedError: The model is no sequence of modules, or a module is on both sides of a cut.
        """
        model = trainer.model
        self._spec = spec
        self._trainer = trainer
        self._is_layer = isinstance(model, keras.Layer)
        self._accepts_training = accepts_training(model)
        trainable, others = weights_of(model, spec)
        self._trainable = {id(native(each)) for each in trainable}
        self._named = dict(
            zip(canonical_names([*trainable, *others]), [*trainable, *others], strict=True)
        )
        super().__init__(model, cut)
        self._losses = keras_losses.loss_terms(
            trainer.losses["train"], spec, OutputSelector.of_keras(model)
        )

    def _submodules(self) -> Modules:
        return named_modules(self.model, (tf.Module, keras.Layer))

    def _weights(self) -> Iterable[tuple[str, tf.Variable]]:
        states = generators_of(self.model)
        return [(name, native(each)) for name, each in (self._named | states).items()]

    def _variables(self, module: Any) -> list[tf.Variable]:
        states = generators_of(module).values() if isinstance(module, tf.Module) else ()
        return [native(each) for each in (*getattr(module, "variables", ()), *states)]

    def seeds(self, chunk: int) -> list[Any]:
        """Keras variables of a chunk's seed generators, shape `[2]`: seed, and number of draws so far."""
        local = {identity for _, identity in self._variables_of(self.chunks[chunk].modules)}
        seeds = [each for name, each in self._named.items() if keras_private.is_seed(name)]
        return [each for each in seeds if id(native(each)) in local]

    def _trained(self, module: Any) -> Sequence[tf.Variable]:
        return [each for each in self._variables(module) if id(each) in self._trainable]

    def _call_of(self, modules: Modules) -> Call:
        """Modules get `training` if they and the model take it."""
        calls = [
            (module, self._accepts_training and accepts_training(module)) for _, module in modules
        ]

        def compute(tensor: Any, training: bool) -> Any:
            for module, takes_training in calls:
                tensor = module(tensor, training=training) if takes_training else module(tensor)
            return tensor

        return compute

    def _chunk(self, number: int, modules: Modules, is_last: bool) -> ModuleChunk:
        call = self._call_of(modules)
        layer = SequentialLayer(modules, call) if self._is_layer else None
        trained = [weight for _, module in modules for weight in self._trained(module)]
        return ModuleChunk(
            *(number, modules, is_last, layer or call, self._is_tensor),
            trained=trained,
            layer=layer,
        )

    def _is_tensor(self, value: Any) -> bool:
        return bool(tf.is_tensor(value))

    def _is_equivalent(self, inputs: Any) -> bool:
        """Compared eagerly: a graph optimizer might round one of the two differently."""
        outputs = []
        for compute in (forward(self._spec, self.model, training=False), self.run_sequentially):
            with self._trainer.preserving_training_state():
                outputs.append(computed_if_possible(compute, inputs))
        return are_equal_tensors(*outputs)

    def of(
        self, chunk: ModuleChunk, tensors: Mapping[int, Any], targets: Any
    ) -> tuple[tf.Tensor, Any]:
        """Mean loss of a chunk, a scalar; and of the last one, the predictions.

        Raises:
            UnsupportedError: The loss is normalized by more than the number of targets.
        """
        if chunk is not self.chunks[-1]:
            return chunk.with_own(tf.zeros((), keras.config.floatx())), None
        predictions = tensors[len(self.chunks)]
        loss = keras_losses.means_and_denominators(
            self._losses(targets, predictions), chunk.with_own
        )
        if loss.shape.rank:
            raise UnsupportedError(MASKED_LOSS)
        return loss, predictions


def are_equal_tensors(first: Any, second: Any) -> bool:
    """Whether two values are tensors of one shape with nearly equal elements, if both have values. Local."""
    tensors = (first, second)
    if not all(isinstance(each, AbstractTensor) or tf.is_tensor(each) for each in tensors):
        return False
    if first.shape != second.shape:
        return False
    if any(isinstance(each, AbstractTensor) for each in tensors):
        return True
    return np.allclose(to_numpy(first), to_numpy(second), equal_nan=True)


class SequentialLayer(keras.layers.Layer):
    """Modules of a Keras model as one layer, so that they get `training` and add losses."""

    def __init__(self, modules: Modules, call: Call) -> None:
        super().__init__(autocast=False)
        self.inner = [each for _, each in modules if isinstance(each, keras.Layer)]
        self._call_modules = call
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Output of the modules, one after the other."""
        return self._call_modules(inputs, bool(training))


def split_model(
    trainer: ReplicaTrainer, spec: TrainingSpec, cut: PipelineSplit
) -> tuple[PipelineModel, PipelineLosses, Callable[[Any], None]]:
    """Splits the model of a trainer.

    Returns:
        The split model; its losses; and a function that takes the inputs of a micro-batch and refuses a model
        that does not compute what its chunks do.

    Raises:
        SpecError: The model cannot be split as the spec says.
        UnsupportedError: It cannot be split, or a layer would be on both sides of a cut.
    """
    if _is_split_by_modules(trainer.model, spec, cut):
        modules = PipelineModules(trainer, spec, cut)
        return modules, modules, modules.check_equivalence
    model = KerasPipelineModel(trainer.model, cut.chunks, cut.first_layers)
    return model, KerasPipelineLoss(spec, model, trainer.losses["train"]), no_comparison_needed


def _is_split_by_modules(model: Any, spec: TrainingSpec, cut: PipelineSplit) -> bool:
    """Whether it is split between modules, not by its graph: native, and lists them or has no graph."""
    if not isinstance(model, keras.Layer):
        return True
    has_graph = isinstance(model, keras.Sequential) or keras_private.is_functional(model)
    lists_modules = bool(cut.modules) or hasattr(model, "pipeline_modules")
    return isinstance(spec.model, Mapping) and (lists_modules or not has_graph)
