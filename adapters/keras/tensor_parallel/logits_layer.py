"""The layer that computes the logits of a portable model, and its cut.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import keras

from isotrain.adapters.keras import private as keras_private
from isotrain.adapters.keras.tensor_parallel.cut import (
    Cut,
    embed,
    is_dense,
    is_elementwise,
    is_plain,
    positions_of,
    replace_call,
)
from isotrain.adapters.keras.tensor_parallel.parts import Parts
from isotrain.adapters.keras.tensor_parallel.whole_logits import gathering_metrics
from isotrain.plugin import TrainingSpec


class LogitsLayer(NamedTuple):
    """The Dense, or ReversibleEmbedding, whose output is the only output of a model.

    Attributes:
        layer: The layer.
        features: Number of its inputs per position.
        classes: Number of logits per position.
        positions: Number of positions of a sample; None where it varies.
    """

    layer: Any
    features: int
    classes: int
    positions: int | None

    @classmethod
    def of(cls, model: keras.Model) -> Self | None:
        """The layer of the logits of a model, if it can be cut; None if there is none."""
        if isinstance(model, keras.Sequential) and model.built:
            model = keras.Model(model.inputs, model.outputs)
        if not keras_private.is_functional(model) or len(model.outputs) != 1:
            return None
        nodes, output = keras_private.nodes_of(model), model.outputs[0]
        last = [node for node in nodes if any(each is output for each in node.outputs)]
        if len(last) != 1 or any(each is output for node in nodes for each in node.input_tensors):
            return None
        layer = last[0].operation
        calls = [node for node in nodes if node.operation is layer]
        positions = positions_of(output.shape)
        if is_dense(layer) and len(calls) == 1 and is_elementwise(layer.activation):
            return cls(layer, layer.kernel.shape[0], layer.units, positions)
        reverse = [node for node in calls if node.arguments.kwargs.get("reverse")]
        is_reversible = type(layer) is keras.layers.ReversibleEmbedding and is_plain(layer)
        if is_reversible and reverse == last:
            return cls(layer, layer.output_dim, layer.input_dim, positions)
        return None

    @property
    def is_wide(self) -> bool:
        """Whether it has more outputs than inputs, so that it takes more to compute than to exchange."""
        return self.classes > self.features

    @property
    def axes(self) -> list[tuple[keras.Variable, int]]:
        """Its variables, each with the axis along which the classes lie."""
        if isinstance(self.layer, keras.layers.Dense):
            biases = [] if self.layer.bias is None else [(self.layer.bias, 0)]
            return [(self.layer.kernel, 1), *biases]
        untied = [] if self.layer.tie_weights else [(self.layer.reverse_embeddings, 1)]
        return [(self.layer.embeddings, 0), *untied]

    def cut(self, spec: TrainingSpec, parts: Parts) -> Cut:
        """Its cut: each process computes the logits of some classes.

        Args:
            spec: Training spec, for texts.
            parts: The parts of the replica, for texts.
        """
        is_embedding = isinstance(self.layer, keras.layers.Embedding)
        apply = self._apply_to_embedding if is_embedding else self._apply_to_dense
        exchange = self._exchange(spec, parts)
        return Cut(self.layer.name, self.axes, exchange, apply, self.classes)

    def _apply_to_dense(self, parts: Parts) -> None:
        compute = self.layer.call
        replace_call(self.layer, lambda inputs, **options: compute(parts.copy(inputs), **options))

    def _apply_to_embedding(self, parts: Parts) -> None:
        layer, compute = self.layer, self.layer.call

        def call(inputs: Any, reverse: bool = False) -> Any:
            if reverse:
                return compute(parts.copy(inputs), reverse=True)
            vectors = embed(layer, parts, inputs)
            if layer.mask_zero:
                keras_private.set_mask(vectors, keras.ops.not_equal(inputs, 0))
            return vectors

        replace_call(layer, call)

    def _exchange(self, spec: TrainingSpec, parts: Parts) -> str:
        """Text for what the parts exchange in a step."""
        forward, gathering = parts.numbers_of_max + 2, gathering_metrics(spec)
        item = 8 if spec.precision == "float64" else 4
        compute_item = 2 if self.layer.compute_dtype in ("bfloat16", "float16") else item
        nbytes = (self.positions or 1) * (forward * item + self.features * compute_item)
        looked_up = self.features if isinstance(self.layer, keras.layers.Embedding) else 0
        unit = "sample" if self.positions else "position"
        text = (
            f"exchange {forward} numbers a position forward, for the loss, in place of {self.classes} logits,"
            f" and sum {self.features} backward: {nbytes} bytes a {unit}"
        )
        if looked_up:
            text += f"; and they sum {looked_up} numbers a position forward, of vectors looked up"
        if gathering:
            text += (
                f"; metrics ({', '.join(gathering)}) take whole logits: the parts sum {self.classes}"
                " numbers a position more"
            )
        elif spec.metrics:
            names = ", ".join(component.label for component in spec.metrics)
            more = 2 * parts.numbers_of_max * len(spec.metrics)
            text += f"; metrics ({names}) exchange {more} numbers a position more"
        return text
