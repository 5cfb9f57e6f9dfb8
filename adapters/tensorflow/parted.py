"""The group of one TensorFlow process of a fully sharded run, over any exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.tensorflow.exchange import Exchange
from isotrain.adapters.tensorflow.group import TensorFlowReplicaGroup
from isotrain.adapters.tensorflow.parted_program import PartedProgram
from isotrain.adapters.tensorflow.tracing import Pieces, Weights
from isotrain.adapters.tensorflow.weight_update import Gradients
from isotrain.plugin import Batch, Mesh, TrainingSpec


class PartedGroup(TensorFlowReplicaGroup):
    """One replica, which has a part of every weight and slot between steps."""

    _program: PartedProgram

    def __init__(self, spec: TrainingSpec, exchange: Exchange, mesh: Mesh, unit_bytes: int) -> None:
        """Builds the model, and takes its weights apart; called by every process.

        Args:
            spec: What to train.
            exchange: Ties this replica to all others; no strategy knows of them.
            mesh: How parts lie over the replicas.
            unit_bytes: Of weights that are joined together, where layers allow it.
        """
        self._mesh = mesh
        self._unit_bytes = unit_bytes
        super().__init__(spec, tf.distribute.get_strategy(), exchange)

    def _build(
        self, spec: TrainingSpec, scope: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> PartedProgram:
        return PartedProgram(spec, self._exchange, self._mesh, self._unit_bytes)

    def synchronised_step(self, batch: Batch, learning_rate: float) -> tf.Tensor:
        self.part_weights()
        self._set_rate(learning_rate)
        loss, _ = self._on_batch("step", self._trace_parted_step, batch, self._rate_tensor)
        return loss

    def _trace_parted_step(
        self, holes: bool, pieces: Pieces, weights: Weights, rate: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        proofs = self._program.weights.proofs = []
        return self._trace_step(holes, pieces, weights, rate), list(proofs)

    def _reduced(
        self, loss: tf.Tensor, gradients: Gradients, share: tf.Tensor | None
    ) -> tuple[tf.Tensor, Gradients]:
        """Those of the parts are means already."""
        program = self._program
        along = [loss, *program.weighted_statistics(share)]
        loss, *statistics = self._exchange.all_reduce(along, "mean")
        program.agree_on_statistics(statistics)
        return loss, gradients

    def part_weights(self) -> None:
        self._program.weights.let_go()

    def gather_weights(self) -> None:
        weights = self._program.weights
        if not weights.is_whole:
            self._traced.function("gather weights", self._program.trace_gathering)()
            weights.gathered()

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """Gathers the weights for it, and leaves them as they were."""
        was_whole = self._program.weights.is_whole
        self.gather_weights()
        try:
            return super().predict(inputs)
        finally:
            if not was_whole:
                self.part_weights()

    def keep_gradients(self) -> bool:
        return False
